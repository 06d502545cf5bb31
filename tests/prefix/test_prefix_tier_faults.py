"""Nothing that fails on the way between device, host and store leaks, lies or changes more."""

import time

import numpy as np
import pytest
from bad_places import Failing, Stuck
from tiered import FULL, LAYERS, TOKENS, WINDOW, DictStore, Tiered

import kvpool as kv

GROUPS = ("full", "window6", "state")


@pytest.mark.parametrize(
    ("host", "length"),
    [(0, 0), (1, 4), (3, 12), ({"full": 7, "window6": 1, "state": 1}, 4)],
)
def test_a_host_that_is_too_small_shortens_the_hit(host, length):
    serving = Tiered(LAYERS, host=host)
    serving.fill(TOKENS)
    serving.evict_all()
    assert serving.match(TOKENS).length == length
    serving.admit(0, TOKENS)
    serving.verify(0)
    kept = serving.prefixes.counts()
    assert (kept.saved + kept.lost, kept.host) == (21, kept.saved)
    serving.state = serving.prefixes.clear(serving.state)
    serving.release(0)
    counts = dict.fromkeys(GROUPS, host) if isinstance(host, int) else host
    assert serving.tier.pools.available() == counts
    assert serving.free() == serving.plan.num_blocks


def test_a_device_that_is_full_of_rows_shortens_the_hit():
    """A row takes 13 of 16 blocks, so that 3 units fit; what the hit displaces is not lost."""
    serving = Tiered(LAYERS, blocks={"full": 16, "window6": 16, "state": 12})
    serving.fill(TOKENS)
    serving.evict_all()
    serving.admit(0, [50 + p for p in range(52)], hit=False)
    serving.run(0, 52)
    assert serving.prefixes.find(TOKENS).length == 28
    assert serving.match(TOKENS).length == 12
    serving.admit(1, TOKENS[:14])
    serving.verify(1)
    serving.release(0)
    assert serving.match(TOKENS).length == 28


def test_no_room_for_a_longer_hit_costs_nothing_of_the_shorter():
    """A hit of 28 lacks 2 blocks of the window, and the one of the device's own hit is not enough.

    That one is nowhere else: had it gone, nothing could be hit.
    """
    serving = Tiered(LAYERS, blocks={"full": 32, "window6": 16, "state": 12})
    serving.fill(TOKENS)
    serving.evict_all()
    serving.lose_on_host("window6", TOKENS, [0])
    serving.prefixes.policy = "none"
    serving.fill(TOKENS[:4])
    serving.admit(1, [50 + p for p in range(60)], hit=False)
    serving.state, result = kv.reserve(serving.state, np.int32([0, 60, 0]))
    assert (bool(result.ok), serving.free()["window6"]) == (True, 0)
    assert serving.prefixes.find(TOKENS).length == 28
    assert serving.match(TOKENS).length == 4
    serving.admit(0, TOKENS)
    serving.verify(0)


@pytest.mark.parametrize("whole", [True, False])
def test_nothing_moves_while_a_promotion_is_under_way(whole):
    """Its bytes would come to where its blocks were."""
    serving = Tiered(LAYERS)
    serving.fill(TOKENS)
    serving.evict_all()
    serving.state, coming = serving.prefixes.start(serving.state, serving.storage, TOKENS)
    with pytest.raises(kv.SpecError, match="moves: blocks are on their way"):
        serving.prefixes.follow({})
    if whole:
        serving.storage = coming.receive(serving.storage, wait=True)
    serving.state = serving.prefixes.finish(serving.state, coming)
    serving.prefixes.follow({})
    assert serving.match(TOKENS).length == 28


@pytest.mark.parametrize("group", GROUPS)
def test_what_the_host_loses_is_a_hole(group):
    """Blocks go one by one for another's request; the hit is the longest that is still whole."""
    serving = Tiered(LAYERS)
    serving.fill(TOKENS)
    serving.evict_all()
    serving.lose_on_host(group, TOKENS, [4])
    # A window of 6 at length 24 reads tokens 19 to 23; at 20 tokens 15 to 19, of units 3 and 4.
    assert serving.prefixes.find(TOKENS).length == {"full": 16, "window6": 28, "state": 28}[group]
    assert serving.prefixes.find(TOKENS[:22]).length == 16
    taken = serving.tier.pools.allocate(serving.plan.num_blocks)  # all goes for it
    assert taken.reclaimed
    assert serving.prefixes.find(TOKENS).length == 0
    assert serving.match(TOKENS).length == 0
    assert serving.prefixes.counts().host == 0
    serving.tier.pools.release(taken)


def test_blocks_that_are_being_read_stay():
    serving = Tiered(LAYERS)
    serving.fill(TOKENS)
    serving.evict_all()
    serving.state, coming = serving.prefixes.start(serving.state, serving.storage, TOKENS)
    short = serving.tier.pools.allocate(serving.plan.num_blocks)
    assert dict(short.missing) == {"full": 7, "window6": 7, "state": 7}
    serving.coming, serving.storage = coming, coming.receive(serving.storage, wait=True)
    serving.state = serving.prefixes.finish(serving.state, coming)
    assert serving.match(TOKENS).length == 28


