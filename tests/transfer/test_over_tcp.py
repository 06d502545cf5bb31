"""Sequences over TCP between ranks of unequal degrees."""

import asyncio

import numpy as np
import pytest
from machines import HOST, SPEC, Machine, bytes_of, close, put, receive, serve

import kvpool as kv
from kvpool.transfer import Inbox, Offer, Sender, Shards, TransferError, fetch, rows


def test_a_receiver_that_holds_a_part_ends_bit_equal_to_a_cold_transfer():
    """It copies the two blocks that it has from where it has them, and fetches the rest."""
    spec = kv.CacheSpec.from_layers(
        [kv.FullAttention(1, 4), kv.SlidingWindow(8, 1, 4), kv.RecurrentState(
            {"s": ((4,), "float32")})], block_size=4
    )  # fmt: skip

    async def run():
        source, target = Machine(1, spec), Machine(1, spec)
        source.fill(1, 21)
        target.fill(1, 8)
        has = {"full": np.array([True, True])}
        plan = kv.transfer.plan(spec, 21, receiver_has=has)
        senders, peers = await serve(source, 1, 7)
        state, storage = target.ranks[0]
        state, result = rows.begin(state, 0, 21)
        assert bool(result.ok)
        table = np.asarray(kv.block_table(state, "full"))
        storage = kv.copy_blocks(storage, {"full": (table[1, :2], table[0, :2])})
        inbox = await fetch(Inbox(plan, 0), 7, peers, has=has)
        target.ranks[0] = rows.finish(state, storage, 0, inbox)
        await close(senders)
        tables = {g.name: np.asarray(kv.block_table(target.ranks[0][0], g.name))[0]
                  for g in spec.groups}  # fmt: skip
        assert (tables["window8"][:6] >= 0).tolist() == [False] * 3 + [True] * 3
        assert (tables["full"][:6] >= 0).all()
        assert senders[0].sent == plan.bytes_sent == 4 * 64 + 3 * 64 + 16
        cold = source.content(0, 1)
        for name, blocks in target.content(0, 0).items():
            np.testing.assert_array_equal(blocks, cold[name])
        target.check()

    asyncio.run(run())


def test_a_receiver_goes_on_from_a_prefix_of_its_own():
    async def run():
        source, target = Machine(), Machine(blocks={g.name: 32 for g in SPEC.groups})
        source.fill(1, 18)  # begins with the 13 tokens that the receiver has
        target.fill(1, 13)
        state, storage = target.ranks[0]
        state, taken = kv.snapshot(state, [1])
        storage = kv.copy_blocks(storage, taken.copies)
        blocks = {g.name: np.asarray(kv.block_table(state, g.name))[1] for g in SPEC.groups}
        blocks["state"] = np.asarray(taken.blocks["state"])
        has = rows.holds(SPEC, 13)
        assert has["full"].tolist() == [True] * 3
        assert has["window8"].tolist() == [False, True, True]
        state, result = rows.begin(state, 0, 18, kv.Prefix(13, blocks))
        assert bool(result.ok)
        storage = kv.copy_blocks(storage, result.copies)
        plan = kv.transfer.plan(SPEC, 18, receiver_has=has)
        assert plan.items("window8").tolist() == [3, 4]
        senders, peers = await serve(source, 1, "r")
        inbox = await fetch(Inbox(plan, 0), "r", peers, has=has)
        target.ranks[0] = rows.finish(state, storage, 0, inbox)
        for name, wanted in source.content(0, 1).items():
            np.testing.assert_array_equal(target.content(0, 0)[name], wanted)
        target.check()
        await close(senders)

    asyncio.run(run())


