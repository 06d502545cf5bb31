"""Peers that say what no peer of ours says: they end their own connection and nothing else."""

import asyncio
import json
import socket
import tracemalloc

import numpy as np
import pytest
from machines import SPEC, Machine, close, serve

import kvpool as kv
from kvpool.transfer import Inbox, Offer, Sender, Shards, TransferError, fetch, wire
from kvpool.transfer.receiver import _Call

DEEP = b'{"lacks": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def filled():
    source = Machine()
    source.fill(1, 21)
    return source


def frame(kind, message, channel=0):
    """The bytes of a control message, given as a dict or as they are."""
    payload = message if isinstance(message, bytes) else json.dumps(message).encode()
    return wire._frame(kind, channel, b"", 0, payload)


async def until(holds):
    async with asyncio.timeout(10.0):
        while not holds():
            await asyncio.sleep(0.01)


async def received(data):
    """The message that these bytes are."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setblocking(False)
        theirs.setblocking(False)
        sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(theirs, data))
        header = await wire.receive_header(ours)
        sending.add_done_callback(lambda _: theirs.shutdown(socket.SHUT_WR))
        return await wire.receive_message(ours, header)


def test_a_claimed_length_takes_no_memory():
    claims = wire._HEADER.pack(wire.MAGIC, wire.HELLO, 1, 0, 0, wire.MAX_CONTROL, 0)
    tracemalloc.start()
    with pytest.raises(ConnectionError):
        asyncio.run(received(claims))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < wire.MAX_CONTROL // 4


@pytest.mark.parametrize("payload", [DEEP, b"\xff", b"{", b"[]", b"1"])
def test_a_message_that_is_no_object(payload):
    with pytest.raises(wire.ProtocolError, match="a message is no JSON"):
        asyncio.run(received(frame(wire.HELLO, payload)))


def test_a_message_that_takes_much_more_memory_than_bytes():
    """Five million lists are 16 MiB on the way, and 400 here, before a token was said."""
    data = frame(wire.HELLO, b"[" + b"[]," * 5_000_000 + b"[]]")
    tracemalloc.start()
    with pytest.raises(wire.ProtocolError):
        asyncio.run(received(data))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20


def test_long_messages_come_whole():
    message = {"text": "x" * 300_000}
    assert asyncio.run(received(frame(wire.HELLO, message))) == message


async def fetch_from(answer, plan=None):
    """Fetches from a sender that answers every hello with these bytes."""

    async def serve(reader, writer):
        await reader.readexactly(wire._HEADER.size)
        writer.write(answer)
        await writer.drain()
        writer.close()

    inbox = Inbox(plan or kv.transfer.plan(SPEC, 21), 0)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        peers = {0: server.sockets[0].getsockname()}
        await fetch(inbox, "r", peers, timeout=1.0, retries=0)


@pytest.mark.parametrize("kind", [wire.ACCEPT, wire.REFUSE, wire.HELLO])
def test_an_answer_too_deep_to_read_ends_the_fetch(kind):
    with pytest.raises(TransferError, match="a message is no JSON"):
        asyncio.run(fetch_from(frame(kind, DEEP)))


async def answered(peer, message):
    """The bytes that a sender answers a hello with."""
    reader, writer = await asyncio.open_connection(*peer)
    writer.write(frame(wire.HELLO, message))
    try:
        return await asyncio.wait_for(reader.read(), 5.0)
    finally:
        writer.close()


def hello_of(plan, request="r", **changed):
    return _Call(Inbox(plan, 0), request, {}, None, 1, 1.0, 0)._hello(0, 0) | changed


@pytest.mark.parametrize("token", ["\ud800", None, 7, [], "None"])
def test_what_is_no_token_is_refused(token):
    async def run():
        senders, peers = await serve(filled(), 1, "r", token="None" if token is None else "t")
        got = await answered(peers[0], hello_of(kv.transfer.plan(SPEC, 21), token=token))
        await close(senders)
        assert b"token: wrong or missing" in got

    asyncio.run(run())


def test_a_receiver_of_a_million_ranks_is_refused_before_it_is_planned_for():
    plan = kv.transfer.plan(SPEC, 21, receiver=Shards(1, 10**6))
    hello = hello_of(
        kv.transfer.plan(SPEC, 21), shards=[1, 10**6], agreement=plan.agreement.to_dict(),
        digest=plan.digest,
    )  # fmt: skip

    async def run():
        senders, peers = await serve(filled(), 1, "r")
        got = await answered(peers[0], hello)
        await close(senders)
        assert b"shards: wanted at most 4096 ranks, got [1, 1000000]" in got

    asyncio.run(run())


def test_a_peer_that_does_not_read_its_refusal_is_given_up(monkeypatch):
    monkeypatch.setattr(wire, "MAX_CONTROL", 16 << 20)
    hello = hello_of(kv.transfer.plan(SPEC, 21))
    hello["agreement"] = {"versions": [1, 1], "facts": {"a": "x" * (12 << 20)}}

    async def run():
        senders, peers = await serve(filled(), 1, "r", timeout=0.3)
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(peer, peers[0])
            await loop.sock_sendall(peer, frame(wire.HELLO, hello))
            await until(lambda: len(senders[0]._tasks) == 2)
            await until(lambda: len(senders[0]._tasks) == 1)  # the listener's
        await close(senders)

    asyncio.run(run())


def test_a_listener_outlives_having_no_files_left(monkeypatch):
    async def run():
        loop, refusals = asyncio.get_running_loop(), [OSError(24, "Too many open files")] * 2
        accept = loop.sock_accept

        async def short_of_files(listener):
            if refusals:
                raise refusals.pop()
            return await accept(listener)

        monkeypatch.setattr(loop, "sock_accept", short_of_files)
        senders, peers = await serve(filled(), 1, "r")
        inbox = Inbox(kv.transfer.plan(SPEC, 21), 0)
        await fetch(inbox, "r", peers, timeout=1.0, retries=0)
        assert not refusals
        assert inbox.arrivals.ready
        await close(senders)

    asyncio.run(run())


SHORT = kv.CacheSpec.from_layers([kv.ChunkedLocal(2, 1, 4)], block_size=8)


@pytest.mark.parametrize(
    "lacks",
    [b'{"chunk2": [[0, 7]]}', b'{"chunk2": [[0, 10000000000]]}', b'{"chunk2": [[0, -3]]}',
     b'{"chunk2": [[Infinity, 1]]}', b'{"chunk2": [[0, 1e999]]}', b'{"chunk2": [["0", 4]]}',
     b'{"chunk2": [[0, 4, 4]]}', b'{"full": [[0, 4]]}', b'{"chunk2": 4}', b"[]"],
)  # fmt: skip
def test_blocks_that_lack_what_cannot_be_end_the_fetch(lacks):
    """With 7 tokens in chunks of 2 the query at 7 reads from 6 on."""
    plan = kv.transfer.plan(SHORT, 7)
    channel = wire.channel_of(plan, "r", 0, 0)
    answer = frame(wire.ACCEPT, b'{"version": 1, "lacks": ' + lacks + b"}", channel)
    with pytest.raises(TransferError, match="wanted what blocks lack, got"):
        asyncio.run(fetch_from(answer, plan))


@pytest.mark.parametrize("version", [0, 2, True, None, "1"])
def test_a_version_that_is_not_spoken_here_ends_the_fetch(version):
    channel = wire.channel_of(kv.transfer.plan(SPEC, 21), "r", 0, 0)
    with pytest.raises(TransferError, match="wanted a version from 1 to 1, got"):
        asyncio.run(fetch_from(frame(wire.ACCEPT, {"version": version}, channel)))


@pytest.mark.parametrize(
    ("versions", "told"),
    [([1, 3], b'{"version": 1, '), ([2, 3], b"no transfer: versions: 1 to 1 here, 2 to 3 there")],
)
def test_a_sender_settles_on_a_version_and_says_so(versions, told):
    hello = hello_of(kv.transfer.plan(SPEC, 21))
    hello["agreement"]["versions"] = versions

    async def run():
        senders, peers = await serve(filled(), 1, "r")
        got = await answered(peers[0], hello)
        await close(senders)
        assert told in got

    asyncio.run(run())


@pytest.mark.parametrize("size", [1 << 27, 10**30])
def test_parcels_of_a_size_that_a_stream_should_not_hold(size):
    plan = kv.transfer.plan(SPEC, 21)

    async def run():
        senders, peers = await serve(filled(), 1, "r")
        got = await answered(peers[0], hello_of(plan, max_bytes=size))
        await close(senders)
        assert b"max_bytes: wanted at most 67,108,864, got 1" in got

    asyncio.run(run())
    with pytest.raises(kv.SpecError, match="max_bytes: wanted at most 67,108,864, got 1"):
        Inbox(plan, 0, size)


@pytest.mark.parametrize("timeout", [None, 0, "1", True, float("inf"), float("nan")])
def test_a_hello_of_no_time(timeout):
    async def run():
        senders, peers = await serve(filled(), 1, "r")
        got = await answered(peers[0], hello_of(kv.transfer.plan(SPEC, 21), timeout=timeout))
        await close(senders)
        assert b"timeout: wanted seconds from 0.001 to" in got

    asyncio.run(run())


def test_a_peer_that_takes_a_byte_now_and_then_does_not_hold_a_stream():
    """What it takes of a large parcel is a sign of life, but only a piece of it is."""
    spec = kv.CacheSpec.from_layers([kv.FullAttention(8, 128)] * 8, block_size=16)

    async def run():
        loop, sender = asyncio.get_running_loop(), Sender(timeout=5.0)
        port = await sender.listen()
        offer = sender.offer(Offer("r", spec, 1024))
        offer.put("full", np.ones_like(offer.blocks[0]))
        signs, touch = [], offer.touch
        offer.touch = lambda: signs.append(touch())
        with socket.socket() as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.setblocking(False)
            await loop.sock_connect(peer, ("127.0.0.1", port))
            hello = hello_of(kv.transfer.plan(spec, 1024), max_bytes=64 << 20)
            hello["here"] = wire.bits_to_text([False])
            await loop.sock_sendall(peer, frame(wire.HELLO, hello))
            waits = asyncio.ensure_future(sender.delivered(offer, 1.0))
            # The hello, and pieces that went into the system's buffers.
            await until(lambda: len(signs) >= 2)
            assert len(sender._tasks) == 2
            while not waits.done():
                await loop.sock_recv(peer, 1)
                await asyncio.sleep(0.02)
            assert offer.outcome == "withdrawn"
            await until(lambda: len(sender._tasks) == 1)  # the listener's
        await sender.close()

    asyncio.run(run())
