"""Chunks shorter than a block: what a row that went back to a chunk's start still has."""

import dataclasses

import jax
import numpy as np
import pytest
from lockstep import EAGER, JIT, Setup, copy_of, i32, leaves_equal
from test_traces import copies, decode
from world import World

import kvpool as kv

# Block 1 is positions 8..15, and has the starts of three chunks: 9, 12, 15.
SETUP = Setup((("chunk", 3), "all"), (10, 14), block=8, rows=4, max_len=32, step=17)
OK, UNREACHABLE = kv.Status.OK, kv.Status.UNREACHABLE


def cut(world, length, row=0):
    """The status of one row's cut."""
    return int(world.truncate({r: length if r == row else -1 for r in range(4)}).status[row])


def gone_back(length=15, on_to=None, verbs=JIT):
    """Row 0 at 25, where block 1 is not held, goes back to `length`, and on from there."""
    world = World(SETUP, verbs)
    world.admit(0)
    world.step({0: 17})
    world.step({0: 8})
    assert world.held(0) == [3]
    assert cut(world, length) == OK
    assert world.held(0) == [1]
    if on_to is not None:
        world.step({0: on_to - length})
    return world


def prefix(world, length, **columns):
    """A prefix as row 0 has it, with other ids in some columns of the chunk's group."""
    chunk = world.table(0)
    for column, block in columns.items():
        chunk[int(column[1:])] = block
    return {"lengths": length, "blocks": {"chunk3": chunk, "full": world.table(0, 1)},
            "shared": True, "tokens": [world.tokens[0][:length]]}  # fmt: skip


@pytest.mark.parametrize("verbs", [JIT, EAGER], ids=["jit", "eager"])
def test_a_fresh_block_lacks_what_comes_before_the_cut(verbs):
    world = gone_back(verbs=verbs)
    assert [cut(world, n) for n in (14, 13, 11, 10)] == [UNREACHABLE] * 4  # 14 reads 12, 13
    assert cut(world, 15) == OK
    assert cut(world, 12) == OK  # no past: the block that it has will do
    world.step({0: 2})
    assert [cut(world, n) for n in (13, 11, 10)] == [OK, UNREACHABLE, UNREACHABLE]


def test_a_row_that_never_went_back_has_it():
    world = World(SETUP)
    world.admit(0)
    world.step({0: 17})
    assert world.held(0) == [1, 2]
    assert [cut(world, n) for n in (14, 11, 10)] == [OK] * 3


def test_what_is_written_after_the_cut_is_there():
    world = gone_back(on_to=17)
    assert world.held(0) == [1, 2]
    assert [cut(world, n) for n in (14, 13)] == [UNREACHABLE] * 2
    assert [cut(world, n) for n in (16, 15, 14)] == [OK, OK, UNREACHABLE]


@pytest.mark.parametrize(("on_to", "owed"), [(None, 1), (17, 0)], ids=["tail copied", "shared"])
def test_a_fork_has_no_more_than_its_source(on_to, owed):
    world = gone_back(on_to=on_to)
    result = world.fork([0], [1])
    own = np.asarray(result.copies["chunk3"][1])[0] == world.table(1)[1]
    assert own == bool(owed)
    world.release(0)
    assert [cut(world, n, row=1) for n in (14, 13, 15, 14)] == [UNREACHABLE] * 2 + [OK, UNREACHABLE]


def test_rows_that_cut_a_shared_block_in_one_call():
    """The block has no holder left after the call; each row's copy still lacks what it lacked."""
    world = gone_back(on_to=17)
    world.fork([0], [1])
    result = world.truncate([15, 15, -1, -1])
    assert (np.asarray(result.copies["chunk3"][0])[:2] >= 0).all()
    assert np.asarray(world.truncate([14, 14, -1, -1]).status).tolist()[:2] == [UNREACHABLE] * 2