def test_a_promotion_that_was_given_up_brings_nothing_any_more():
    serving = Tiered(LAYERS)
    serving.fill(TOKENS)
    serving.evict_all()
    serving.state, coming = serving.prefixes.start(serving.state, serving.storage, TOKENS)
    serving.state = serving.prefixes.finish(serving.state, coming)
    assert serving.free() == serving.plan.num_blocks
    with pytest.raises(kv.SpecError, match="copy: wanted one that goes on, got one that was given"):
        coming.receive(serving.storage, donate=True)
    assert serving.match(TOKENS).length == 28


def test_what_is_on_its_way_is_held_until_it_has_arrived():
    """Written through: blocks go only after they came, and evict waits for them."""
    serving = Tiered(LAYERS, blocks=16, policy="write_through")
    serving.fill(TOKENS)
    assert serving.prefixes._saves.under_way
    with pytest.raises(kv.SpecError, match="on their way"):
        serving.prefixes.follow({})
    freed = serving.evict({"full": 16})
    assert (freed["full"], serving.free()["full"]) == (7, 16)
    assert serving.prefixes.counts().saved == 21
    assert serving.match(TOKENS).length == 28


def test_second_use_keeps_what_was_used_again():
    serving = Tiered(LAYERS, policy="second_use")
    serving.fill(TOKENS)
    serving.match(TOKENS[:10])
    serving.send(wait=True)
    serving.evict_all()
    assert serving.prefixes.counts()[:2] == (5, 0)  # two units, their window, a snapshot
    assert serving.match(TOKENS).length == 8


def test_bad_arguments_are_refused():
    serving = Tiered([FULL])
    other = kv.CacheSpec.from_layers([WINDOW], 4)
    with pytest.raises(kv.SpecError, match="policy: wanted one of write_back, write_through"):
        kv.tiers.PrefixTier(serving.cache, serving.tier, policy="never")
    with pytest.raises(kv.SpecError, match="host tier: made for the spec"):
        kv.tiers.PrefixTier(serving.cache, kv.tiers.HostTier(other, {}, anchor="window6"))
    with pytest.raises(ValueError, match="tokens: wanted integers"):
        serving.match(np.zeros(3))


def test_another_server_finds_what_the_first_one_stored(tmp_path):
    """Everything through a real store; then the store holds nothing any more that is whole."""

    def store(spec):
        return kv.tiers.Store(tmp_path, spec)

    first = Tiered(LAYERS, store=store)
    first.fill(TOKENS)
    first.state, stored = first.prefixes.save_all(first.state, first.storage)
    assert stored
    assert first.prefixes.store.counts.written == 21
    second = Tiered(LAYERS, store=store)
    assert second.prefixes.find(TOKENS).length == 0
    assert second.match(TOKENS, salt="another's").length == 0
    assert second.match(TOKENS).length == 28
    assert second.prefixes.store.counts.hits == 10
    assert second.prefixes.store.counts.written == 0
    second.admit(0, TOKENS)
    second.verify(0)
    third = Tiered(LAYERS, store=store)
    assert third.match(TOKENS, deadline_s=0.0).length == 0  # no time
    for value in tmp_path.rglob("*"):
        if value.is_file():
            value.write_bytes(value.read_bytes()[:-1] + b"?")
    with pytest.warns(kv.tiers.StoreWarning, match="torn"):
        assert third.match(TOKENS).length == 0
    assert third.free() == third.plan.num_blocks


@pytest.mark.parametrize("place", [Failing("gone"), Failing("gone", at_once=True), Stuck()])
def test_a_server_ends_in_time_although_its_store_is_down(place):
    serving = Tiered(LAYERS, store=lambda spec: kv.tiers.Store("memory://", spec, timeout_s=0.3))
    serving.fill(TOKENS)
    whole, serving.prefixes.store._kv = serving.prefixes.store._kv, place
    begin = time.monotonic()
    with pytest.warns(kv.tiers.StoreWarning, match="cannot write, nothing is stored") as said:
        serving.state, stored = serving.prefixes.save_all(serving.state, serving.storage)
    assert (stored, len(said)) == (False, 1)
    assert time.monotonic() - begin < 5  # on a busy machine; 21 times 0.3 would be more
    serving.settle()
    assert serving.prefixes.counts().host == 21
    serving.prefixes.store._kv = whole
    assert serving.evict_all() == dict.fromkeys(GROUPS, 7)
    assert serving.match(TOKENS).length == 28


def test_saving_all_says_whether_the_host_had_room_for_it():
    for room, all_stored in ((0, False), (1, True)):  # one after the other
        serving = Tiered(LAYERS, host=room, store=DictStore)
        serving.fill(TOKENS)
        _, stored = serving.prefixes.save_all(serving.state, serving.storage)
        assert stored == all_stored
        assert len(serving.prefixes.store.blocks) == 21 * all_stored
