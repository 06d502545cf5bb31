"""Windows and chunks: which columns are dead, held and read, and how many blocks that takes."""

import numpy as np
import pytest
from lockstep import Lockstep, Setup
from oracle import cdiv
from test_core_cases import grown, names
from world import World

import kvpool as kv

ONE_BY_ONE = Setup((("window", 4),), (6,), block=2, rows=2, max_len=24, step=1)


WINDOW_OF_8 = Setup((("window", 8),), (6,), block=4, rows=2, max_len=32, step=6)


def bound(window, step, block):
    return cdiv(window + step - 2, block) + 1


def settled(both, row, tokens, step):
    """Settles tokens without writing them; yields the length after every step."""
    for _ in range(0, tokens, step):
        assert bool(both.reserve({row: step}).granted[row])
        both.advance({row: step})
        yield both.n(row)


def test_wn01_dead_columns_are_null_in_the_table():
    both = Lockstep(ONE_BY_ONE)
    both.admit(0)
    dead = {3: 0, 4: 0, 5: 1, 6: 1, 7: 2, 8: 2, 9: 3, 10: 3, 12: 4, 13: 5}
    for n in settled(both, 0, 13, 1):
        if n in dead:
            assert both.held(0) == list(range(dead[n], cdiv(n, 2)))


def test_wn02_a_query_reads_its_window_and_no_other_key():
    world = World(ONE_BY_ONE)
    world.admit(0)
    for n in range(1, 21):
        world.step({0: 1})
        if n == 9:
            assert world.held(0) == [3, 4]
        world.reserve({0: 1})
        values = world.write([1, 0])
        view = kv.step_view(world.state, np.array([1, 0], np.int32))
        read, mask = kv.read(world.storage, view, 0)
        positions = np.asarray(view.key_positions("window4"))[0]
        causal = np.asarray(mask)[0] & (positions > n - 4) & (positions <= n)
        keys = np.asarray(read["k"])[0, causal, 0, 0]
        dense = [*world.tokens[0], float(values[0, 0])][-4:]
        assert keys.tolist() == dense


def test_wn03_a_pool_too_small_for_the_window_is_refused_with_numbers():
    small = Setup((("window", 6),), (2,), block=4, rows=1, max_len=24, step=1)
    with pytest.raises(kv.SpecError, match=r"2\D.*3|3\D.*2"):
        _ = small.plan
    for window, blocks in ((6, 3), (5, 2)):
        both = Lockstep(Setup((("window", window),), (blocks,), block=4, rows=1, step=1))
        both.admit(0)
        peak = 0
        for _ in range(24):
            assert bool(both.reserve({0: 1}).ok)
            peak = max(peak, blocks - both.free())
            both.advance({0: 1})
        assert peak == blocks


@pytest.mark.parametrize(("step", "peak"), [(8, 6), (4, 4)])
def test_wn04_a_step_wider_than_the_window(step, peak):
    setup = Setup((("window", 4),), (peak,), block=2, rows=1, max_len=16, step=step)
    world, top = World(setup), 0
    world.admit(0)
    for n in range(0, 16, step):
        held = len(world.held(0))
        assert held == cdiv(n, 2) - max(0, n - 3) // 2
        world.reserve({0: step})
        top = max(top, peak - world.free())
        world.step({0: step})
    assert top == peak


def test_wn04_what_a_step_may_hold_decides_the_pool():
    wide = Setup((("window", 4),), (4,), block=2, rows=1, max_len=16, step=8)
    with pytest.raises(kv.SpecError, match="6"):
        _ = wide.plan
    both = Lockstep(Setup((("window", 4),), (4,), block=2, rows=1, max_len=16, step=4))
    both.admit(0)
    assert list(settled(both, 0, 8, 4)) == [4, 8]
    assert names(both.reserve({0: 8})) == ["STEP_TOO_LONG"]
    assert list(settled(both, 0, 8, 4)) == [12, 16]


def test_wn05_blocks_that_slid_out_serve_other_rows():
    world = World(WINDOW_OF_8)
    world.admit(0, 1)
    grown(world, 0, 16)
    assert world.held(0) == [2, 3]
    assert world.free() == 4
    grown(world, 1, 16)  # through every other block of the pool, and A's data stays
    assert not set(world.table(0)[2:4]) & set(world.table(1)[2:4])


def test_wn06_columns_address_past_the_width_of_the_window():
    world, peak = World(ONE_BY_ONE), 0
    world.admit(0, 1)
    for _ in range(12):
        for row in (0, 1):
            world.reserve({row: 1})
            peak = max(peak, 6 - world.free())
            world.step({row: 1})
    assert world.held(0) == world.held(1) == [4, 5]
    assert peak <= 6


