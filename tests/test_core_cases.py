"""Blocks of rows over time: reserve, settle, release; what is free, what is refused."""

import dataclasses

import jax
import numpy as np
import pytest
from lockstep import MIXED, PLAIN, SMALL, Lockstep, Setup, copy_of, leaves_equal
from world import World

import kvpool as kv


def names(result):
    return [kv.Status(int(s)).name for s in result.status]


def grown(world, row, tokens):
    """Settles `tokens` more tokens of a row, in steps that the setup allows."""
    while tokens > 0:
        k = min(tokens, world.setup.step)
        result = world.step({row: k})
        assert bool(result.granted[row])
        tokens -= k


def test_bk01_reserve_grows_by_blocks():
    both = Lockstep(PLAIN)
    both.admit(0)
    for tokens, new in ((4, 1), (10, 2), (10, 0), (1, 0), (0, 0)):
        free = both.free()
        result = both.reserve({0: tokens})
        assert bool(result.granted[0]) == (tokens > 0)
        assert bool(result.ok)
        assert (free - both.free(), both.n(0)) == (new, 0)
    both.release(0)
    assert both.free() == 12
    assert both.held(0) == []


@pytest.mark.parametrize(
    ("n", "m", "new"),
    [(2, 4, 0), (0, 8, 2), (4, 7, 1), (2, 8, 1), (4, 11, 2), (2, 11, 2), (4, 4, 0)],
)
def test_bk02_blocks_from_one_length_to_another(n, m, new):
    both = Lockstep(PLAIN)
    both.admit(0)
    both.reserve({0: n})
    both.advance({0: n})
    free = both.free()
    both.reserve({0: m - n})
    assert free - both.free() == new


def test_bk02_tokens_lie_in_the_slots_of_their_columns():
    world = World(PLAIN)
    world.admit(0)
    grown(world, 0, 2)
    world.step({0: 6})
    first, second = world.table(0)[:2]
    data = kv.export_blocks(
        world.storage, world.setup.group(0), np.array([first, second], np.int32)
    )
    (words,) = jax.tree.leaves(data)
    keys = np.asarray(words).reshape(2, -1).view(np.float32).reshape(2, 2, 4, 4)[:, 0, :, 0]
    assert keys.reshape(-1).tolist() == world.tokens[0]


def test_bk03_a_decode_step_takes_a_block_where_the_last_is_full():
    both = Lockstep(PLAIN)
    both.admit(0, 1, 2, 3)
    lens = [4, 5, 8, 11]
    both.reserve(lens)
    both.advance(lens)
    before = [len(both.held(r)) for r in range(4)]
    assert bool(both.reserve([1, 1, 1, 1]).ok)
    assert [len(both.held(r)) - b for r, b in enumerate(before)] == [1, 0, 1, 0]


def test_bk04_room_in_every_group_or_in_none():
    setup = Setup(("all", ("window", 4)), (6, 4), block=2, rows=2, max_len=8, step=8)
    both = Lockstep(setup)
    both.admit(0, 1)
    both.reserve({0: 4})
    both.advance({0: 4})
    result = both.reserve({1: 6})
    assert names(result) == ["SKIPPED", "OUT_OF_BLOCKS"]
    assert {g: int(x) for g, x in result.shortfall.items()} == {"full": 0, "window4": 1}
    assert (both.free(0), both.free(1)) == (4, 2)
    assert bool(both.reserve({1: 4}).granted[1])
    assert (both.free(0), both.free(1)) == (2, 0)


def test_bk05_some_rows_or_no_row():
    both = Lockstep(SMALL)
    both.admit(0, 1, 2, 3, 4)
    both.reserve({4: 1})  # three blocks are left
    result = both.reserve([4, 4, 4, 4, 0, 0])
    assert names(result)[:4] == ["OUT_OF_BLOCKS"] * 4
    assert not bool(result.ok)
    assert both.free() == 3
    assert int(result.shortfall["full"]) == 1
    result = both.reserve([4, 4, 4, 4, 0, 0], each=True)
    assert np.asarray(result.granted).tolist() == [True, True, True, False, False, False]
    assert both.free() == 0
    assert both.held(3) == []
    assert int(result.shortfall["full"]) == 1


def test_rows_are_served_in_order_and_refused_ones_count():
    both = Lockstep(SMALL)
    both.admit(0, 1, 2, 3)
    both.reserve({2: 1})
    result = both.reserve([8, 8, 3, 1, 0, 0], each=True)  # blocks asked: 2, 2, 0, 1 with 3 free
    assert np.asarray(result.granted).tolist() == [True, False, True, False, False, False]
    assert both.free() == 1


