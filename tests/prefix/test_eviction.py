"""The order in which what is cached goes: small examples by hand, and plain models of it."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.prefix.ages import BINS, Ages, Table, bin_of, next_bin
from kvpool.prefix.eviction import LRU
from kvpool.prefix.reuse import Reuse
from kvpool.prefix.visits import Item, Visit, owner_of, take

POLICIES = [LRU, Reuse]


def grow(evictor, *keys, under=None, cost=1):
    """Adds keys, each under the one before."""
    for key in keys:
        evictor.add(key, cost, under, False, key)
        under = key


def evict(evictor, count=1000):
    """Takes up to so many victims, and what they were."""
    taken = []
    for key in itertools.islice(evictor.victims(), count):
        evictor.remove(key)
        taken.append(key)
    return taken


@pytest.mark.parametrize("policy", POLICIES)
def test_leaves_go_first_and_the_oldest_of_them(policy):
    evictor = policy()
    evictor.touch([])
    grow(evictor, "a", "b", "c")
    evictor.touch([])
    grow(evictor, "x", "y")
    assert evict(evictor) == ["c", "b", "a", "y", "x"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hit_refreshes_what_was_used_and_nothing_else(policy):
    evictor = policy()
    for keys in (["a", "b", "c"], ["x", "y"]):
        evictor.touch([])
        grow(evictor, *keys)
    evictor.touch(["b", "a"])
    taken = evict(evictor)
    assert taken[0] == "c"
    assert sorted(taken[1:3]) == ["x", "y"]
    assert taken[3:] == ["b", "a"]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_was_left_comes_again_but_not_in_the_same_round(policy):
    evictor = policy()
    for keys in (["a", "b"], ["x"]):
        evictor.touch([])
        grow(evictor, *keys)
    assert list(evictor.victims()) == ["b", "x"]  # nothing taken: no parents
    assert list(evictor.victims()) == ["b", "x"]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_pinned_stays_with_its_parents(policy):
    evictor = policy()
    evictor.touch([])
    grow(evictor, "a", "b")
    grow(evictor, "c", under="a")
    evictor.pin("b")
    assert evict(evictor) == ["c"]
    evictor.unpin("b")
    assert evict(evictor) == ["b", "a"]


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_children_go_before_parents_and_all_goes_once(policy, seed):
    rng, evictor, parents = random.Random(seed), policy(), {}
    number = itertools.count()
    for _ in range(30):
        path = [rng.choice([None, *parents])]
        while path[-1] is not None:
            path.append(parents[path[-1]])
        evictor.touch(path[:-1])
        for _ in range(rng.randrange(4)):
            key = next(number)
            parents[key] = path[0]
            evictor.add(key, 1, path[0], False, key)
            path.insert(0, key)
        for key in evict(evictor, rng.randrange(3)):
            assert key not in parents.values()
            del parents[key]
    left = list(parents)
    for key in evict(evictor):
        assert key not in parents.values()
        del parents[key]
    assert not parents
    assert left or not evict(evictor)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_lru_takes_the_leaf_with_the_oldest_use(seed):
    rng, evictor, parents, used = random.Random(seed), LRU(), {}, {}
    for clock in range(40):
        path = [rng.choice([None, *parents])]
        while path[-1] is not None:
            path.append(parents[path[-1]])
        evictor.touch(path[:-1])
        used.update((key, (clock, -at)) for at, key in enumerate(reversed(path[:-1])))
        evictor.add(clock, 1, path[0])
        parents[clock], used[clock] = path[0], (clock, 1)
        if rng.random() < 0.4:
            leaves = set(parents) - set(parents.values())
            assert evict(evictor, 1) == [min(leaves, key=used.__getitem__)]
            del parents[min(leaves, key=used.__getitem__)]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_the_owner_of_a_block_is_the_last_visit_through_it(seed):
    rng, items, owners = random.Random(seed), [], {}
    for number in range(40):
        item = rng.choice([None, *items])
        visit = take(number, item)[0] if item else Visit(number, 0, 0)
        path = item
        while path:
            owners[path], path = visit, path.parent
        for _ in range(rng.randrange(1, 4)):
            new = Item(number, 1.0, item, None)
            new.visit, visit.end, visit.blocks = visit, new.depth, visit.blocks + 1
            if item:
                item.children += 1
            owners[new] = visit
            items.append(new)
            item = new
        assert all(owner_of(one) is owners[one] for one in items)
        for one in set(owners.values()):
            mine = [item for item, owner in owners.items() if owner is one]
            assert one.blocks == len(mine) == one.end - one.start


def test_worth_is_the_best_ratio_of_uses_to_waiting():
    table = Table()
    table.solve([0.0, 0.5] + [0.0] * (BINS - 2), 1.0)
    # Ages 0 and 1 to 1.83 fall into the first bins of widths 0.414 and 0.586.
    assert table.worth[1] == pytest.approx(0.5 / (0.75 * 0.5858), rel=1e-3)
    assert table.worth[0] == pytest.approx(0.5 / (0.4142 + 0.75 * 0.5858), rel=1e-3)
    assert table.worth[0] < table.worth[1]  # it rises where uses come later
    assert table.worth[2:] == [0.0] * (BINS - 2)


def test_bins_are_half_octaves():
    assert [bin_of(age) for age in (0, 1, 2, 3, 7, 8, 2**40)] == [0, 2, 3, 4, 6, 6, BINS - 1]
    assert next_bin(3) == 5
    assert next_bin(2**40) == 2**40 + 1


def test_ages_count_what_was_used_and_what_was_not():
    ages, first, second = Ages(2), Visit(0, 0, 4), Visit(0, 0, 4)
    ages.watch(first)
    ages.watch(second)
    for _ in range(3):
        ages.tick()
    ages.use(first, 0.25)
    table = ages._tables[0]
    assert (table.seen[:4], table.used[:5]) == ([2, 2, 2, 2], [0, 0, 0, 0, 0.25])
    assert (first.share, first.bin, second.share) == (0.75, 4, 1.0)


def test_visits_of_a_kind_that_comes_back_outlive_older_ones_of_another():
    evictor = Reuse()
    for round_ in range(600):  # one path goes on all the time, others are not seen again
        evictor.touch(["p"] if round_ else [])
        if not round_:
            grow(evictor, "p")
        grow(evictor, round_)
    for _ in range(20):
        evictor.touch([])
        grow(evictor, ("new", _))
    assert "p" not in evict(evictor, 600)


def with_snapshot(evictor, *keys, cost, under=None):
    grow(evictor, *keys, under=under, cost=10)
    evictor.add(("snapshot", keys[-1]), cost, keys[-1], True, ("snapshot", keys[-1]))


def test_a_short_path_with_a_large_snapshot_goes_first():
    evictor = Reuse()
    evictor.touch([])
    with_snapshot(evictor, "a", "b", "c", cost=40)
    with_snapshot(evictor, "x", cost=40)
    assert evict(evictor) == [("snapshot", "x"), "x", ("snapshot", "c"), "c", "b", "a"]


def test_blocks_without_a_snapshot_go_before_those_with_one():
    evictor = Reuse()
    evictor.touch([])
    with_snapshot(evictor, "a", cost=10)
    evictor.touch([])
    grow(evictor, "x", "y", cost=10)
    assert evict(evictor, 2) == ["y", "x"]


def test_an_inner_snapshot_goes_first_until_it_was_seen_to_be_used():
    evictor = Reuse()
    evictor.touch([])
    with_snapshot(evictor, "a", cost=10)
    with_snapshot(evictor, "b", under="a", cost=10)
    assert evict(evictor, 1) == [("snapshot", "a")]
    evictor.add(("snapshot", "a"), 10, "a", True, ("snapshot", "a"))
    evictor.touch(["a"])
    evictor.touch([("snapshot", "a")])
    with_snapshot(evictor, "c", under="a", cost=10)  # now two ways go on from there
    assert ("snapshot", "a") not in evict(evictor, 3)
