"""What stays longer than its use would keep it, and how many snapshots a path keeps."""

import pytest
from serving import Serving

import kvpool as kv
from kvpool.prefix.eviction import LRU
from kvpool.prefix.reuse import Reuse

FULL = kv.FullAttention(1, 4, dtype="float32")
WINDOW = kv.SlidingWindow(4, 1, 4, dtype="float32")
STATE = kv.RecurrentState({"sum": ((2,), "float32")})
POLICIES = [LRU, Reuse]


def serving_of(*layers, **options):
    return Serving(list(layers), block=2, blocks=24, max_len=12, **options)


def publish(serving, tokens, stops=(), **options):
    serving.serve(0, tokens, stops, **options)
    serving.release(0)


def lengths(serving, *prompts):
    """How much of each is cached."""
    return [serving.cache.match([*tokens, 0], touch=False).length for tokens in prompts]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_has_a_higher_priority_goes_later(policy):
    serving = serving_of(FULL, evictor=policy)
    prompts = [[1, 1, 1, 1], [2, 2], [3, 3], [4, 4]]
    for tokens, priority in zip(prompts, (2, 1, 0, 7), strict=True):
        publish(serving, tokens, priority=priority)
    left = []
    for free in range(20, 25):
        assert serving.evict({"full": free}) == {"full": 1}
        left.append(lengths(serving, *prompts))
    assert left == [[4, 2, 0, 2], [4, 0, 0, 2], [2, 0, 0, 2], [0, 0, 0, 2], [0, 0, 0, 0]]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_goes_on_from_a_priority_has_none_of_its_own(policy):
    serving = serving_of(FULL, evictor=policy)
    publish(serving, [1, 1, 2, 2], priority=1)
    publish(serving, [1, 1, 2, 2, 3, 3, 4, 4])  # 0 here takes nothing back
    publish(serving, [9, 9])
    assert serving.evict({"full": 22}) == {"full": 3}
    assert lengths(serving, [1, 1, 2, 2, 3, 3], [9, 9]) == [4, 0]


def test_a_priority_keeps_the_windows_and_the_state_of_its_hit():
    serving = serving_of(FULL, WINDOW, STATE)
    publish(serving, [1] * 8, stops=(2, 4, 6), priority=1)
    publish(serving, [2] * 8, stops=(2, 4, 6))
    serving.evict({"full": 20, "window4": 22, "state": 23})
    assert serving.free() == {"full": 20, "window4": 22, "state": 23}
    assert lengths(serving, [1] * 8, [2] * 8) == [8, 0]


def test_what_came_back_without_a_priority_has_none():
    serving = serving_of(FULL)
    publish(serving, [1, 1], priority=3)
    serving.state = serving.cache.clear(serving.state)
    publish(serving, [1, 1])
    publish(serving, [2, 2], priority=1)
    serving.evict({"full": 23})
    assert lengths(serving, [1, 1], [2, 2]) == [0, 2]


@pytest.mark.parametrize(("priority", "left"), [(0, [4, 0]), (1, [0, 4])])
def test_room_for_a_snapshot_is_not_made_at_the_cost_of_a_higher_priority(priority, left):
    serving = Serving([FULL, STATE], block=2, blocks={"full": 24, "state": 2}, max_len=12)
    publish(serving, [1] * 4, priority=1)  # its snapshot and the row's state are all there is
    publish(serving, [2] * 4, priority=priority)
    assert lengths(serving, [1] * 4, [2] * 4) == left
    assert serving.cache.stats().snapshots_skipped == (not priority)


def test_rows_come_before_any_priority():
    serving = serving_of(FULL)
    publish(serving, [1] * 12, priority=9)
    assert serving.evict({"full": 24}) == {"full": 6}


def snapshots_of(serving, tokens):
    """The lengths at which there is one."""
    chain = serving.cache._tree.walk(None, b"".join(t.to_bytes(4, "little") for t in tokens), 6)
    place = serving.cache._places.states[0].first
    return [2 * node.depth for node in chain if node.kept[place]]


def test_a_path_keeps_its_first_and_its_newest_snapshot():
    serving = serving_of(FULL, STATE, max_snapshots=2)
    for turn in range(1, 6):
        publish(serving, [7] * 2 * turn)
    assert snapshots_of(serving, [7] * 12) == [2, 10]
    assert serving.cache.stats().held == {"full": 5, "state": 2}
    assert serving.cache.stats().removed == {"full": 0, "state": 3}


def test_where_two_ways_lead_on_a_snapshot_stays_longer():
    serving = serving_of(FULL, STATE, max_snapshots=2)
    publish(serving, [7] * 4, stops=(2,))
    publish(serving, [7, 7, 7, 7, 8, 8], stops=())
    assert snapshots_of(serving, [7, 7, 7, 7, 8, 8]) == [2, 6]  # one way led on from both
    publish(serving, [7] * 4, stops=())
    publish(serving, [7, 7, 7, 7, 9, 9], stops=())
    assert snapshots_of(serving, [7, 7, 7, 7, 9, 9]) == [4, 6]  # 2 leads on in one way, 4 in two


def test_one_snapshot_on_a_path_is_the_last():
    serving = serving_of(FULL, STATE, max_snapshots=1)
    publish(serving, [7] * 8, stops=(2, 4, 6))
    assert snapshots_of(serving, [7] * 8) == [8]


def test_a_cap_counts_no_pins_and_no_priorities():
    serving = serving_of(FULL, STATE, max_snapshots=1)
    publish(serving, [7] * 2, priority=1)
    publish(serving, [7] * 4)
    serving.cache.pin([7] * 4)
    publish(serving, [7] * 8, stops=(6,))
    assert snapshots_of(serving, [7] * 8) == [2, 4, 8]


def test_a_cap_of_tails_leaves_what_another_end_reads():
    """Windows of 4 read two blocks of 2; ends at 4 and 6 share one."""
    serving = serving_of(WINDOW, max_snapshots=2)
    for turn in range(1, 6):
        publish(serving, [7] * 2 * turn)
    assert lengths(serving, *([7] * n for n in (2, 4, 6, 8, 10))) == [2, 2, 2, 2, 10]
    assert serving.cache.stats().held == {"window4": 3}


def test_a_cap_counts_lengths_at_which_a_hit_may_end():
    serving = serving_of(FULL, WINDOW, STATE, max_snapshots=2)
    publish(serving, [7] * 12, stops=(4, 8))
    assert snapshots_of(serving, [7] * 12) == [4, 12]
    assert serving.cache.stats().held == {"full": 6, "window4": 4, "state": 2}