def test_layers_are_sent_as_they_come():
    async def run():
        source = Machine()
        source.fill(1, 21)
        (ready,) = source.offers(1, "slow")
        growing = Offer("slow", SPEC, 21)
        sender = Sender(timeout=5.0)
        peers = {0: (HOST, await sender.listen())}
        sender.offer(growing)
        plan = kv.transfer.plan(SPEC, 21)
        inbox = Inbox(plan, 0, by_layer=True)
        task = asyncio.ensure_future(fetch(inbox, "slow", peers, streams=1))
        seen = []
        for name, blocks in zip([g.name for g in SPEC.groups], ready.blocks, strict=True):
            async with asyncio.timeout(5.0):
                while inbox.arrivals.missing > 5 - len(seen):
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.02)
            seen.append(inbox.arrivals.missing)
            items = growing.items[SPEC.group_index(name)]
            for half in np.array_split(np.arange(len(blocks)), 2):
                growing.put(name, blocks[half], range(1), items[half])
            growing.notify()
        await task
        assert seen == [5, 4, 3, 2, 1]
        assert await sender.delivered(growing)
        for got, wanted in zip(inbox.blocks, ready.blocks, strict=True):
            assert got.tobytes() == wanted.tobytes()
        await sender.close()

    asyncio.run(run())


def test_a_full_pool_at_the_receiver_is_a_value_and_nothing_moves():
    async def run():
        source, target = Machine(), Machine(blocks={**{g.name: 32 for g in SPEC.groups}, "full": 5})
        source.fill(1, 21)
        free = target.free()
        state = target.ranks[0][0]
        after, result = rows.begin(state, 0, 21)
        assert after is state
        assert result.status.tolist() == [kv.Status.NEVER]
        senders, peers = await serve(source, 1, "r")
        assert not await receive(target, 0, 21, 1, "r", peers)
        assert target.free() == free
        target.check()
        assert not await senders[0].delivered(senders[0].offers["r"], 0.05)
        assert not senders[0].offers
        await close(senders)

    asyncio.run(run())


def test_a_longer_row_than_a_step_comes_in_steps():
    async def run():
        source, target = Machine(), Machine(max_step_tokens=8)
        source.fill(1, 45)
        senders, peers = await serve(source, 1, "r")
        assert await receive(target, 0, 45, 1, "r", peers)
        for name, blocks in source.content(0, 1).items():
            np.testing.assert_array_equal(target.content(0, 0)[name], blocks)
        target.check()
        await close(senders)

    asyncio.run(run())


def test_what_a_block_lacks_at_its_start_comes_along():
    """Where chunks are shorter than blocks, a block may lack the tokens of an earlier chunk."""
    spec = kv.CacheSpec.from_layers([kv.ChunkedLocal(2, 1, 4)], block_size=8)

    async def run():
        source, target = Machine(1, spec), Machine(1, spec)
        source.fill(1, 14)
        state, storage = source.ranks[0]
        state, result = kv.truncate(state, [-1, 4])  # into a fresh block, which lacks 0..3
        assert bool(result.ok)
        state, result = kv.reserve(state, [0, 2])
        state = kv.advance(state, [0, 2])
        source.ranks[0] = (state, storage)
        (offer,) = source.offers(1, "r")
        assert offer.lacks == {"chunk2": {0: 4}}
        senders, peers = await serve(source, 1, "r")
        assert await receive(target, 0, 6, 1, "r", peers)
        await close(senders)
        target.check()
        for state, row in ((source.ranks[0][0], 1), (target.ranks[0][0], 0)):
            for length, status in ((3, kv.Status.UNREACHABLE), (5, kv.Status.OK)):
                lengths = np.full(2, -1, np.int32)
                lengths[row] = length
                _, result = kv.truncate(state, lengths)
                assert int(result.status[row]) == status

    asyncio.run(run())


def test_a_resumed_fetch_asks_only_for_what_is_missing():
    async def run():
        source = Machine()
        source.fill(1, 21)
        senders, peers = await serve(source, 1, "r")
        plan = kv.transfer.plan(SPEC, 21)
        first, second = Inbox(plan, 0, 300), Inbox(plan, 0, 300)
        await fetch(first, "r", peers)
        (offer,) = source.offers(1, "r")
        offers = [*senders[0].offers.values()]
        for ended in offers:
            senders[0].withdraw(ended)
        senders[0].offer(offer)
        listed = second.arrivals.outlines[0]
        half = len(listed.parcels) // 2
        for number in range(half):
            put(second, 0, number, bytes_of(offer, listed, number))
            second.arrivals.add(0, number)
        await fetch(second, "r", peers)
        assert second.received == sum(p.num_bytes for p in listed.parcels[half:])
        for a, b in zip(first.blocks, second.blocks, strict=True):
            assert a.tobytes() == b.tobytes()
        await close(senders)

    asyncio.run(run())


