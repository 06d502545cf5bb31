"""Every copy and call of a store or host pool fails in turn, while prompts go and come back."""

import itertools
import warnings

import jax
import pytest
from faults import WAYS, Fault, Faults, go
from lockstep import leaves_equal
from tiered import LAYERS, TOKENS, DictStore, Tiered

from kvpool.tiers import HostPoolGroup, Shortfall, StoreWarning

GROUPS = ("full", "window6", "state")


class Losses:
    """A server of which everything is evicted and comes back, while one call of some fails."""

    def __init__(self, way, monkeypatch, *wrapped, **answers):
        go(way, monkeypatch)
        self.faults = Faults(monkeypatch, **answers)
        for owner, *names in wrapped:
            self.faults.wrap(owner, *names)
        if not wrapped:
            self.faults.wrap_copies()
        self.serving = Tiered(LAYERS, store=DictStore)
        self.serving.fill(TOKENS)
        self.serving.state, _ = self.serving.prefixes.save_all(
            self.serving.state, self.serving.storage
        )
        self.stored = dict(self.serving.prefixes.store.blocks)
        self.serving.evict_all()
        self.serving.match(TOKENS)  # jax knows the host's memory by now

    def prepare(self, where):
        """Everything is on the device, as `fill` leaves it, or only in the store."""
        serving = self.serving
        serving.state = serving.prefixes.clear(serving.state)
        serving.prefixes.store.blocks = {} if where == "device" else dict(self.stored)
        if where == "device":
            serving.fill(TOKENS)
        assert serving.prefixes.counts().host == 0

    def serve(self, hit):
        """The prompt's row reads and computes what it should."""
        serving = self.serving
        serving.admit(0, TOKENS, hit=hit)
        serving.verify(0)
        serving.run(0, 29)
        serving.verify(0)
        serving.release(0)
        free, held = serving.free(), serving.cache.stats().held
        assert {g: free[g] + held[g] for g in free} == serving.plan.num_blocks

    def each(self, where, run):
        """Runs with each call failing in turn; how many there are."""
        for at in itertools.count():
            self.prepare(where)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                self.faults.arm(at)
                hit = run(self.serving)
                failed = self.faults.failed
                self.faults.arm(None)
                self.serving.prefixes._trouble.say()
            self.serving.settle()
            assert len(said) <= 1
            self.serve(hit)
            if not failed:
                break
        assert hit.length == 28
        self.serving.state = self.serving.prefixes.clear(self.serving.state)
        assert self.serving.free() == self.serving.plan.num_blocks
        assert self.serving.tier.pools.available() == self.serving.plan.num_blocks
        return at


def evict_and_match(serving):
    serving.evict_all()
    return serving.match(TOKENS)


# Evicted are 21 blocks, in 11 chunks, and 10 come back, in 6 chunks: 7 of the attention's, 2 of the
# window's, a snapshot. Where they lie: 11 times the storage is looked at, 21 blocks are copied, and
# go on to the store; 6 times the host's memory is looked at, and copied. Through chunks: each of 11
# is looked for, gathered, sent, arrives, is taken in; 21 blocks go on to the store; each of 6 is
# gathered, sent, taken in. Out of the store come 10.
@pytest.mark.parametrize(("way", "calls"), [*zip(WAYS, (65, 94, 94), strict=True)])
def test_every_copy_that_raises_costs_no_more_than_the_hit(way, calls, monkeypatch):
    losses = Losses(way, monkeypatch)
    assert losses.each("device", evict_and_match) == calls


@pytest.mark.parametrize(("way", "calls"), [*zip(WAYS, (22, 28, 28), strict=True)])
def test_every_copy_that_raises_after_a_fetch_costs_no_more_than_the_hit(way, calls, monkeypatch):
    losses = Losses(way, monkeypatch)
    assert losses.each("store", lambda serving: serving.match(TOKENS)) == calls


@pytest.mark.parametrize(("where", "calls"), [("device", 21), ("store", 2)])
def test_every_call_of_a_store_that_raises_costs_no_more_than_the_hit(where, calls, monkeypatch):
    """Of 21 blocks that are evicted each is stored; a prompt's are asked for and come."""
    losses = Losses(WAYS[0], monkeypatch, (DictStore, "put", "prefetch", "result"))
    run = evict_and_match if where == "device" else lambda serving: serving.match(TOKENS)
    assert losses.each(where, run) == calls


def on_host(serving):
    """{name: (group, host block, its bytes)} of the prompts on the host."""
    host, memory = serving.prefixes._host, serving.tier.memory
    return {
        one.name: (host.group_of(one.name), one.block,
                   memory[host.group_of(one.name)].get([one.block]).tobytes())
        for one in host.everything()
    }  # fmt: skip


