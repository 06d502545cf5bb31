"""Situations as numbers, and the plan that is right."""

import cProfile
import itertools
import json
import pstats

import numpy as np
import pytest

import kvpool as kv
from kvpool.transfer import Key, Offer, Shards
from kvpool.transfer.arrivals import Arrivals
from kvpool.transfer.parcels import outline
from kvpool.transfer.shards import owned

STATE = kv.RecurrentState({"s": ((4,), "float32")})
SMALL = kv.CacheSpec.from_layers(
    [kv.FullAttention(1, 4), kv.SlidingWindow(8, 1, 4), STATE], block_size=4
)
HEADS = kv.CacheSpec.from_layers([kv.FullAttention(4, 4)], block_size=4)


def chosen(plan):
    return {group.name: plan.items(group.name).tolist() for group in plan.spec.groups}


def test_a_transfer_is_ready_after_the_last_of_its_items_in_every_order():
    spec = kv.CacheSpec.from_layers(
        [kv.FullAttention(1, 4), kv.SlidingWindow(6, 1, 4), STATE], block_size=4
    )
    plan = kv.transfer.plan(spec, 16)
    assert {name: len(items) for name, items in chosen(plan).items()} == {
        "full": 4, "window6": 2, "state": 1,
    }  # fmt: skip
    assert plan.num_items == 7
    parcels = outline(plan, 0, 0, max_bytes=1)
    assert len(parcels.parcels) == 7
    for order in itertools.permutations(range(7)):
        arrivals = Arrivals({0: parcels})
        for parcel in order:
            assert not arrivals.ready
            assert arrivals.add(0, parcel)
        assert arrivals.ready
    assert not arrivals.add(0, 3)
    for sender, parcel in ((0, 7), (0, -1), (1, 0)):
        with pytest.raises(kv.SpecError, match=f"no parcel {parcel} of sender {sender}"):
            arrivals.add(sender, parcel)


def test_an_empty_receiver_gets_all_blocks_the_live_tail_and_the_state():
    plan = kv.transfer.plan(SMALL, 21)
    assert chosen(plan) == {"full": [0, 1, 2, 3, 4, 5], "window8": [3, 4, 5], "state": [21]}
    assert plan.reason("full", 0) == "receiver lacks"
    assert plan.reason("window8", 3) == "live tail"
    assert plan.reason("window8", 2) is None
    assert plan.reason("state", 21) == "state at the end"


def test_what_the_receiver_holds_is_not_sent():
    plan = kv.transfer.plan(SMALL, 21, receiver_has={"full": np.array([True, True])})
    assert chosen(plan) == {"full": [2, 3, 4, 5], "window8": [3, 4, 5], "state": [21]}
    assert plan.num_items == 8
    has = {"full": [True, False] * 3, "window8": [True] * 4, "state": [True]}
    plan = kv.transfer.plan(SMALL, 21, receiver_has=has)
    assert chosen(plan) == {"full": [1, 3, 5], "window8": [4, 5], "state": []}
    everything = {"full": [True] * 6, "window8": [True] * 6, "state": [True]}
    nothing = kv.transfer.plan(SMALL, 21, receiver_has=everything)
    assert (nothing.num_items, nothing.pairs, nothing.bytes_sent) == (0, (), 0)


def test_snapshots_that_a_policy_asks_for_come_before_the_state_at_the_end():
    plan = kv.transfer.plan(SMALL, 21, snapshots=[16, 8, 16])
    assert chosen(plan)["state"] == [8, 16, 21]
    assert [plan.reason("state", n) for n in (8, 21)] == ["snapshot asked", "state at the end"]
    with pytest.raises(kv.SpecError, match=r"snapshots: wanted lengths from 1 to 20, got \[21\]"):
        kv.transfer.plan(SMALL, 21, snapshots=[21])
    for none in (1.5, True, "8", 0):
        with pytest.raises(kv.SpecError, match="snapshots: wanted an integer of at least 1"):
            kv.transfer.plan(SMALL, 21, snapshots=[none])
    counted = kv.transfer.plan(SMALL, 21, snapshots=np.array([16, 8]))
    assert (counted, counted.digest) == (plan, plan.digest)
    assert counted.snapshots == (8, 16)


