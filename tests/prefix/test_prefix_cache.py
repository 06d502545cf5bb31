"""What the cache keeps, gives up and tells."""

import numpy as np
import pytest
from serving import Serving, i32

import kvpool as kv
from kvpool.prefix.snapshots import PromptEnd

FULL = kv.FullAttention(1, 4, dtype="float32")
WINDOW = kv.SlidingWindow(4, 1, 4, dtype="float32")
STATE = kv.RecurrentState({"sum": ((2,), "float32")})


def serving_of(*layers, **options):
    """One plan for each kind of model, so that the tests share what is compiled for it."""
    return Serving(list(layers), block=2, blocks=24, max_len=12, **options)


def length(serving, tokens, salt=None):
    return serving.cache.match(tokens, salt, touch=False).length


def test_blocks_that_keep_everything_go_leaf_first_and_least_recently_used_first():
    serving = serving_of(FULL)
    one, two = [1, 1, 2, 2, 3, 3, 0], [1, 1, 4, 4, 5, 5, 0]
    for tokens in (one, two):
        serving.serve(0, tokens)
        serving.release(0)
    assert serving.free() == {"full": 24 - 5}
    serving.cache.match(one)  # now two is the older
    lengths = []
    for free in range(20, 25):
        assert serving.evict({"full": free}) == {"full": 1}
        lengths.append((length(serving, one), length(serving, two)))
    assert lengths == [(6, 4), (6, 2), (4, 2), (2, 2), (0, 0)]


def test_a_look_that_is_no_use_refreshes_nothing():
    serving = serving_of(FULL)
    for tokens in ([1, 1], [2, 2]):
        serving.serve(0, tokens)
        serving.release(0)
    serving.cache.match([1, 1, 0], touch=False)
    serving.evict({"full": 23})
    assert (length(serving, [1, 1, 0]), length(serving, [2, 2, 0])) == (0, 2)
    assert serving.cache.stats().matches == 2  # the two that were served


def test_a_hit_refreshes_only_what_it_used():
    """Of a window the hit at 12 reads columns 4 and 5, so the others go before a newer prompt."""
    serving = serving_of(FULL, WINDOW)
    old, new = [1] * 12, [2] * 4
    for tokens in (old, new):
        serving.serve(0, tokens, stops=range(2, 12, 2))
        serving.release(0)
    serving.cache.match([*old, 0])
    assert serving.evict({"window4": serving.free()["window4"] + 6})["window4"] == 6
    assert length(serving, [*old, 0]) == 12  # columns 0 to 3 went, then the new prompt's two
    assert length(serving, [*new, 0]) == 0
    assert serving.free()["full"] == 24 - 8


def test_a_hole_or_a_lost_snapshot_costs_no_prefix():
    serving = serving_of(FULL, STATE)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    serving.serve(0, tokens, stops=(2, 4, 6))
    serving.release(0)
    assert serving.evict({"state": 22}) == {"full": 0, "state": 1}
    assert serving.free() == {"full": 21, "state": 22}
    assert length(serving, tokens) == 6
    assert length(serving, tokens[:3]) == 0
    hit = serving.serve(0, [1, 2, 9])
    assert (hit.length, hit.known, hit.stops) == (0, 2, (2,))
    assert hit.missed == {"full": None, "state": "no snapshot at length 2"}


def test_what_has_lost_its_unit_goes_with_it():
    """A snapshot of tokens whose blocks are gone would never be hit again."""
    serving = serving_of(FULL, STATE)
    serving.serve(0, [1, 2, 3, 4], stops=(2, 4))
    serving.release(0)
    assert serving.evict({"full": 23}) == {"full": 1, "state": 1}
    assert serving.cache.stats().removed == {"full": 1, "state": 1}


def test_rows_keep_what_they_use_and_it_does_not_count_as_freed():
    serving = serving_of(FULL)
    serving.serve(0, [1, 2, 3, 4])
    serving.serve(1, [5, 6])
    serving.release(1)
    assert serving.evict({"full": 24}) == {"full": 1}
    assert length(serving, [1, 2, 3, 4, 0]) == 4


def test_a_pin_keeps_a_system_prompt():
    serving = serving_of(FULL, WINDOW, STATE)
    system, other = [1, 2, 3, 4, 5, 6, 7], [1, 2, 9, 9, 9, 9]
    for tokens in (system, other):
        serving.serve(0, tokens, stops=(2, 4, 6))
        serving.release(0)
    assert serving.cache.pin(system) == 6
    everything = dict.fromkeys(serving.free(), 24)
    serving.evict(everything)
    assert serving.free() == {"full": 21, "window4": 22, "state": 23}
    assert length(serving, [*system, 0]) == 6
    serving.cache.unpin(system)
    serving.evict(everything)
    assert serving.free() == everything