@pytest.mark.parametrize("room", [12, 7])
def test_a_copy_that_raises_in_an_eviction_loses_exactly_what_was_evicted(room, monkeypatch):
    """The room is needed: the device is as if all had gone well, and the host has nothing of it.

    The host has another prompt in 7 blocks of each group; 3 units are evicted. Where they find no
    room but for others, those 9 are gone too.
    """
    faults = Faults(monkeypatch)
    faults.wrap_copies()

    def server():
        serving = Tiered(LAYERS, store=DictStore, host=room)
        serving.fill([50 + p for p in range(28)])
        serving.evict_all()
        serving.fill(TOKENS)
        assert serving.free() == dict.fromkeys(GROUPS, 57)
        return serving

    calm = server()
    before, stored = on_host(calm), dict(calm.prefixes.store.blocks)
    assert calm.evict({"full": 60}) == dict.fromkeys(GROUPS, 3)
    came = on_host(calm).keys() - before.keys()
    displaced = before.keys() - on_host(calm).keys()
    assert (len(came), len(displaced)) == (9, 9 if room == 7 else 0)
    for at in itertools.count():
        serving = server()
        assert on_host(serving) == before
        faults.arm(at)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            freed = serving.evict({"full": 60})
            failed = faults.failed
            faults.arm(None)
            serving.prefixes.send(serving.state, serving.storage)
        serving.settle()  # checks the state, the cache, the host's pools
        assert freed == dict.fromkeys(GROUPS, 3)
        assert leaves_equal(serving.state, calm.state)
        if not failed:
            break
        assert len(said) == 1
        lost = serving.prefixes.counts().lost
        if lost:  # in a copy; else on the way to the store, which the host's blocks outlive
            assert lost == 9
            assert on_host(serving) == {n: one for n, one in before.items() if n not in displaced}
            assert serving.prefixes.store.blocks.keys() == stored.keys()
        else:
            assert on_host(serving) == on_host(calm)
            assert len(serving.prefixes.store.blocks) == len(stored) + 8
        assert serving.prefixes.find(TOKENS).length == (16 if lost else 28)
    assert at == 24


def test_a_copy_that_uses_up_the_storage_and_raises_keeps_nothing_on_the_host(monkeypatch):
    """The device failed, not the copy: that comes out, and what was read may go again."""
    faults = Faults(monkeypatch)
    faults.wrap(jax, "block_until_ready")
    serving = Tiered(LAYERS)
    serving.fill(TOKENS)
    serving.evict_all()
    faults.arm(2)  # of the second chunk, in a storage that is the tier's own by now
    with pytest.raises(Fault):
        serving.match(TOKENS)
    faults.arm(None)
    assert {one.readers for one in serving.prefixes._host.everything()} == {0}
    assert serving.free() == serving.plan.num_blocks
    serving.tier.pools.release(serving.tier.pools.allocate(serving.plan.num_blocks))


def none_free(_, request):
    return Shortfall(dict(request))


@pytest.mark.parametrize("exhausted", [False, True])
@pytest.mark.parametrize(("where", "calls"), [("device", 21), ("store", 10)])
def test_every_request_for_host_blocks_that_fails(where, calls, exhausted, monkeypatch):
    """It raises, or finds the pool empty: of every group, at every call."""
    answers = {"allocate": none_free} if exhausted else {}
    losses = Losses(WAYS[0], monkeypatch, (HostPoolGroup, "allocate"), **answers)
    run = evict_and_match if where == "device" else lambda serving: serving.match(TOKENS)
    assert losses.each(where, run) == calls


@pytest.mark.parametrize(
    ("in_copies", "says"),
    [(True, "blocks cannot be copied to the host"), (False, "host blocks cannot be taken")],
)
def test_a_warning_that_is_an_error_comes_before_anything_is_changed(in_copies, says, monkeypatch):
    faults = Faults(monkeypatch)
    if in_copies:
        faults.wrap_copies()
    else:
        faults.wrap(HostPoolGroup, "allocate")
    serving = Tiered(LAYERS, host=12)
    serving.fill(TOKENS)
    faults.arm(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert serving.evict({"full": 60}) == dict.fromkeys(GROUPS, 3)
        faults.arm(None)
        before, held = serving.state, serving.cache.stats().held
        with pytest.raises(StoreWarning, match=says):
            serving.evict({"full": 61})
        assert leaves_equal(serving.state, before)
        assert serving.cache.stats().held == held
        serving.settle()
        assert serving.evict({"full": 61})["full"] == 1
        serving.settle()