@pytest.mark.parametrize(
    ("degrees", "halves"),
    [
        ((4, 2), {(0, 0): (0, 0), (1, 0): (0, 1), (2, 1): (0, 0), (3, 1): (0, 1)}),
        ((2, 4), {(0, 0): (0, 0), (0, 1): (1, 0), (1, 2): (0, 0), (1, 3): (1, 0)}),
    ],
)
def test_unequal_degrees_send_halves(degrees, halves):
    """Of each pair which half of the sender's heads goes into which half of the receiver's."""
    plan = kv.transfer.plan(HEADS, 4, *map(Shards, degrees))
    assert plan.pairs == tuple(halves)
    for pair, (source, target) in halves.items():
        (piece,) = plan.pieces(*pair)
        key = piece.lane.cuts[0]
        assert (key.source // key.run, key.target // key.run) == (source, target)


@pytest.mark.parametrize("layer", [kv.LatentAttention(4, 2), kv.FullAttention(2, 4)])
def test_who_has_the_same_shares_the_sending(layer):
    spec = kv.CacheSpec.from_layers([layer], block_size=4)
    pairs = {
        degrees: kv.transfer.plan(spec, 4, *map(Shards, degrees)).pairs
        for degrees in ((8, 8), (8, 4), (4, 8), (8, 2))
    }
    assert pairs[8, 8] == tuple((rank, rank) for rank in range(8))
    assert pairs[8, 4] == ((0, 0), (2, 1), (4, 2), (6, 3))
    assert pairs[4, 8] == tuple((rank // 2, rank) for rank in range(8))
    assert pairs[8, 2] == ((0, 0), (4, 1))


@pytest.mark.parametrize("degrees", [(2, 3), (3, 2)])
def test_degrees_that_do_not_divide_are_refused_with_both_numbers(degrees):
    message = f"{degrees[0]} head shards at the sender and {degrees[1]} at the receiver"
    with pytest.raises(kv.SpecError, match=message):
        kv.transfer.plan(kv.CacheSpec.from_layers([kv.FullAttention(6, 4)]), 4,
                         *map(Shards, degrees))  # fmt: skip
    with pytest.raises(kv.SpecError, match="buffer 'k': 4 heads cannot be divided among 3 ranks"):
        kv.transfer.plan(HEADS, 4, Shards(3), Shards(3))


def test_fewer_heads_than_ranks_and_joined_segments():
    assert [owned(2, 4, rank)[0] for rank in range(4)] == [0, 0, 1, 1]
    joined = kv.RecurrentState({"conv": ((16, 1), "float32", (4, 4, 8))})
    plan = kv.transfer.plan(kv.CacheSpec.from_layers([joined]), 5, Shards(1), Shards(2))
    rows = []
    for piece in plan.pieces(0, 0):
        for cut in piece.lane.cuts:
            rows += range(cut.source // 4, (cut.source + cut.run) // 4)
    assert rows == [0, 1, 4, 5, 8, 9, 10, 11]


@pytest.mark.parametrize("parts", [(), (4, 4, 8), (8, 8)])
def test_specs_that_differ_in_segments_alone_are_cut_each_its_way(parts):
    spec = kv.CacheSpec.from_layers([kv.RecurrentState({"conv": ((16, 1), "float32", parts)})])
    plan = kv.transfer.plan(spec, 5, Shards(1), Shards(2))
    cuts = [cut for piece in plan.pieces(0, 1) for cut in piece.lane.cuts]
    first = [cut.source // 4 for cut in cuts]
    assert first == {(): [8], (4, 4, 8): [2, 6, 12], (8, 8): [4, 12]}[parts]


def test_blocks_are_dealt_round_robin():
    two = [Shards(1, 2).columns(-(-tokens // 4)) for tokens in (0, 4, 8, 12, 16, 5)]
    assert two == [0, 1, 1, 2, 2, 1]
    assert Shards(1, 4).columns(-(-55 // 8)) == 2
    assert [Shards(1, 2).place(column) for column in range(5)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (0, 2),
    ]  # fmt: skip


def test_keys_are_distinct_and_the_same_on_both_sides():
    window, full = kv.SlidingWindow(8, 1, 4), kv.FullAttention(1, 4)
    layers = [{"swa": window, "csa": full} if layer in (3, 23) else full for layer in range(24)]
    spec = kv.CacheSpec.from_layers(layers, block_size=4)
    here, there = (kv.transfer.plan(spec, 9, Shards(1), Shards(1)) for _ in range(2))
    keys = [key for request in (42, 4, "42") for key in here.keys(request, 0, 0)]
    assert keys == [key for request in (42, 4, "42") for key in there.keys(request, 0, 0)]
    assert len(set(keys)) == len({str(key) for key in keys}) == len(keys) == 3 * (24 * 3 + 2 * 3)
    assert [Key.parse(str(key)) for key in keys] == keys
    assert here.digest == there.digest != kv.transfer.plan(spec, 10).digest


AWKWARD = ["", "-", "=", "/", "a/b", "%2F", "42", "ä", None]


def test_keys_of_awkward_requests_and_tags_come_back():
    requests = [text for text in AWKWARD if text is not None] + [42, 0, 2**128 - 1]
    keys = [Key(r, 3, tag, 5, 0) for r in requests for tag in AWKWARD]
    assert len({str(key) for key in keys}) == len(keys)
    for key in keys:
        again = Key.parse(str(key))
        assert again == key
        assert type(again.request) is type(key.request)


@pytest.mark.parametrize(
    "request_", [-1, 2**128, True, 1.0, None, b"r", "\ud800", "x" * 1025, "ä" * 171]
)
def test_requests_that_no_key_can_carry_are_refused(request_):
    with pytest.raises(kv.SpecError, match="request: wanted an integer from 0 to"):
        Offer(request_, SMALL, 5)
    with pytest.raises(kv.SpecError, match="request: wanted an integer from 0 to"):
        list(kv.transfer.plan(SMALL, 5).keys(request_, 0, 0))


def test_requests_that_numpy_counts_are_ints():
    offer = Offer(np.int64(5), SMALL, 5)
    assert type(offer.request) is int
    assert Offer("x" * 1024, SMALL, 5).request == "x" * 1024
    counted = Offer(5, SMALL, 5, lacks={"full": {np.int64(0): np.int32(2)}})
    assert json.dumps(counted.lacks) == '{"full": {"0": 2}}'


@pytest.mark.parametrize(
    "text", ["", "1/2/-/3", "1/2/-/3/4/5", "-/2/-/3/4", "1/=2/-/3/4", "1/2/7/3/4", "1/-2/-/3/4",
             "01/2/-/3/4", "1/2/=%/3/4", "1/2/swa/3/4", "1/2/=a b/3/4", "=%ff/2/-/3/4", None],
)  # fmt: skip
def test_text_that_no_key_has_is_refused(text):
    with pytest.raises(kv.SpecError, match="key: wanted"):
        Key.parse(text)


MIB = 1 << 20


def test_bytes_of_32k_tokens_in_known_models():
    gemma = kv.preset("gemma3-27b")
    assert kv.transfer.plan(gemma, 32768).bytes_sent == 2976 * MIB
    assert kv.transfer.plan(kv.without_regions(gemma), 32768).bytes_sent == 15872 * MIB
    qwen = kv.transfer.plan(kv.preset("qwen3-next-80b-a3b"), 32768).bytes_sent
    assert qwen == 882_573_312
    assert round(qwen / MIB) == 842
    flash = kv.transfer.plan(kv.preset("deepseek-v4-flash-fp8"), 32768).bytes_sent
    assert flash == 141_585_408
    assert round(flash / MIB) == 135


@pytest.mark.parametrize("degrees", [(1, 1), (4, 2), (2, 4), (8, 1), (1, 8), (8, 8)])
def test_bytes_sent_are_bytes_needed_in_every_preset(degrees):
    divided = 0
    for name in kv.preset_names():
        try:
            plan = kv.transfer.plan(kv.preset(name), 32768, *map(Shards, degrees))
        except kv.SpecError as error:
            assert "cannot be divided among" in str(error)  # noqa: PT017
            continue
        assert plan.bytes_sent == plan.bytes_needed
        divided += 1
    assert divided >= len(kv.preset_names()) - 3


@pytest.mark.parametrize("name", ["gemma3-27b", "deepseek-v4-flash-fp8"])
def test_planning_does_no_more_for_a_longer_request(name):
    """Calls of functions are counted, which no load of the machine changes."""
    spec, eight, calls = kv.preset(name), Shards(8, 8), {}
    for tokens in (131072, 16384, 131072):  # the first fills what is remembered
        profile = cProfile.Profile()
        with profile:
            plan = kv.transfer.plan(spec, tokens, eight, eight)
            assert len(plan.pairs) == 64
            assert plan.digest
            assert plan.bytes_sent == plan.bytes_needed
        calls[tokens] = pstats.Stats(profile).total_calls
    assert calls[131072] <= 1.1 * calls[16384]
