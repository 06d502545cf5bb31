"""What is refused between two machines, and how a transfer that ends early ends."""

import asyncio
import re
import socket

import numpy as np
import pytest
from machines import HOST, SPEC, Machine, close, serve

import kvpool as kv
from kvpool.transfer import Inbox, Offer, Refused, Sender, Shards, TransferError, fetch, wire


def test_refusals_name_what_is_wrong():
    async def run():
        source = Machine()
        source.fill(1, 21)
        senders, peers = await serve(source, 1, "r", token="secret")
        other = kv.CacheSpec.from_layers(
            [*SPEC.layers[:1], kv.SlidingWindow(9, 4, 4), *SPEC.layers[2:]], block_size=4
        )
        cases = [
            ("r", SPEC, 21, None, "token: wrong or missing"),
            ("r", SPEC, 21, "secre", "token: wrong or missing"),
            ("q", SPEC, 21, "secret", "no request 'q' is offered"),
            (1, SPEC, 21, "secret", "no request 1 is offered"),
            (
                "r",
                SPEC,
                22,
                "secret",
                "plans differ: 21 tokens and snapshots at [] here, 22 and [] there",
            ),
            ("r", other, 21, "secret", "group window8: window 8;"),
        ]
        for request, spec, tokens, token, message in cases:
            inbox = Inbox(kv.transfer.plan(spec, tokens), 0)
            with pytest.raises(Refused, match=re.escape(message)):
                await fetch(inbox, request, peers, token=token)
            assert inbox.received == 0
        inbox = Inbox(kv.transfer.plan(SPEC, 21, snapshots=[8]), 0)
        with pytest.raises(
            Refused, match=r"21 tokens and snapshots at \[\] here, 21 and \[8\] there"
        ):
            await fetch(inbox, "r", peers, token="secret")
        assert senders[0].sent == 0
        with pytest.raises(kv.SpecError, match="request 'r' is offered already"):
            senders[0].offer(Offer("r", SPEC, 3))
        with pytest.raises(kv.SpecError, match=r"peers: wanted senders \[0\] too"):
            await fetch(Inbox(kv.transfer.plan(SPEC, 21), 0), "r", {})
        await close(senders)

    asyncio.run(run())


def test_a_port_in_use_and_an_open_address_without_token_are_refused():
    async def run():
        first, second = Sender(), Sender()
        port = await first.listen()
        with pytest.raises(kv.SpecError, match=f"port: cannot listen on 127.0.0.1:{port}: Address"):
            await second.listen(port=port)
        for host in ("0.0.0.0", "::", "192.0.2.1"):
            with pytest.raises(kv.SpecError, match="can be reached from other machines"):
                await second.listen(host)
        third = Sender(token="t")
        for port, told in ((70000, "port must be 0-65535"), ("1", "'str' object")):
            with pytest.raises(kv.SpecError, match=f"cannot listen on 127.0.0.1:{port}: .*{told}"):
                await third.listen(port=port)
        await third.listen("0.0.0.0")
        with pytest.raises(kv.SpecError, match=f"listens on port {third.port} already"):
            await third.listen()
        await close([first, second, third])

    asyncio.run(run())


def test_bytes_of_no_protocol_end_their_connection_and_nothing_else():
    async def run():
        source = Machine()
        source.fill(1, 21)
        senders, peers = await serve(source, 1, "r", timeout=0.3)
        for junk in (b"GET / HTTP/1.1\r\n\r\n" * 4, b"\x80\x04cos\nsystem\n" + bytes(64), b"kvpl"):
            with socket.create_connection(peers[0]) as sock:
                sock.sendall(junk)
                await asyncio.sleep(0.02)
        inbox = Inbox(kv.transfer.plan(SPEC, 21), 0)
        await fetch(inbox, "r", peers)
        assert inbox.arrivals.ready
        await close(senders)

    asyncio.run(run())


