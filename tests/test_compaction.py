"""Compaction: blocks move together, and whoever names them follows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lockstep import JIT, Setup, i32, leaves_equal

import kvpool as kv

# Bytes of a block: 32, 64 and 16, so 4, 2 and 8 in a slab of 128.
SETUP = Setup(
    ("all", ("window", 5), "state"), (None,) * 3, block=1, rows=12, max_len=40, step=6,
    memory=60 * 128, slab=128, heads=(1, 2, 2), pooling="elastic",
)  # fmt: skip
NAMES = ("full", "window5", "state")


def scattered(seed, rows=range(0, 12, 2)):
    """A state after much coming and going, storage with a word of its own in every place."""
    random = np.random.default_rng(seed)
    state, _ = kv.init(SETUP.spec, SETUP.plan)
    state, _ = JIT.admit(state, np.arange(12, dtype=np.int32))
    for _ in range(12):
        num = i32(random.integers(0, 4, 12))
        state, result = JIT.reserve(state, num, each=True)
        state = JIT.advance(state, jnp.where(result.granted, num, 0))
    state = JIT.release(state, i32(list(rows)))
    kv.check(state)
    words = SETUP.plan.array_bytes[0] // 4
    array = np.arange(SETUP.plan.slabs * words, dtype=np.uint32).reshape(-1, words)
    return state, kv.Storage((jnp.asarray(array),), SETUP.plan)


def content(state, storage):
    """The words of every block that a table names, in the order of the table."""
    blocks = {}
    for name in NAMES:
        ids = kv.block_table(state, name)
        exported = kv.export_blocks(storage, name, ids.reshape(-1))
        blocks[name] = np.asarray(ids) >= 0, np.asarray(exported)
    return blocks


def same_content(before, after):
    for name in NAMES:
        np.testing.assert_array_equal(before[name][0], after[name][0])
        np.testing.assert_array_equal(before[name][1], after[name][1])


def used_slabs(state):
    return SETUP.plan.slabs - int(state.pool.slabs.num_free)


def fewest_slabs(state):
    """Slabs that hold as many blocks as are held, by hand."""
    sizes = zip(state.pool.offsets, state.pool.sizes, SETUP.plan.pool_per_slab, strict=True)
    holders = np.asarray(state.pool.holders)
    return sum(-(-int((holders[at : at + n] > 0).sum()) // each) for at, n, each in sizes)


@pytest.mark.parametrize("seed", range(4))
def test_blocks_end_up_in_the_fewest_slabs_and_keep_their_content(seed):
    state, storage = scattered(seed)
    before, lengths = content(state, storage), np.asarray(state.seq_lens)
    assert used_slabs(state) > fewest_slabs(state)
    state, storage, _ = kv.compact(state, storage)
    kv.check(state)
    assert used_slabs(state) == fewest_slabs(state)
    same_content(before, content(state, storage))
    np.testing.assert_array_equal(lengths, state.seq_lens)


def test_a_few_moves_at_a_time_do_the_same():
    state, storage = scattered(0)
    before, slabs = content(state, storage), used_slabs(state)
    for _ in range(100):
        state, storage, moves = kv.compact(state, storage, max_moves=2)
        kv.check(state)
        same_content(before, content(state, storage))
        assert used_slabs(state) <= slabs
        slabs = used_slabs(state)
        if not any((np.asarray(src) >= 0).any() for src, _ in moves.values()):
            break
    assert slabs == fewest_slabs(state)


def test_a_compact_state_is_left_as_it_is():
    state, storage = scattered(1)
    state, storage, _ = kv.compact(state, storage)
    again, same, moves = kv.compact(state, storage)
    assert leaves_equal((state, storage), (again, same))
    assert all((np.asarray(ids) == kv.NULL_BLOCK).all() for pair in moves.values() for ids in pair)


def test_rows_go_on_after_it():
    state, storage = scattered(2)
    state, storage, _ = kv.compact(state, storage)
    ones = i32([0, 1] * 6)
    for _ in range(4):
        state, result = JIT.reserve(state, ones, each=True)
        assert result.ok
        state = JIT.advance(state, ones)
        kv.check(state)
    state = JIT.release(state, i32([1, 3, 5, 7, 9, 11]))
    kv.check(state)
    assert used_slabs(state) == 0


def test_retained_blocks_and_snapshots_are_followed():
    state, storage = scattered(3, rows=())
    state, result = kv.snapshot(state, i32([1, 4, 11]))
    storage = kv.copy_blocks(storage, result.copies)
    kept = {
        "full": kv.block_table(state, "full")[4, :6],
        "window5": kv.block_table(state, "window5")[11],
    }
    state = kv.retain(state, kept)
    kept["state"] = result.blocks["state"]
    state = JIT.release(state, i32([0, 2, 3, 4, 6, 8, 9, 11]))
    before = {name: kv.export_blocks(storage, name, ids) for name, ids in kept.items()}
    state, storage, moves = kv.compact(state, storage)
    kv.check(state)
    after = kv.follow(moves, kept)
    assert any((np.asarray(after[name]) != np.asarray(kept[name])).any() for name in kept)
    for name, ids in after.items():
        np.testing.assert_array_equal(before[name], kv.export_blocks(storage, name, ids))
    state = JIT.release(kv.drop(state, after), i32([1, 5, 7, 10]))
    kv.check(state)  # nothing was dropped that was not retained
    assert used_slabs(state) == 0


def test_it_runs_under_jit():
    state, storage = scattered(0)
    eager = kv.compact(state, storage, max_moves=8)
    jitted = jax.jit(kv.compact, static_argnames="max_moves")(state, storage, max_moves=8)
    assert leaves_equal(eager, jitted)


def test_memory_of_a_group_s_own_is_not_touched():
    alone = {"pooling": "independent", "memory": None, "slab": None, "blocks": (12, 12, 12)}
    setup = dataclasses.replace(SETUP, **alone)
    state, storage = kv.init(setup.spec, setup.plan)
    state, _ = kv.admit(state, i32([0, 1]))
    state, _ = kv.reserve(state, i32([3, 1] + [0] * 10))
    state = kv.release(state, i32([0]))
    again, same, moves = kv.compact(state, storage, max_moves=4)
    assert leaves_equal((state, storage), (again, same))
    assert all(np.asarray(ids).tolist() == [-1] * 4 for pair in moves.values() for ids in pair)


def test_a_storage_of_another_plan_is_refused():
    state, _ = scattered(0)
    other = dataclasses.replace(SETUP, rows=11)
    with pytest.raises(kv.SpecError, match="storage: made for another plan"):
        kv.compact(state, kv.init_storage(other.spec, other.plan))
    with pytest.raises(kv.SpecError, match="max_moves"):
        kv.compact(state, kv.init_storage(SETUP.spec, SETUP.plan), max_moves=0)


def test_ids_to_follow_are_checked():
    moves = {"full": (i32([3, -1]), i32([7, -1]))}
    assert kv.follow(moves, {"full": i32([3, 4, -1])})["full"].tolist() == [7, 4, -1]
    assert kv.follow(moves, {"full": [2**40, 3]})["full"].tolist() == [2**31 - 1, 7]
    with pytest.raises(kv.SpecError, match="no group 'state'; there are moves of full"):
        kv.follow(moves, {"state": i32([3])})
    with pytest.raises(ValueError, match=r"blocks\['full'\]: wanted integers, got float"):
        kv.follow(moves, {"full": [1.0]})