def test_bk06_released_twice_is_free_once():
    both = Lockstep(SMALL)
    both.admit(0, 1, 2, 3, 4, 5)
    both.reserve({0: 8})
    both.release(0)
    both.release(0)  # the lockstep asserts that this one is reported
    assert both.free() == 4
    for row in (1, 2, 3, 4):
        assert bool(both.reserve({row: 1}).ok)
    assert len({both.table(row)[0] for row in (1, 2, 3, 4)}) == 4
    assert names(both.reserve({5: 1}))[5] == "OUT_OF_BLOCKS"


def test_bk07_a_row_used_again_shows_nothing_of_its_last_tenant():
    world = World(PLAIN)
    world.admit(0, 1)
    grown(world, 0, 20)
    assert len(world.held(0)) == 5
    old = set(world.table(0)[:5])
    world.release(0)
    world.step({1: 8})
    assert set(world.table(1)[:2]) <= old
    world.admit(0)
    world.step({0: 12})
    assert world.held(0) == [0, 1, 2]
    before = copy_of(world.storage)
    world.write([2, 0, 0, 0])  # positions 12 and 13: no room was reserved for them
    assert leaves_equal(before, world.storage)
    world.verify()


def test_bk08_never_and_not_now_are_told_apart():
    both = Lockstep(PLAIN)
    both.admit(0)
    for _ in range(2):
        both.reserve({0: 11})
        both.advance({0: 11})
    assert names(both.reserve({0: 3}))[0] == "TOO_LONG"
    assert both.free() == 6
    assert bool(both.reserve({0: 2}).ok)

    both = Lockstep(SMALL)
    both.admit(0, 1)
    assert names(both.reserve({0: 17}))[0] == "NEVER"  # five blocks of a pool of four
    assert both.fits({0: 17})[0] == "NEVER"
    both.reserve({1: 5})
    assert names(both.reserve({0: 9}))[0] == "OUT_OF_BLOCKS"
    assert both.fits({0: 9})[0] == "LATER"
    both.release(1)
    assert bool(both.reserve({0: 9}).ok)


def test_bk09_nothing_to_do_changes_nothing():
    world = World(MIXED)
    world.verify()  # no live row: only fill
    world.admit(0, 1, 2)
    result = world.reserve([0, 3, 0])
    assert np.asarray(result.granted).tolist() == [False, True, False]
    assert bool(result.ok)
    assert world.held(0) == world.held(2) == []
    before = copy_of((world.state, world.storage))
    world.reserve([0, 0, 0])
    world.write([0, 0, 0])
    world.write([0, 0, 0], ragged=True)
    world.advance([0, 0, 0])
    assert leaves_equal(before, (world.state, world.storage))
    free = world.free()
    world.release(0)
    assert world.free() == free


def test_bk10_a_sequence_run_again_starts_from_zero():
    world = World(MIXED)
    for _ in range(2):
        world.admit(0)
        for _ in range(10):
            world.step({0: 1})
        assert world.held(0, 1) == [3, 4]
        world.release(0)
        assert [world.free(layer) for layer in range(3)] == [12, 9, 6]


def test_bk11_verbs_are_pure():
    both = Lockstep(PLAIN)
    both.admit(0, 1)
    start = both.state
    kept = copy_of(start)
    num = np.array([5, 3, 0, 0], np.int32)
    assert leaves_equal(kv.reserve(start, num), kv.reserve(start, num))
    kv.release(start, np.array([0], np.int32))
    assert leaves_equal(kept, start)


def broken(state, what, group="full", block=0):
    """A state that breaks one invariant, made by hand."""
    pool, table = state.pool, state.table
    if what == "free and in a table":
        free = pool.free_ids.at[int(pool.num_free[0])].set(block)
        pool = dataclasses.replace(pool, free_ids=free, num_free=pool.num_free.at[0].add(1))
    elif what == "a holder too many":
        pool = dataclasses.replace(pool, holders=pool.holders.at[block].add(1))
    elif what == "settled beyond what is held":
        return dataclasses.replace(state, seq_lens=state.seq_lens.at[1].set(9))
    elif what == "NULL in a live column":
        ids = table.block_ids.at[1, 0].set(kv.NULL_BLOCK)
        table = dataclasses.replace(table, block_ids=ids)
    return dataclasses.replace(state, pool=pool, table=table)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("free and in a table", "block"),
        ("a holder too many", "block"),
        ("settled beyond what is held", "row 1"),
        ("NULL in a live column", "row 1"),
    ],
)
def test_bk12_check_names_what_is_broken(what, named):
    both = Lockstep(PLAIN)
    both.admit(1)
    both.reserve({1: 8})
    both.advance({1: 8})
    block = both.table(1)[0]
    with pytest.raises(kv.InvariantError) as error:
        kv.check(broken(both.state, what, block=block))
    message = str(error.value)
    wanted = f"block {block}" if named == "block" else named
    assert wanted in message
    assert "full" in message