def test_a_cancelled_fetch_ends_the_offer():
    async def run():
        sender = Sender(timeout=5.0)
        peers = {0: (HOST, await sender.listen())}
        offer = sender.offer(Offer("r", SPEC, 21))  # nothing is ever put
        inbox = Inbox(kv.transfer.plan(SPEC, 21), 0)
        task = asyncio.ensure_future(fetch(inbox, "r", peers))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not await sender.delivered(offer)
        assert offer.outcome == "cancelled"
        assert not sender.offers
        await sender.close()
        assert not sender._tasks

    asyncio.run(run())


def test_a_sender_that_withdraws_or_dies_ends_the_fetch():
    async def run(close_all):
        sender = Sender(timeout=5.0)
        peers = {0: (HOST, await sender.listen())}
        offer = sender.offer(Offer("r", SPEC, 21))
        inbox = Inbox(kv.transfer.plan(SPEC, 21), 0)
        task = asyncio.ensure_future(fetch(inbox, "r", peers, retries=1))
        await asyncio.sleep(0.05)
        sender.withdraw(offer)
        if close_all:
            await sender.close()
        with pytest.raises(TransferError):
            await task
        await sender.close()

    for close_all in (False, True):
        asyncio.run(run(close_all))


@pytest.mark.parametrize("text", [None, 3, "x:00", "3:zz", "9:00", "-1:00"])
def test_masks_that_are_none(text):
    with pytest.raises(wire.ProtocolError, match="wanted bits as text"):
        wire.bits_from_text(text)


def test_large_parcels_and_their_cancelling():
    """Payloads that threads move all come, and a fetch in the middle of one can be ended."""
    spec = kv.CacheSpec.from_layers([kv.FullAttention(8, 128)] * 4, block_size=16)

    async def run():
        sender = Sender(timeout=5.0)
        peers = {0: (HOST, await sender.listen())}
        plan = kv.transfer.plan(spec, 2048)
        for request, seconds in (("whole", None), ("cut", 0.004)):
            offer = Offer(request, spec, 2048)
            random = np.random.default_rng(0)
            offer.put("full", random.integers(0, 256, offer.blocks[0].shape, np.uint8))
            sender.offer(offer)
            inbox = Inbox(plan, 0)
            task = asyncio.ensure_future(fetch(inbox, request, peers, streams=3))
            if seconds is not None:
                await asyncio.sleep(seconds)
                task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            came = await sender.delivered(offer)
            assert came == (not task.cancelled())
            if came:
                assert inbox.blocks[0].tobytes() == offer.blocks[0].tobytes()
        await sender.close()
        assert not sender._tasks

    asyncio.run(run())


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"streams": 1.5}, "streams: wanted an integer of at least 1, got 1.5"),
        ({"retries": -1}, "retries: wanted an integer of at least 0, got -1"),
        ({"timeout": 0}, "timeout: wanted seconds from 0.001 to 1,000,000, got 0"),
        ({"timeout": float("inf")}, "timeout: wanted seconds from 0.001 to 1,000,000, got inf"),
        ({"timeout": None}, "timeout: wanted seconds from 0.001 to 1,000,000, got None"),
        ({"token": b"t"}, "token: wanted a text"),
        ({"token": "\ud800"}, "token: wanted a text"),
        ({"request": None}, "request: wanted an integer from 0 to"),
        ({"peers": {0: None}}, r"peers\[0\]: wanted \(host, port from 1 to 65535\), got None"),
        ({"peers": {0: (HOST, 70000)}}, r"peers\[0\]: wanted \(host, port"),
        ({"peers": {0: (HOST, "1")}}, r"peers\[0\]: wanted \(host, port"),
        ({"has": {"full": np.array([True])}}, "has: the plan was made with other masks"),
        ({"has": {"all": np.array([True])}}, "no group 'all'"),
    ],
)
def test_a_fetch_that_cannot_be_is_refused_before_it_connects(wrong, told):
    given = {"request": "r", "peers": {0: (HOST, 1)}, **wrong}
    with pytest.raises(kv.SpecError, match=told):
        asyncio.run(fetch(Inbox(kv.transfer.plan(SPEC, 21), 0), **given))


@pytest.mark.parametrize("wrong", [{"token": b"t"}, {"timeout": float("inf")}, {"timeout": 0}])
def test_a_sender_that_cannot_be(wrong):
    with pytest.raises(kv.SpecError, match=f"{next(iter(wrong))}: wanted"):
        Sender(**wrong)