@pytest.mark.parametrize(
    ("window", "block", "lengths", "dead"),
    [(4, 256, (5, 258, 259), (0, 0, 1)), (3, 8, (8, 9, 10), (0, 0, 1))],
)
def test_wn07_a_long_block_stays_until_its_last_key_is_out(window, block, lengths, dead):
    setup = Setup((("window", window),), (3,), block=block, rows=1, max_len=300, step=block)
    both = Lockstep(setup)
    both.admit(0)
    for n, columns in zip(lengths, dead, strict=True):
        step = n - both.n(0)
        both.reserve({0: step})
        both.advance({0: step})
        assert both.held(0) == list(range(columns, cdiv(n, block)))


def test_wn08_at_a_chunks_end_nothing_of_it_is_held():
    both = Lockstep(Setup((("chunk", 4),), (4,), block=2, rows=1, max_len=12, step=1))
    both.admit(0)
    want = {3: [0, 1], 4: [], 5: [2], 7: [2, 3], 8: [], 9: [4]}
    for n in settled(both, 0, 9, 1):
        if n in want:
            assert both.held(0) == want[n], n


def test_wn09_a_chunk_of_8192():
    setup = Setup((("chunk", 8192), "all"), (520, 520), block=16, rows=1, max_len=8208, step=8191)
    both = Lockstep(setup)
    both.admit(0)
    for step, chunk, full in ((8191, 512, 512), (1, 0, 512), (1, 1, 513)):
        both.reserve({0: step})
        both.advance({0: step})
        assert (len(both.held(0, 0)), len(both.held(0, 1))) == (chunk, full)


@pytest.mark.parametrize(
    ("window", "step", "block", "most"),
    [(1024, 1024, 16, 129), (1024, 8192, 16, 577), (128, 8192, 16, 521), (1024, 1, 16, 65)],
)
def test_wn10_the_most_blocks_a_row_holds(window, step, block, most):
    assert bound(window, step, block) == most
    length = 3 * max(window, step)
    setup = Setup((("window", window),), (most,), block=block, rows=1, max_len=length, step=step)
    state = kv.init_state(setup.spec, setup.plan)
    state, _ = kv.admit(state, np.array([0], np.int32))
    group, peak = setup.group(0), 0
    for k in [step] * (3 * window // step) if step > 1 else [1] * (window + 2 * block):
        state, result = kv.reserve(state, np.array([k], np.int32))
        assert bool(result.ok)
        peak = max(peak, most - int(kv.free_blocks(state)[group]))
        state = kv.advance(state, np.array([k], np.int32))
    kv.check(state)
    assert peak <= most
    with pytest.raises(kv.SpecError, match=str(most)):
        kv.plan(
            setup.spec,
            num_blocks={group: most - 1},
            max_seqs=1,
            max_seq_len=length,
            max_step_tokens=step,
        )


def test_wn11_every_group_goes_by_its_own_window():
    setup = Setup(
        ("all", ("window", 4), ("window", 8)), (6, 6, 6), block=2, rows=1, max_len=12, step=12
    )
    both = Lockstep(setup)
    assert [g.name for g in setup.spec.groups] == ["full", "window4", "window8"]
    both.admit(0)
    both.reserve({0: 12})
    both.advance({0: 12})
    assert [both.free(layer) for layer in range(3)] == [0, 4, 2]


WIDE = Setup((("window", 6), "all"), (9, 12), block=2, rows=2, max_len=24, step=12)


def test_a_tail_only_reserve_holds_what_the_next_query_reads():
    world = World(WIDE)
    world.admit(0)
    world.step({0: 3})
    assert bool(world.reserve({0: 12}, tail_only=True).ok)
    assert world.held(0, 0) == [0, 1, 5, 6, 7]  # 0..2 for n = 3, 10..14 for a query at 15
    assert world.held(0, 1) == list(range(8))
    world.step({0: 12}, tail_only=True)
    assert world.held(0, 0) == [5, 6, 7]


def test_a_plain_reserve_closes_the_gap():
    world = World(WIDE)
    world.admit(0)
    world.step({0: 3})
    world.reserve({0: 12}, tail_only=True)
    world.reserve({0: 8})
    assert world.held(0, 0) == list(range(8))
    world.step({0: 12}, keep={0: 7})


def test_an_advance_into_the_gap_is_misuse():
    both = Lockstep(WIDE)
    both.admit(0)
    both.reserve({0: 12}, tail_only=True)
    both.advance({0: 6})  # a query at 6 reads from 1, which has no block
    assert both.n(0) == 0
    both.advance({0: 12})
    assert both.n(0) == 12


def test_room_inside_the_gap_closes_it():
    both = Lockstep(WIDE)
    both.admit(0)
    both.reserve({0: 12}, tail_only=True)
    assert bool(both.reserve({0: 6}, tail_only=True).ok)  # what was granted can be advanced by
    both.advance({0: 6})
    assert both.n(0) == 6
