"""Forks, drafts and cuts: what is shared, what is copied, what is given back."""

import jax
import numpy as np
import pytest
from lockstep import MIXED, PLAIN, SMALL, Lockstep, Setup, copy_of, i32, leaves_equal
from test_core_cases import grown, names
from test_window_cases import ONE_BY_ONE, WINDOW_OF_8
from world import World

import kvpool as kv


def owed(result, group):
    src, dst = result.copies.get(group, (i32([]), i32([])))
    return int(((np.asarray(src) >= 0) & (np.asarray(dst) >= 0)).sum())


def test_fk01_a_half_full_tail_is_copied():
    world = World(PLAIN)
    world.admit(0)
    world.step({0: 6})
    result = world.fork(0, 1)
    assert owed(result, "full") == 1
    assert world.free() == 9
    assert world.holders(0, world.table(0)[0]) == 2
    world.step({1: 1})
    world.step({0: 1})
    assert world.tokens[0][:6] == world.tokens[1][:6]
    assert world.tokens[0][6] != world.tokens[1][6]
    assert world.free() == 9


def test_fk01_full_blocks_are_shared_and_nothing_is_copied():
    world = World(PLAIN)
    world.admit(0)
    world.step({0: 8})
    before = copy_of(world.storage)
    result = world.fork(0, 1)
    assert owed(result, "full") == 0
    assert world.free() == 10
    live = i32(world.table(0)[:2])
    blocks = [kv.export_blocks(s, "full", live) for s in (before, world.storage)]
    assert leaves_equal(*blocks)
    world.step({0: 1, 1: 1})
    assert world.table(0)[2] != world.table(1)[2]
    assert world.free() == 8


def test_fk02_a_parents_slide_leaves_the_child_its_window():
    world = World(MIXED)
    world.admit(0)
    grown(world, 0, 10)
    assert world.held(0, 1) == [3, 4]
    third, fourth = world.table(0, 1)[3:5]
    world.fork(0, 1)
    assert [world.holders(1, b) for b in (third, fourth)] == [2, 2]
    assert world.table(0, 2) != world.table(1, 2)
    free = world.free(1)
    world.step({0: 2})
    assert world.holders(1, third) == 1
    assert world.free(1) == free - 1  # the new column 5, and nothing came back
    world.release(0)
    world.verify()


def test_fk03_drafts_do_not_move_the_window():
    world = World(WINDOW_OF_8)
    world.admit(0)
    grown(world, 0, 15)
    assert world.held(0) == [2, 3]
    world.reserve({0: 6})
    assert world.held(0) == [2, 3, 4, 5]
    world.step({0: 6}, keep={0: 1})
    assert world.n(0) == 16
    assert world.held(0) == [2, 3, 4, 5]


def test_fk04_drafts_need_room_and_keep_it_until_cut():
    world = World(PLAIN)
    world.admit(0)
    world.step({0: 6})
    tail, before = i32([b for b in range(12) if b != world.table(0)[1]]), copy_of(world.storage)
    world.write({0: 5})  # positions 8..10 have no room
    same = [kv.export_blocks(s, "full", tail) for s in (before, world.storage)]
    assert leaves_equal(*same)
    world.verify()
    world.step({0: 5}, keep={0: 1})
    assert len(world.held(0)) == 3
    assert world.n(0) == 7
    assert names(world.truncate({0: 7}))[0] == "OK"
    assert len(world.held(0)) == 2


def test_fk05_a_cut_below_what_the_window_still_holds():
    world = World(ONE_BY_ONE)
    world.admit(0)
    grown(world, 0, 12)
    assert names(world.truncate({0: 11}))[0] == "OK"
    grown(world, 0, 1)
    assert names(world.truncate({0: 10}))[0] == "UNREACHABLE"
    assert world.n(0) == 12


def test_fk06_accepted_drafts_and_state_are_of_one_moment():
    region = kv.RecurrentState({"sum": ((1,), "float32"), "last": ((3,), "float32")})
    spec = kv.CacheSpec.from_layers([region], block_size=4)
    plan = kv.plan(spec, num_blocks={"state": 2}, max_seqs=1, max_seq_len=16, max_step_tokens=5)
    state, storage = kv.init(spec, plan)
    state, _ = kv.admit(state, i32([0]))
    for asked, accepted in (([1, 2, 3, 4, 5], 5), ([6, 7, 8, 9], 2)):
        state, _ = kv.reserve(state, i32([len(asked)]))
        view = kv.step_view(state, i32([len(asked)]))
        old = kv.read_state(storage, view, 0)
        taken = np.asarray(asked[:accepted], np.float32)
        new = {
            "sum": old["sum"] + taken.sum(),
            "last": np.concatenate([np.asarray(old["last"])[0], taken])[None, -3:],
        }
        storage = kv.write_state(storage, view, 0, jax.tree.map(np.asarray, new))
        kept = copy_of(storage)
        state = kv.advance(state, i32([accepted]))
        assert leaves_equal(kept, storage)
    now = kv.read_state(storage, kv.step_view(state, i32([0])), 0)
    assert np.asarray(now["sum"]).tolist() == [[28]]
    assert np.asarray(now["last"]).tolist() == [[5, 6, 7]]