def test_a_host_that_no_name_has_ends_the_fetch():
    for host in ("a" * 300, "\ud800"):
        with pytest.raises(TransferError, match="no host has the name"):
            asyncio.run(fetch(Inbox(kv.transfer.plan(SPEC, 21), 0), "r", {0: (host, 1)}, retries=0))


def test_every_address_of_a_host_is_tried(monkeypatch):
    """As where localhost is ::1 first and 127.0.0.1 then, and the sender listens on one."""

    async def run():
        source = Machine()
        source.fill(1, 21)
        senders, peers = await serve(source, 1, "r")
        port = peers[0][1]
        loop, kind = asyncio.get_running_loop(), socket.SOCK_STREAM
        addresses = [(socket.AF_INET, kind, 0, "", (host, port)) for host in ("127.0.0.2", HOST)]

        async def two_addresses(host, *_, **__):
            return addresses

        monkeypatch.setattr(loop, "getaddrinfo", two_addresses)
        inbox = Inbox(kv.transfer.plan(SPEC, 21), 0)
        await fetch(inbox, "r", {0: ("localhost", port)}, retries=0)
        assert inbox.arrivals.ready
        addresses.pop()
        with pytest.raises(TransferError, match="Connect call failed"):
            await fetch(Inbox(inbox.plan, 0), "r", {0: ("localhost", port)}, retries=0)
        await close(senders)

    asyncio.run(run())


@pytest.mark.parametrize("rank", [4, -1, 0.5, None])
def test_a_rank_that_there_is_not(rank):
    """Nothing would come to it or from it, and an inbox of nothing is full from the start."""
    with pytest.raises(kv.SpecError, match=f"rank: wanted a rank from 0 to 3, got {rank}"):
        Offer("r", SPEC, 21, Shards(4), rank)
    with pytest.raises(kv.SpecError, match=f"rank: wanted a rank from 0 to 3, got {rank}"):
        Inbox(kv.transfer.plan(SPEC, 21, Shards(2), Shards(2, 2)), rank)


@pytest.mark.parametrize(
    "layers",
    [range(0, 4, 2), range(-1, 2), range(2, 9), range(4, 8), range(3, -1, -1), [0, 1]],
)
def test_layers_that_there_are_not_are_not_put(layers):
    spec = kv.CacheSpec.from_layers([kv.FullAttention(1, 4)] * 4, block_size=4)
    offer = Offer("r", spec, 8)
    with pytest.raises(kv.SpecError, match="layers: wanted a range of"):
        offer.put("full", np.ones((2, 4 * 64), np.uint8), layers)
    assert not offer._here[0].any()
    offer.put("full", np.ones((2, 4 * 64), np.uint8), range(1, 3))
    assert offer._here[0].tolist() == [[False] * 2, [True] * 2, [True] * 2, [False] * 2]


def test_peers_that_are_mixed_up_are_told_apart():
    async def run():
        source = Machine(2)
        source.fill(1, 21)
        senders, peers = await serve(source, 1, "r")
        plan = kv.transfer.plan(SPEC, 21, Shards(2), Shards(2))
        for rank in range(2):
            with pytest.raises(Refused, match=f"wanted rank {rank}, this is {1 - rank}"):
                await fetch(Inbox(plan, rank), "r", {0: peers[1], 1: peers[0]})
        await close(senders)

    asyncio.run(run())


def test_the_end_of_an_offer_is_not_the_end_of_the_next_one_of_its_name():
    async def run():
        sender = Sender()
        first = sender.offer(Offer("r", SPEC, 21))
        waits = asyncio.ensure_future(sender.delivered(first))
        await asyncio.sleep(0)
        sender.withdraw(first)
        second = sender.offer(Offer("r", SPEC, 21))
        assert not await waits
        assert sender.offers == {"r": second}
        sender.withdraw(second)
        with pytest.raises(
            kv.SpecError, match="request 'r': the offer was withdrawn; make another"
        ):
            sender.offer(first)
        await sender.close()

    asyncio.run(run())
