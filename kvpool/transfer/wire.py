"""Wire: frames over TCP, each with a checksum; control messages are JSON, blocks are plain bytes.

A frame is a header, the key of what it carries (data only) and its payload. The checksum covers all
of it. Whatever a peer sends, nothing is unpickled, and no length is believed beyond what is due.
"""

import asyncio
import hashlib
import json
import socket
import struct
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kvpool.transfer.plan import TransferPlan

HELLO, ACCEPT, REFUSE, DATA, END, PING = range(1, 7)
MAGIC = b"kvpl"
MAX_CONTROL = 16 << 20  # bytes of a control message
_HEADER = struct.Struct("!4sBBHIQQ")  # magic, kind, version, key bytes, number, bytes, channel
_SUM = struct.Struct("!Q")
_BUFFER = 4 << 20  # bytes that a socket may hold


class ProtocolError(ConnectionError):
    """Bytes that no peer of this protocol sends, or that were changed on the way."""


class Frame(NamedTuple):
    """The header of a frame."""

    kind: int
    key_bytes: int
    number: int  # of a parcel
    num_bytes: int  # of the payload
    channel: int
    checksum: int
    head: bytes  # the header as the checksum covers it


def channel_of(plan: TransferPlan, request: int | str, sender: int, receiver: int) -> int:
    """The number u64 that the frames of one request and pair of ranks carry."""
    text = f"{request!r} {sender} {receiver} {plan.digest}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


async def connect(host: str, port: int) -> socket.socket:
    """A connected socket, or OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, kind, protocol, _, address = found[0]
    sock = prepared(socket.socket(family, kind, protocol))
    try:
        await loop.sock_connect(sock, address)
    except BaseException:
        sock.close()
        raise
    return sock


def prepared(sock: socket.socket) -> socket.socket:
    """The socket with large buffers, not waiting to fill a packet."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER)
    return sock


async def send(
    sock: socket.socket, kind: int, channel: int, payload=b"", key: bytes = b"", number: int = 0
) -> None:
    """Sends one frame; the payload is anything with bytes, and is not copied."""
    payload = memoryview(payload).cast("B")
    head = _HEADER.pack(MAGIC, kind, 1, len(key), number, len(payload), channel)
    start = head + _SUM.pack(_checksum(head, key, payload)) + key
    loop = asyncio.get_running_loop()
    if len(payload) < 1 << 16:
        await loop.sock_sendall(sock, start + payload)
        return
    await loop.sock_sendall(sock, start)
    await loop.sock_sendall(sock, payload)


async def send_message(sock: socket.socket, kind: int, channel: int, message: dict) -> None:
    """Sends a control message."""
    await send(sock, kind, channel, json.dumps(message).encode())


def _checksum(head: bytes, key: bytes, payload) -> int:
    digest = xxhash.xxh3_64(head)
    digest.update(key)
    digest.update(payload)
    return digest.intdigest()


async def receive_header(sock: socket.socket) -> Frame:
    """The next frame's header; its key and payload are still to be read.

    Raises:
      ProtocolError: for what is no header.
      ConnectionError: at the end of the connection.
    """
    start = bytearray(_HEADER.size + _SUM.size)
    await receive_into(sock, start)
    head = bytes(start[: _HEADER.size])
    magic, kind, version, key_bytes, number, size, channel = _HEADER.unpack(head)
    if magic != MAGIC or version != 1 or not HELLO <= kind <= PING:
        raise ProtocolError(f"no frame begins with {head[:6]!r}")
    (checksum,) = _SUM.unpack(start[_HEADER.size :])
    return Frame(kind, key_bytes, number, size, channel, checksum, head)


async def receive_into(sock: socket.socket, buffer) -> None:
    """Fills a buffer; ConnectionError when the connection ends before."""
    loop, view = asyncio.get_running_loop(), memoryview(buffer).cast("B")
    while view:
        count = await loop.sock_recv_into(sock, view)
        if not count:
            raise ConnectionError("the peer closed the connection")
        view = view[count:]


async def receive_key(sock: socket.socket, frame: Frame) -> bytes:
    """The key of a data frame."""
    key = bytearray(frame.key_bytes)
    await receive_into(sock, key)
    return bytes(key)


def check(frame: Frame, key: bytes, payload) -> None:
    """ProtocolError unless the checksum is that of what came."""
    if _checksum(frame.head, key, payload) != frame.checksum:
        raise ProtocolError(f"frame {frame.number} of kind {frame.kind}: wrong checksum")


async def receive_message(sock: socket.socket, frame: Frame) -> dict[str, Any]:
    """The control message whose header was read; ProtocolError for anything else."""
    if frame.kind == DATA or frame.key_bytes or frame.num_bytes > MAX_CONTROL:
        raise ProtocolError(f"wanted a message, got {frame.num_bytes} bytes of kind {frame.kind}")
    payload = bytearray(frame.num_bytes)
    await receive_into(sock, payload)
    check(frame, b"", payload)
    if not payload:
        return {}
    try:
        message = json.loads(payload)
    except ValueError as error:
        raise ProtocolError("a message is no JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("a message is no JSON object")
    return message


def bits_to_text(bits) -> str:
    """bool[K] as text."""
    bits = np.asarray(bits, bool)
    return f"{len(bits)}:{np.packbits(bits).tobytes().hex()}"


def bits_from_text(text) -> np.ndarray:
    """bool[K] of such a text; ProtocolError for another."""
    try:
        count, _, digits = text.partition(":")
        data = np.frombuffer(bytes.fromhex(digits), np.uint8)
        if len(data) != -(-int(count) // 8):
            raise ValueError("another length")
        return np.unpackbits(data, count=int(count)) > 0
    except (AttributeError, ValueError) as error:
        raise ProtocolError(f"wanted bits as text, got {text!r:.80}") from error
