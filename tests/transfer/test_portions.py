"""The bytes of a parcel in portions of any size, from an offer into an inbox."""

import numpy as np
import pytest
from machines import bytes_of, put
from simulation import ranks_hold

import kvpool as kv
from kvpool.transfer import Inbox, Offer, Shards, parcels

SPEC = kv.CacheSpec.from_layers(
    [
        kv.FullAttention(4, 3, 5, dtype="float16"),
        kv.LatentAttention(6, 2),
        kv.SlidingWindow(8, 4, 4),
        kv.RecurrentState({"conv": ((18, 3), "bfloat16", ((4, 2), (2, 3), (1, 4)))}),
    ]
    * 3,
    block_size=4,
)
HAS = {"full": [False, False, False, True, False, False], "latent": [False, True, False, True]}


@pytest.mark.parametrize("max_bytes", [1, 500, 8 << 20])
@pytest.mark.parametrize("portion", [1, 130, 1000, parcels.PORTION])
@pytest.mark.parametrize(
    "shards", [(1, 1, 1, 1), (4, 1, 2, 1), (2, 1, 4, 1), (1, 2, 2, 1), (1, 3, 1, 2)], ids=str
)
def test_portions_of_any_size_bring_the_same_bytes(shards, portion, max_bytes, monkeypatch):
    monkeypatch.setattr(parcels, "PORTION", portion)
    sender, receiver = Shards(*shards[:2]), Shards(*shards[2:])
    plan = kv.transfer.plan(SPEC, 22, sender, receiver, HAS)
    random = np.random.default_rng(0)
    wanted, sent = [], [Offer("r", SPEC, 22, sender, rank) for rank in range(sender.ranks)]
    for index, group in enumerate(SPEC.groups):
        columns = 1 if group.is_state else group.columns(22)
        full = random.integers(0, 256, (columns, group.bytes_per_block), np.uint8)
        for rank, blocks in ranks_hold(SPEC, index, full, sender).items():
            offered = [0] if group.is_state else sent[rank].items[index] // sender.context
            sent[rank].put(group.name, blocks[offered])
        wanted.append(ranks_hold(SPEC, index, full, receiver))
    for rank in range(receiver.ranks):
        inbox = Inbox(plan, rank, max_bytes)
        for number_of, listed in inbox.arrivals.outlines.items():
            for number, parcel in enumerate(listed.parcels):
                data = bytes_of(sent[number_of], listed, number)
                assert data.size == parcel.num_bytes
                put(inbox, number_of, number, data)
        for group, items, blocks, right in zip(
            SPEC.groups, inbox.items, inbox.blocks, wanted, strict=True
        ):
            places = [0] if group.is_state else items // receiver.context
            np.testing.assert_array_equal(blocks, right[rank][places])
