"""Peers that say what no peer of ours says: they end their own connection and nothing else."""

import asyncio
import json
import socket
import tracemalloc

import pytest
from machines import SPEC

import kvpool as kv
from kvpool.transfer import Inbox, TransferError, fetch, wire

DEEP = b'{"lacks": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def frame(kind, message, channel=0):
    """The bytes of a control message, given as a dict or as they are."""
    payload = message if isinstance(message, bytes) else json.dumps(message).encode()
    return wire._frame(kind, channel, b"", 0, payload)


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
    assert peak < wire.MAX_CONTROL // 16


@pytest.mark.parametrize("payload", [DEEP, b"\xff", b"{", b"[]", b"1"])
def test_a_message_that_is_no_object(payload):
    with pytest.raises(wire.ProtocolError, match="a message is no JSON"):
        asyncio.run(received(frame(wire.HELLO, payload)))


def test_long_messages_come_whole():
    message = {"text": "x" * 300_000}
    assert asyncio.run(received(frame(wire.HELLO, message))) == message


async def fetch_from(answer, **options):
    """Fetches from a sender that answers every hello with these bytes."""

    async def serve(reader, writer):
        await reader.readexactly(wire._HEADER.size)
        writer.write(answer)
        await writer.drain()
        writer.close()

    inbox = Inbox(kv.transfer.plan(SPEC, 21), 0)
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        peers = {0: server.sockets[0].getsockname()}
        await fetch(inbox, "r", peers, timeout=1.0, retries=0, **options)


@pytest.mark.parametrize("kind", [wire.ACCEPT, wire.REFUSE, wire.HELLO])
def test_an_answer_too_deep_to_read_ends_the_fetch(kind):
    with pytest.raises(TransferError, match="a message is no JSON"):
        asyncio.run(fetch_from(frame(kind, DEEP)))