def test_a_sender_that_has_nothing_to_send_hears_of_the_end():
    """What four ranks have alike the first sends; or the receiver has everything already."""
    latent = kv.CacheSpec.from_layers([kv.LatentAttention(4, 2)], block_size=4)

    async def run(has):
        plan = kv.transfer.plan(latent, 9, Shards(4), Shards(1), receiver_has=has)
        senders, peers = [Sender() for _ in range(4)], {}
        offers = [Offer("r", latent, 9, Shards(4), rank) for rank in range(4)]
        for rank, (sender, offer) in enumerate(zip(senders, offers, strict=True)):
            peers[rank] = (HOST, await sender.listen())
            sender.offer(offer).put("latent", offer.blocks[0])
        assert plan.pairs == (() if has else ((0, 0),))
        await fetch(Inbox(plan, 0), "r", peers, has=has)
        assert [offer.outcome for offer in offers] == ["delivered"] * 4
        await close(senders)

    for has in (None, {"latent": np.ones(3, bool)}):
        asyncio.run(run(has))


def test_an_inbox_does_not_go_on_with_another_offer_of_the_same_name():
    """As of a sender that began anew: what it has of a request of that name is another prompt's."""

    async def run():
        sender, layer = Sender(), kv.CacheSpec.from_layers([kv.FullAttention(1, 4)], block_size=4)
        peers = {0: (HOST, await sender.listen())}
        inbox = Inbox(kv.transfer.plan(layer, 8), 0, max_bytes=1)
        first, second = (Offer("r", layer, 8) for _ in range(2))
        for value, offer in ((1, first), (2, second)):
            offer.put("full", np.full_like(offer.blocks[0][:1], value), items=[0])
        sender.offer(first)
        task = asyncio.ensure_future(fetch(inbox, "r", peers, streams=1, retries=1))
        while inbox.arrivals.missing == 2:
            await asyncio.sleep(0.01)
        sender.withdraw(first)
        second.put("full", np.full_like(second.blocks[0], 2))
        sender.offer(second)
        with pytest.raises(TransferError, match="sender 0 has another offer of this name now"):
            await task
        assert inbox.blocks[0][:, 0].tolist() == [1, 0]
        assert second.outcome is None  # the end that was told is the first one's
        await fetch(Inbox(inbox.plan, 0), "r", peers)
        assert second.outcome == "delivered"
        await sender.close()

    asyncio.run(run())


def test_a_receiver_less_patient_than_its_sender_waits_for_a_prefill_too():
    async def run():
        sender, layer = Sender(timeout=30.0), kv.CacheSpec.from_layers([kv.FullAttention(1, 4)])
        peers = {0: (HOST, await sender.listen())}
        offer = sender.offer(Offer("r", layer, 8))
        inbox = Inbox(kv.transfer.plan(layer, 8), 0)
        task = asyncio.ensure_future(fetch(inbox, "r", peers, timeout=0.8, retries=0))
        await asyncio.sleep(1.6)
        assert not task.done()
        offer.put("full", offer.blocks[0])
        offer.notify()
        await task
        await sender.close()

    asyncio.run(run())


def test_an_error_of_our_own_ends_the_offer(monkeypatch):
    """Such as no memory: it comes out as it is, and no sender waits for more."""

    def no_memory(*_):
        raise MemoryError

    async def run():
        source = Machine()
        source.fill(1, 21)
        senders, peers = await serve(source, 1, "r")
        offer = senders[0].offers["r"]
        inbox = Inbox(kv.transfer.plan(SPEC, 21), 0)
        monkeypatch.setattr(inbox, "count", no_memory)
        with pytest.raises(ExceptionGroup, match="TaskGroup"):
            await fetch(inbox, "r", peers)
        assert offer.outcome == "cancelled"
        await close(senders)

    asyncio.run(run())