def test_a_prefix_up_to_a_chunks_start_without_its_block():
    world = World(SETUP)
    world.admit(0)
    world.step({0: 16})
    assert world.held(0) == [1]
    result = world.admit(1, **prefix(world, 15, c1=kv.NULL_BLOCK))
    assert bool(result.ok)
    assert np.asarray(result.copies["chunk3"][0]).tolist() == [kv.NULL_BLOCK]
    assert [cut(world, n, row=1) for n in (14, 13)] == [UNREACHABLE] * 2
    # A block that nobody holds is as good as none, and is not copied.
    nobodys = world.model.pools["chunk3"] - 1
    result = world.admit(2, **prefix(world, 15, c1=nobodys))
    assert np.asarray(result.copies["chunk3"][0]).tolist() == [kv.NULL_BLOCK]
    assert cut(world, 14, row=2) == UNREACHABLE
    # With its block the prefix is copied, whether or not a query at 15 reads it.
    assert bool(world.admit(3, **prefix(world, 15)).ok)
    assert [cut(world, n, row=3) for n in (14, 13)] == [OK, OK]


def test_a_prefix_that_names_a_block_which_lacks_tokens():
    world = gone_back(on_to=17)
    world.retain({"chunk3": [world.table(0)[1]]})
    assert int(world.admit(1, **prefix(world, 14)).status[0]) == UNREACHABLE
    assert int(world.admit(1, **prefix(world, 17)).status[0]) == OK
    assert int(world.admit(2, **prefix(world, 16)).status[0]) == OK
    world.release(0)
    assert [cut(world, 14, row=r) for r in (1, 2)] == [UNREACHABLE] * 2
    assert [cut(world, 15, row=r) for r in (1, 2)] == [OK] * 2


def test_a_block_that_is_handed_out_again_lacks_nothing():
    world = gone_back()
    block = world.table(0)[1]
    world.release(0)
    world.admit(1)
    world.step({1: 8})
    assert world.table(1)[0] == block
    assert [cut(world, n, row=1) for n in (5, 4)] == [OK, OK]  # 5 reads 3, 4


def test_a_refused_cut_changes_nothing():
    world = gone_back()
    before = copy_of(world.state)
    state, result = kv.truncate(world.state, i32([14, -1, -1, -1]))
    assert not bool(result.ok)
    assert leaves_equal(state, before)


def test_a_cut_refused_for_want_of_blocks_changes_nothing():
    """The chunk's block would do, but that of the other group is shared, and no copy is to be had.

    A cut at 12 would make row 0 lack only 8..11.
    """
    world = gone_back()
    world.retain({"full": [world.table(0, 1)[1]]})
    world.admit(1, 2, 3)
    world.step({1: 17, 2: 17, 3: 17})
    world.step({1: 15, 2: 15, 3: 8})
    world.step({3: 7})
    assert world.free(1) == 0
    assert cut(world, 12) == kv.Status.OUT_OF_BLOCKS  # compares the states


def test_check_names_a_block_that_lacks_what_is_read():
    state = gone_back(on_to=17).state
    pool = state.pool
    block = int(np.asarray(kv.block_table(state, "chunk3"))[0, 1])
    assert pool.unwritten[block] == 7
    for lacks, words in ((8, "lacks its first 8 tokens"), (-1, "lacks its first -1 tokens")):
        broken = dataclasses.replace(pool, unwritten=pool.unwritten.at[block].set(lacks))
        with pytest.raises(kv.InvariantError, match=words):
            kv.check(dataclasses.replace(state, pool=broken))


@pytest.mark.parametrize(
    ("kind", "kept"),
    [(("chunk", 3), 10), (("chunk", 7), 10), (("chunk", 8), None), (("window", 1), None)],
)
def test_only_chunks_shorter_than_a_block_keep_account(kind, kept):
    setup = Setup((kind,), (10,), block=8)
    unwritten = kv.init_state(setup.spec, setup.plan).pool.unwritten
    assert (unwritten is None) if kept is None else unwritten.shape == (kept,)


def go_back(state, num):
    return kv.truncate(state, num)[0]


@pytest.mark.parametrize("program", [decode, go_back])
def test_a_step_copies_no_large_array(program):
    setup = Setup((("chunk", 3), "all"), (2503, 4099), block=8, rows=64, max_len=8 * 331, step=1)
    state = kv.init_state(setup.spec, setup.plan)
    num = np.ones(setup.rows, np.int32)
    compiled = jax.jit(program, donate_argnums=0).lower(state, num).compile()
    assert copies(compiled, state) == []