def test_two_pins_of_one_prompt_are_two():
    serving = serving_of(FULL)
    serving.serve(0, [1, 2, 3, 4])
    serving.release(0)
    assert [serving.cache.pin(tokens) for tokens in ([1, 2, 3, 4], [1, 2, 3, 4, 5])] == [4, 4]
    serving.cache.unpin([1, 2, 3, 4])
    assert serving.evict({"full": 24}) == {"full": 0}
    serving.cache.unpin([1, 2, 3, 4, 5])
    assert serving.evict({"full": 24}) == {"full": 2}


def test_clear_lets_go_of_everything_but_what_rows_hold():
    serving = serving_of(FULL, WINDOW, STATE)
    serving.serve(0, [1, 2, 3, 4, 5, 6], stops=(2, 4))
    serving.serve(1, [1, 2, 3, 4, 5, 6, 7, 8])
    serving.cache.pin([1, 2, 3, 4])
    serving.state = serving.cache.clear(serving.state)
    serving.settle()
    assert serving.free() == {"full": 24 - 3 - 1, "window4": 24 - 2 - 1, "state": 22}
    assert serving.cache.stats().held == {"full": 0, "window4": 0, "state": 0}
    assert length(serving, [1, 2, 3, 4, 5]) == 0
    serving.insert(0)  # a row publishes anew what it has
    assert length(serving, [1, 2, 3, 4, 5, 6, 7]) == 6
    serving.verify(1)


def test_room_for_a_snapshot_is_made_at_the_cost_of_an_older_one():
    serving = Serving([FULL, STATE], block=2, blocks={"full": 24, "state": 3}, max_len=12)
    serving.serve(0, [1, 2, 3, 4, 5, 6], stops=(2, 4, 6))
    assert serving.cache.stats().snapshots_skipped == 0
    assert serving.cache.stats().held == {"full": 3, "state": 2}
    assert serving.cache.stats().removed == {"full": 0, "state": 1}
    assert [length(serving, [1, 2, 3, 4, 5, 6, 7][:n]) for n in (7, 6, 4)] == [6, 4, 0]


def test_a_snapshot_stays_whose_unit_led_only_to_what_made_room_for_it():
    serving = Serving([STATE], block=2, blocks={"state": 3}, max_len=12)
    serving.serve(0, [1, 1, 1, 1])
    serving.release(0)
    serving.admit(0, [2, 2, 2])
    serving.run(0, 2)  # with row 1 and what is cached that is all
    serving.admit(1, [1, 1], hit=False)
    serving.run(1, 2)
    serving.insert(1)
    assert [length(serving, [1] * n) for n in (3, 5)] == [2, 2]
    assert serving.cache.stats().held == {"state": 1}


def test_a_snapshot_for_which_rows_leave_no_room_is_skipped_and_counted():
    serving = Serving([FULL, STATE], block=2, blocks={"full": 24, "state": 2}, max_len=12)
    serving.admit(0, [9, 9, 9])
    serving.run(0, 2)
    serving.serve(1, [1, 2, 3, 4, 5, 6], stops=(2, 4, 6))
    assert serving.cache.stats().snapshots_skipped == 3
    assert serving.cache.stats().held == {"full": 3, "state": 0}
    assert length(serving, [1, 2, 3, 4, 5, 6, 7]) == 0


def test_a_prompt_that_left_another_stops_where_it_did():
    serving = serving_of(FULL, STATE, snapshots=PromptEnd(2))
    serving.serve(0, [1, 2, 3, 4, 5, 6, 7, 8], stops=(8,))
    hit = serving.serve(1, [1, 2, 3, 4, 9, 9, 9], stops=(4, 6))
    assert (hit.length, hit.known, hit.stops) == (0, 4, (4, 6))
    hit = serving.cache.match([1, 2, 3, 4, 8, 8, 8])
    assert (hit.length, hit.stops) == (4, (6,))


def test_rows_admitted_together_go_on_from_hits_of_their_own():
    serving = serving_of(FULL, STATE)
    prompts = [[1, 2, 3, 4, 5], [1, 2, 8, 8], [6, 6, 6]]
    serving.fill([1, 2, 3, 4])
    hits = [serving.cache.match(tokens) for tokens in prompts]
    assert [hit.length for hit in hits] == [4, 2, 0]
    blocks = {g: np.stack([hit.prefix.blocks[g] for hit in hits]) for g in ("full", "state")}
    prefix = kv.Prefix(i32([hit.length for hit in hits]), blocks)
    serving.state, result = kv.admit(serving.state, i32([0, 1, 2]), prefix)
    serving.storage = kv.copy_blocks(serving.storage, result.copies)
    serving.tokens = dict(enumerate(prompts))
    serving.settle()
    for row in range(3):
        serving.verify(row)
        serving.run(row, len(prompts[row]))
        serving.verify(row)


