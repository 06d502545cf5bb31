"""Host pools that are short, or raise, at whatever call: no half answers."""

import contextlib
import itertools

import pytest
from host_entries import KV, ORDERS, books, entries

from kvpool.tiers import Allocation, HostPool, HostPoolGroup, PoolEntry, Shortfall

# Calls of three pools: how much is free, twice; one leaf is given back; blocks are taken. Without
# the first three where the answer is that nothing is free: then more leaves go, and all is well.
FAILURES = {("allocate", False): 12, ("allocate", True): 9, ("release", False): 3}
FAILURES["release", True] = 3


@pytest.mark.parametrize("order", ORDERS)
def test_one_short_pool_refuses_the_whole_request(order):
    sizes = {name: {**KV, "swa": 1}[name] for name in order}
    group = HostPoolGroup([*entries(sizes), PoolEntry("draft", source="kv")])
    before = books(group)
    for request in itertools.permutations(order):
        answer = group.allocate(dict.fromkeys(request, 2))
        assert isinstance(answer, Shortfall)
        assert answer.missing == {"swa": 1}
        assert books(group) == before
    assert group.available() == {"kv": 4, "swa": 1, "mamba": 2}


class Faulty(HostPool):
    """A pool that raises, or says that it has nothing, at one of its calls."""

    def __init__(self, size, plan):
        self.plan = plan
        super().__init__(size)

    def take(self, number):
        self.plan.call("take")
        return super().take(number)

    def give(self, ids):
        self.plan.call("give")
        return super().give(ids)

    @property
    def free(self):
        answer = self.plan.call("free")
        return super().free if answer is None else answer


class FaultPlan:
    """Counts the calls of all pools; raises at call `at`, or answers 0 free blocks there."""

    def __init__(self):
        self.calls, self.at, self.exhausted = 0, -1, False

    def arm(self, at, exhausted=False):
        self.calls, self.at, self.exhausted = 0, at, exhausted

    def call(self, kind):
        self.calls += 1
        if self.calls - 1 != self.at:
            return None
        if kind == "free" and self.exhausted:
            return 0
        raise RuntimeError("a pool that fails")


@pytest.mark.parametrize("order", ORDERS)
def test_a_pool_that_raises_while_it_is_asked_leaves_every_pool_as_it_was(order):
    plan = FaultPlan()
    pools = {name: (Faulty(KV[name], plan) if name == "swa" else HostPool(KV[name]))
             for name in order}  # fmt: skip
    group = HostPoolGroup([PoolEntry(n, pool, anchor=n == "kv") for n, pool in pools.items()])
    plan.arm(1)  # its free blocks were counted, now they are to be taken
    with pytest.raises(RuntimeError, match="a pool that fails"):
        group.allocate(dict.fromkeys(order, 2))
    plan.arm(-1)
    assert group.available() == KV
    group.check()


def _reclaiming(order):
    """A group of three faulty pools, partly held, in which leaves may go for a request."""
    plan, leaves = FaultPlan(), []
    group = HostPoolGroup(
        PoolEntry(n, Faulty(3, plan), anchor=n == "kv", reclaim=lambda: tuple(leaves))
        for n in order
    )
    leaves += [group.allocate({"kv": 1, "swa": 1, "mamba": 1}) for _ in range(2)]
    return group, plan, leaves


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("exhausted", [False, True])
@pytest.mark.parametrize("verb", ["allocate", "release"])
def test_every_pool_failing_at_every_call_leaves_the_books_as_they_were(order, exhausted, verb):
    """Each call of a pool raises once, or finds the pool empty once; victims have to go as well."""
    failed = 0
    for call in itertools.count():
        group, plan, leaves = _reclaiming(order)
        before, answer = books(group), None
        plan.arm(call, exhausted)
        with contextlib.suppress(RuntimeError):
            answer = (
                group.allocate(dict.fromkeys(order, 2))
                if verb == "allocate"
                else group.release(leaves[0])
            )
        calls = plan.calls
        plan.arm(-1)
        group.check()
        if calls <= call:  # it asks the pools no more often than that
            break
        if not isinstance(answer, Allocation):  # a pool thought empty at first: more leaves go
            failed += 1
            assert books(group) == before
    assert failed == FAILURES[verb, exhausted]


@pytest.mark.parametrize("pool", range(5))
@pytest.mark.parametrize("at", range(4))
def test_each_pool_exhausted_at_each_request_in_turn(pool, at):
    """Five pools with room for four requests; pool k has room for j of them only."""
    sizes = dict.fromkeys("abcde", 8)
    sizes["abcde"[pool]] = 2 * at
    for order in (tuple("abcde"), tuple("edcba")):
        group = HostPoolGroup(entries(sizes, anchor="c"))
        held = [group.allocate(dict.fromkeys(order, 2)) for _ in range(at)]
        before = books(group)
        answer = group.allocate(dict.fromkeys(order, 2))
        assert answer == Shortfall({"abcde"[pool]: 2})
        assert books(group) == before
        for allocation in held:
            group.release(allocation)
        assert group.available() == sizes
        group.check()
