"""Recurrent state: zero at the start, copied when shared, written once a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lockstep import MIXED, Lockstep, Setup, i32
from test_core_cases import names
from world import World, state_of

import kvpool as kv

ALONE = Setup(("state",), (4,), block=4, rows=3, max_len=32, step=8)


def put_state(world, row, num, value):
    """One step of `num` tokens after which a row's state is `value`, whatever the tokens were."""
    world.reserve({row: num})
    view = kv.step_view(world.state, world._vector({row: num}))
    sums = jnp.full((world.setup.rows, 2), value, jnp.float32)
    world.storage = kv.write_state(world.storage, view, 0, {"sum": sums})
    world.advance({row: num})


def state_value(world, row, num=0):
    view = kv.step_view(world.state, world._vector({row: num}))
    return np.asarray(kv.read_state(world.storage, view, 0)["sum"])[row].tolist()


def test_st01_a_fresh_row_reads_zero_from_a_used_block():
    world = World(Setup(("state",), (1,), block=4, rows=2, max_len=32, step=8))
    world.admit(0)
    put_state(world, 0, 3, 9.0)
    assert state_value(world, 0) == [9.0, 9.0]
    Lockstep.release(world, 0)  # and no block is cleared or filled
    Lockstep.admit(world, 1)
    world.reserve({1: 2})
    assert state_value(world, 1) == state_value(world, 1, num=2) == [0.0, 0.0]


def test_st02_a_snapshot_does_not_go_on_with_its_row():
    world = World(ALONE)
    world.admit(0)
    put_state(world, 0, 8, 80.0)
    put_state(world, 0, 8, 160.0)
    result = Lockstep.snapshot(world, 0)
    world.storage = kv.copy_blocks(world.storage, result.copies)
    snap = np.asarray(result.blocks["state"])
    put_state(world, 0, 8, 240.0)
    prefix = {"lengths": 16, "blocks": {"state": snap}, "shared": True}
    result = Lockstep.admit(world, 1, **prefix)
    world.storage = kv.copy_blocks(world.storage, result.copies)
    assert state_value(world, 1) == [160.0, 160.0]
    put_state(world, 1, 4, state_value(world, 1)[0] + 40)
    assert (state_value(world, 0)[0], state_value(world, 1)[0]) == (240.0, 200.0)
    result = Lockstep.admit(world, 2, **prefix)
    world.storage = kv.copy_blocks(world.storage, result.copies)
    assert state_value(world, 2) == [160.0, 160.0]
    world.drop({"state": snap})
    assert world.free() == 1


def test_st03_a_row_starts_from_an_imported_state():
    world = World(ALONE)
    world.admit(0)
    put_state(world, 0, 8, 5.0)
    result = Lockstep.snapshot(world, 0)
    snap = np.asarray(result.blocks["state"])
    data = kv.export_blocks(world.storage, "state", i32([world.table(0)[0]]))
    world.storage = kv.import_blocks(world.storage, "state", snap, data)
    Lockstep.release(world, 0)
    result = Lockstep.admit(world, 1, lengths=8, blocks={"state": snap}, shared=True)
    world.storage = kv.copy_blocks(world.storage, result.copies)
    before = state_value(world, 1, num=1)
    put_state(world, 1, 1, before[0] + 1)
    assert state_value(world, 1) == [6.0, 6.0]


def test_st04_states_are_counted_by_rows_and_not_by_tokens():
    state = kv.RecurrentState({"s": ((4,), "float32")})
    spec = kv.CacheSpec.from_layers([kv.FullAttention(1, 8), state, state], block_size=16)
    plan = kv.plan(
        spec, budget_bytes=100 * 16 * 32 + 4 * 32, max_seqs=4, max_seq_len=4096, max_step_tokens=16
    )
    assert plan.num_blocks == {"full": 100, "state": 4}


def test_st05_ids_outside_the_pool_are_skipped_and_read_as_fill():
    world = World(ALONE)
    zero = kv.export_blocks(world.storage, "state", i32([0, 1, 2, 3]))
    ids = i32([3, 7, 13])
    source = kv.export_blocks(world.storage, "state", ids)
    values = jax.tree.map(lambda x: jnp.zeros_like(x) + i32(ids).astype(x.dtype)[:, None], source)
    storage = kv.import_blocks(world.storage, "state", ids, values)
    back = kv.export_blocks(storage, "state", ids)
    for got, put in zip(jax.tree.leaves(back), jax.tree.leaves(values), strict=True):
        assert (np.asarray(got)[0] == np.asarray(put)[0]).all()
        assert not np.asarray(got)[1:].any()
    rest = kv.export_blocks(storage, "state", i32([0, 1, 2]))
    for got, was in zip(jax.tree.leaves(rest), jax.tree.leaves(zero), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(was)[:3].tobytes()


def test_st06_sizes_and_bits_of_a_large_state():
    layer = kv.RecurrentState({"conv": ((8192, 3), "bfloat16"), "ssm": ((32, 128, 128), "float32")})
    spec = kv.CacheSpec.from_layers([layer] * 36)
    assert spec.groups[0].bytes_per_block == 36 * 2_146_304 == 77_266_944
    spec = kv.CacheSpec.from_layers([layer] * 2)
    plan = kv.plan(spec, num_blocks={"state": 1}, max_seqs=1, max_seq_len=8)
    state, storage = kv.init(spec, plan)
    state, _ = kv.admit(state, i32([0]))
    state, _ = kv.reserve(state, i32([1]))
    exact = np.float32(1 + 2.0**-20)
    values = {
        "conv": jnp.ones((1, 8192, 3), jnp.bfloat16),
        "ssm": jnp.full((1, 32, 128, 128), exact),
    }
    storage = kv.write_state(storage, kv.step_view(state, i32([1])), 1, values)
    state = kv.advance(state, i32([1]))
    back = kv.read_state(storage, kv.step_view(state, i32([0])), 1)
    assert (np.asarray(back["ssm"]) == exact).all()
    assert back["conv"].dtype == jnp.bfloat16
    assert (np.asarray(back["conv"]) == 1).all()


def test_st07_a_state_cannot_be_cut_back():
    world = World(MIXED)
    world.admit(0)
    for _ in range(3):
        world.step({0: 4})
    assert names(world.truncate({0: 12}))[0] == "OK"
    assert names(world.truncate({0: 11}))[0] == "UNREACHABLE"
    assert world.n(0) == 12
    assert len(world.held(0)) == 6
    assert names(world.truncate({0: 0}))[0] == "OK"
    assert world.free(2) == 6


def test_writes_of_state_skip_rows_without_tokens():
    world = World(ALONE)
    world.admit(0, 1)
    world.step({0: 2, 1: 3})
    world.step({1: 1})  # the write of this step carries NaN for the others
    world.verify()


def test_a_snapshot_at_length_zero_is_null():
    both = Lockstep(ALONE)
    both.admit(0, 1)
    both.reserve({1: 2})
    result = both.snapshot(0, 1)
    assert names(result) == ["OK", "OK"]
    assert np.asarray(result.blocks["state"]).tolist() == [kv.NULL_BLOCK] * 2
    assert both.free() == 3


@pytest.mark.parametrize("tokens", [[], [1.0], [2.0, 3.0]])
def test_the_model_of_a_state_is_sum_and_last(tokens):
    assert state_of(tokens) == [sum(tokens), (tokens or [0.0])[-1]]