def test_a_request_may_wait_for_a_row_that_computes_the_same():
    serving = serving_of(FULL)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    serving.cache.begin(0, serving.admit(0, tokens))
    assert serving.cache.match([1, 2, 3, 4, 8]).pending == 4
    assert serving.cache.match(tokens).pending == 6
    assert serving.cache.match(tokens, "salt").pending == 0
    assert serving.cache.match([1, 9, 9]).pending == 0
    serving.run(0, 4)
    serving.insert(0)
    later = [serving.cache.match(prompt) for prompt in ([1, 2, 3, 4, 8], tokens)]
    assert [(hit.length, hit.pending) for hit in later] == [(4, 0), (4, 6)]
    serving.run(0, 7)
    serving.insert(0)
    assert serving.cache.match(tokens).length == 6
    serving.evict({"full": 24})
    serving.release(0)
    serving.evict({"full": 24})
    assert serving.cache.match(tokens).pending == 0  # nothing is announced any more


def test_with_states_a_request_waits_for_a_stop_only():
    serving = serving_of(FULL, STATE, snapshots=PromptEnd(2))
    tokens = [1, 2, 3, 4, 5, 6, 7]
    serving.cache.begin(0, serving.admit(0, tokens))
    assert serving.cache.match([1, 2, 3, 4, 8]).pending == 0
    assert serving.cache.match(tokens).pending == 6
    serving.cache.end(0)
    assert serving.cache.match(tokens).pending == 0
    serving.cache.end(0)
    with pytest.raises(ValueError, match=r"^row: wanted 0 to 2, got 3$"):
        serving.cache.begin(3, serving.cache.match(tokens))


def test_events_tell_what_came_and_went():
    serving = serving_of(FULL, STATE)
    serving.serve(0, [1, 2, 3, 4], stops=(4,))
    serving.release(0)
    stored = serving.cache.events()
    assert [(e.kind, e.group, e.place) for e in stored] == [
        ("stored", "full", 0),
        ("stored", "full", 0),
        ("stored", "state", 0),
    ]
    assert stored[0].key == stored[1].parent
    assert stored[1][2:] == stored[2][2:]
    assert serving.cache.events() == []
    serving.evict({"full": 23})
    assert [e[:3] for e in serving.cache.events()] == [
        ("removed", e.group, e.key) for e in stored[1:]
    ]


def test_events_that_nobody_fetches_do_not_pile_up(monkeypatch):
    monkeypatch.setattr("kvpool.prefix.holdings.MOST_EVENTS", 3)
    serving = serving_of(FULL)
    serving.serve(0, [1, 2, 3, 4, 5, 6, 7, 8])
    assert [event.kind for event in serving.cache.events()] == ["lost", "stored"]
    serving.release(0)
    serving.evict({"full": 22})
    assert [event.kind for event in serving.cache.events()] == ["removed", "removed"]


def test_stats_count():
    serving = serving_of(FULL)
    serving.serve(0, [1, 2, 3, 4])
    serving.serve(1, [1, 2, 3, 4, 5])
    stats = serving.cache.stats()
    assert (stats.matches, stats.hits, stats.tokens, stats.tokens_hit) == (2, 1, 9, 4)
    assert (stats.held, stats.stored, stats.removed) == ({"full": 2}, {"full": 2}, {"full": 0})


def test_a_fork_publishes_what_is_its_own():
    serving = serving_of(FULL)
    serving.serve(0, [1, 2, 3, 4])
    serving.state, _ = kv.fork(serving.state, i32([0]), i32([1]))
    serving.tokens[1] = [1, 2, 3, 4, 9, 9]
    state, _ = serving.cache.insert(serving.state, serving.storage, serving.tokens[1], 1)
    assert state is serving.state
    serving.run(1, 6)
    serving.insert(1)
    assert serving.cache.stats().stored == {"full": 3}


def test_a_row_that_went_back_leaves_what_it_published():
    serving = serving_of(FULL)
    serving.serve(0, [1, 2, 3, 4, 5, 6])
    serving.state, result = kv.truncate(serving.state, serving._vector(0, 3) - i32([0, 1, 1]))
    serving.storage = kv.copy_blocks(serving.storage, result.copies)
    serving.tokens[0] = [1, 2, 3, 9, 9, 9]
    serving.settle()
    serving.run(0, 6)
    serving.insert(0)
    for tokens in ([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9, 9, 9, 7]):
        assert length(serving, tokens) == 6
        serving.admit(1, tokens)
        serving.verify(1)
        serving.release(1)
