"""The order in which what is cached goes: small examples by hand, and plain models of it."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_new_blocks_are_those_that_nobody_went_through_before():
    evictor = Reuse()
    evictor.touch([])
    grow(evictor, "a", "b", "c")
    assert (visit_of(evictor, "c").new, visit_of(evictor, "c").kind) == (3, 0)
    assert evict(evictor, 1) == ["c"]
    evictor.touch(["b", "a"])
    grow(evictor, "c", "d", under="b")  # what was evicted is not new
    assert (visit_of(evictor, "a").new, visit_of(evictor, "a").kind) == (1, 1)
    assert visit_of(evictor, "a") is visit_of(evictor, "d")


def visit_of(evictor, key):
    return owner_of(evictor._items[key])


def test_long_paths_that_never_come_again_go_before_older_ones_that_do():
    evictor = Reuse()
    for number in range(400):  # paths of one block come again after two requests, long ones never
        evictor.touch([])
        grow(evictor, ("short", number))
        evictor.touch([])
        grow(evictor, *[("long", number, at) for at in range(9)])
        evictor.touch([("short", number)])
    evictor.touch([])
    grow(evictor, "short")
    evictor.touch([])
    grow(evictor, *[("last", at) for at in range(9)])
    for _ in range(20):  # past the age at which either could be expected again
        evictor.touch([])
    left = evict(evictor, 10_000)
    assert left.index(("last", 8)) < left.index("short")


def test_of_paths_of_one_age_those_whose_like_never_came_again_go_first():
    evictor = Reuse()
    for number in range(400):
        evictor.touch([])
        grow(evictor, ("short", number))
        grow(evictor, *[("long", number, at) for at in range(9)])
        evictor.touch([("short", number)])
    evictor.touch([])
    grow(evictor, "short")
    grow(evictor, *[("last", at) for at in range(9)])
    left = evict(evictor, 10_000)
    assert left.index(("last", 8)) < left.index("short")


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


def test_as_many_tails_as_a_path_has_blocks_are_no_path():
    evictor = Reuse()
    evictor.add("a", 1.0)
    evictor.add("b", 1.0, "a")
    for key in ("ta", "tb"):
        evictor.add(key, 1.0, key[1], True, None, 1)
    evictor.touch(["b", "a"], ["tb", "ta"])
    evictor.touch([], ["tb", "ta"])
    assert set(evictor.victims()) <= {"a", "b", "ta", "tb"}