def test_fk07_reserved_room_serves_later_steps():
    both = Lockstep(PLAIN)
    both.admit(0)
    both.reserve({0: 6})
    both.advance({0: 6})
    free = both.free()
    both.reserve({0: 9})
    assert free - both.free() == 2
    both.advance({0: 2})
    both.reserve({0: 1})
    assert both.n(0) == 8
    assert free - both.free() == 2
    both = Lockstep(SMALL)  # six columns: 24 tokens
    both.admit(0)
    both.reserve({0: 5})
    assert len(both.held(0)) == 2
    both.advance({0: 3})
    assert names(both.reserve({0: 22}))[0] == "TOO_LONG"
    assert len(both.held(0)) == 2


@pytest.mark.parametrize(
    ("src", "dst", "status"),
    [
        ([0], [1], ["BUSY"]),
        ([0], [0], ["BUSY"]),
        ([2], [3], ["FREE_ROW"]),
        ([0, 0], [2, 2], ["OK", "BUSY"]),
        ([0, -1, 1, 9], [-1, 2, -7, 2], ["SKIPPED", "SKIPPED", "BAD_ARGUMENT", "BAD_ARGUMENT"]),
    ],
)
def test_fk08_misuse_of_a_fork_is_named(src, dst, status):
    both = Lockstep(PLAIN)
    both.admit(0, 1)
    both.reserve({0: 6})
    both.advance({0: 6})
    assert names(both.fork(src, dst)) == status


def test_a_fork_without_a_block_for_its_tail_is_refused_whole():
    both = Lockstep(Setup(("all", "state"), (2, 2), block=4, rows=3, max_len=12, step=8))
    both.admit(0)
    both.reserve({0: 6})
    both.advance({0: 6})
    result = both.fork([0, 0], [1, 2])
    assert names(result) == ["OUT_OF_BLOCKS"] * 2
    assert {g: int(x) for g, x in result.shortfall.items()} == {"full": 2, "state": 1}


def test_one_parent_many_children():
    world = World(MIXED)
    world.admit(0)
    world.step({0: 5})
    assert names(world.fork([0, 0], [1, 2])) == ["OK", "OK"]
    world.step({0: 1, 1: 2, 2: 3})


def test_a_cut_inside_a_shared_block_takes_a_copy():
    world = World(PLAIN)
    world.admit(0)
    world.step({0: 8})
    world.fork(0, 1)
    free = world.free()
    result = world.truncate({0: 6, 1: 5})
    assert names(result) == ["OK", "OK", "SKIPPED", "SKIPPED"]
    # each took a copy of the shared column, which then had nobody left
    assert owed(result, "full") == 2
    assert world.free() == free - 2 + 1
    world.step({0: 3, 1: 3})


def test_a_cut_without_a_block_for_its_copy_is_refused():
    both = Lockstep(SMALL)
    both.admit(0)
    both.reserve({0: 16})
    both.advance({0: 16})
    both.fork(0, 1)
    assert names(both.truncate({0: 14}))[0] == "OUT_OF_BLOCKS"
    assert names(both.truncate({0: 12}))[0] == "OK"


@pytest.mark.parametrize("to", [0, 6])
def test_the_start_of_a_chunk_is_always_reachable(to):
    world = World(Setup((("chunk", 6),), (6,), block=4, rows=1, max_len=20, step=6))
    world.admit(0)
    grown(world, 0, 17)
    assert names(world.truncate({0: to}))[0] == "OK"
    world.step({0: 3})


def test_a_prefix_places_window_blocks_at_their_columns():
    world = World(MIXED)
    world.admit(0)
    grown(world, 0, 8)
    snap = np.asarray(world.snapshot(0).blocks["state"])
    blocks = {"full": world.table(0, 0), "window4": world.table(0, 1), "state": snap}
    result = world.admit(1, lengths=8, blocks=blocks, shared=True, tokens=[world.tokens[0]])
    assert names(result) == ["OK"]
    assert world.table(1, 0) == world.table(0, 0)
    assert world.held(1, 1) == [2, 3]
    world.step({0: 1, 1: 2})


def test_a_prefix_that_ends_inside_a_block_copies_the_tail():
    world = World(MIXED)
    world.admit(0)
    world.step({0: 5})
    snap = np.asarray(world.snapshot(0).blocks["state"])
    blocks = {"full": world.table(0, 0), "window4": world.table(0, 1), "state": snap}
    result = world.admit(1, lengths=5, blocks=blocks, shared=True, tokens=[world.tokens[0]])
    assert [owed(result, group) for group in blocks] == [1, 1, 1]
    world.step({0: 1, 1: 3})


def test_a_prefix_without_what_it_needs_is_unreachable():
    world = World(MIXED)
    world.admit(0)
    grown(world, 0, 8)
    snap = np.asarray(world.snapshot(0).blocks["state"])
    whole = {"full": world.table(0, 0), "window4": world.table(0, 1), "state": snap}
    spare = next(i for i in range(9) if i not in world.ids["window4"].values())
    hole = {"window4": [-1, -1, -1, *whole["window4"][3:]], "full": [*whole["full"][:3], -1]}
    unheld = {"window4": [-1, -1, spare, *whole["window4"][3:]]}
    short = {"full": whole["full"][:3]}
    for change in ({"window4": hole["window4"]}, {"full": hole["full"]}, unheld, short):
        result = world.admit(1, lengths=8, blocks={**whole, **change}, shared=True)
        assert names(result) == ["UNREACHABLE"]
    for group in whole:
        rest = {g: ids for g, ids in whole.items() if g != group}
        assert names(world.admit(1, lengths=8, blocks=rest, shared=True)) == ["UNREACHABLE"]
