"""Wire: frames over TCP, each with a checksum; control messages are JSON, blocks are plain bytes.

A frame is a header, the key of what it carries (data only), its payload and a checksum of all that.
The checksum comes last, so that large payloads are summed portion by portion on their way, while
they are in the cache of a processor. Whatever a peer sends, nothing is unpickled, and no length is
believed beyond what is due.
"""

import asyncio
import contextlib
import hashlib
import json
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import xxhash

from kvpool.status import SpecError
from kvpool.transfer.plan import TransferPlan

HELLO, ACCEPT, REFUSE, DATA, END, PING = range(1, 7)
MAGIC = b"kvpl"
MAX_CONTROL = 1 << 20  # bytes of a control message: read as JSON they are many times that
_HEADER = struct.Struct("!4sBBHIQQ")  # magic, kind, version, key bytes, number, bytes, channel
_SUM = struct.Struct("!Q")
_STEP = 1 << 16  # bytes of a message that are made room for at once


class ProtocolError(ConnectionError):
    """Bytes that no peer of this protocol sends, or that were changed on the way."""


class Frame(NamedTuple):
    """The header of a frame."""

    kind: int
    key_bytes: int
    number: int  # of a parcel
    num_bytes: int  # of the payload
    channel: int
    head: bytes  # the header as the checksum covers it


def channel_of(plan: TransferPlan | None, request: int | str, sender: int, receiver: int) -> int:
    """The number u64 that the frames of one request, pair of ranks and plan carry."""
    text = f"{request!r} {sender} {receiver} {plan.digest if plan else 'any plan'}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def address(name: str, peer) -> tuple[str, int]:
    """(host, port) of such a pair; SpecError for what is none."""
    try:
        host, port = peer
    except (TypeError, ValueError):
        host = port = None
    if not isinstance(host, str) or type(port) is not int or not 0 < port < 1 << 16:
        raise SpecError(f"{name}: wanted (host, port from 1 to 65535), got {peer!r:.80}")
    return host, port


def seconds(name: str, value) -> float:
    """A time that sockets and event loops both take; SpecError for another."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 1e-3 <= value <= 1e6:
        raise SpecError(f"{name}: wanted seconds from 0.001 to 1,000,000, got {value!r}")
    return float(value)


def token_text(token: str | None) -> str | None:
    """A token, or None for none; SpecError for another, which no message could carry."""
    with contextlib.suppress(AttributeError, UnicodeEncodeError):
        if token is None or token.encode():
            return token
    raise SpecError("token: wanted a text of at least one character, or None")


async def connect(host: str, port: int, timeout: float) -> socket.socket:
    """A socket, as `prepared`, connected to the first of a host's addresses that answers.

    Raises:
      OSError: where none does; that of the last.
    """
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"no host has the name {host!r:.80}") from error
    for family, kind, protocol, _, where in found:
        sock = prepared(socket.socket(family, kind, protocol), timeout)
        try:
            await loop.sock_connect(sock, where)
        except OSError:
            sock.close()
            if where == found[-1][-1]:
                raise
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise OSError(f"the host {host!r:.80} has no address")


def prepared(sock: socket.socket, timeout: float) -> socket.socket:
    """The socket for an event loop; where a thread blocks on it, for at most `timeout` seconds."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
        sock.setsockopt(socket.SOL_SOCKET, option, limit)
    return sock


async def send(sock: socket.socket, kind: int, channel: int, payload: bytes = b"") -> None:
    """Sends one frame without a key."""
    await asyncio.get_running_loop().sock_sendall(sock, _frame(kind, channel, b"", 0, payload))


def _frame(kind: int, channel: int, key: bytes, number: int, payload: bytes) -> bytes:
    begin = _HEADER.pack(MAGIC, kind, 1, len(key), number, len(payload), channel) + key + payload
    return begin + _SUM.pack(xxhash.xxh3_64_intdigest(begin))


def send_data(
    sock: socket.socket, channel: int, key: bytes, number: int, num_bytes: int, portions,
    progress: Callable,
) -> None:  # fmt: skip
    """Sends a parcel from a thread: arrays u8[...] of `num_bytes` in all, which are not copied.

    Args:
      progress: called after each of them.
    """
    begin = _HEADER.pack(MAGIC, DATA, 1, len(key), number, num_bytes, channel) + key
    digest = xxhash.xxh3_64(begin)
    sock.sendall(begin)
    for portion in portions:
        digest.update(portion)
        sock.sendall(portion)
        progress()
    sock.sendall(_SUM.pack(digest.intdigest()))


async def in_thread(sock: socket.socket, work, *arguments):
    """work(sock, *arguments), which blocks: an event loop would wake up every few packets.

    Cancelling ends the connection, and waits until the work is over.
    """
    sock.setblocking(True)
    with ThreadPoolExecutor(1, "kvpool-transfer") as thread:
        done = asyncio.get_running_loop().run_in_executor(thread, work, sock, *arguments)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            await asyncio.wait((done,))
            done.exception()  # is no surprise
            raise
        finally:
            sock.setblocking(False)


async def send_message(sock: socket.socket, kind: int, channel: int, message: dict) -> None:
    """Sends a control message."""
    await send(sock, kind, channel, json.dumps(message).encode())


async def receive_header(sock: socket.socket) -> Frame:
    """The next frame's header; its payload is still to be read.  Raises as `read_header`."""
    start = bytearray(_HEADER.size)
    await _receive(sock, start)
    return _parsed(start)


def read_header(sock: socket.socket) -> Frame:
    """`receive_header` in a thread.

    Raises:
      ProtocolError: for what is no header.
      OSError: at the end of the connection, or when nothing comes for too long.
    """
    start = bytearray(_HEADER.size)
    read_all(sock, start)
    return _parsed(start)


def _parsed(start: bytearray) -> Frame:
    magic, kind, version, key_bytes, number, size, channel = _HEADER.unpack(start)
    if magic != MAGIC or version != 1 or not HELLO <= kind <= PING:
        raise ProtocolError(f"no frame begins with {bytes(start[:6])!r}")
    return Frame(kind, key_bytes, number, size, channel, bytes(start))


async def _receive(sock: socket.socket, buffer: bytearray) -> None:
    loop, left = asyncio.get_running_loop(), memoryview(buffer)
    while left:
        count = await loop.sock_recv_into(sock, left)
        if not count:
            raise ConnectionError("the peer closed the connection")
        left = left[count:]


def read_all(sock: socket.socket, buffer) -> None:
    """Fills a buffer; OSError when the connection ends, or nothing comes for too long."""
    left = memoryview(buffer)
    while left:
        count = sock.recv_into(left, len(left), socket.MSG_WAITALL)
        if not count:
            raise ConnectionError("the peer closed the connection")
        left = left[count:]


def read_key(sock: socket.socket, frame: Frame) -> bytes:
    """The key of a data frame."""
    key = bytearray(frame.key_bytes)
    read_all(sock, key)
    return bytes(key)


def read_payload(sock: socket.socket, frame: Frame, key: bytes, portions) -> None:
    """Fills buffers, of the payload's size in all, with the payload of a frame.

    Each is asked for when the one before is full.

    Raises:
      ProtocolError: for a wrong checksum; then the buffers have anything.
      OSError: as `read_header`.
    """
    digest, checksum = xxhash.xxh3_64(frame.head + key), bytearray(_SUM.size)
    for portion in portions:
        read_all(sock, portion)
        digest.update(portion)
    read_all(sock, checksum)
    if _SUM.pack(digest.intdigest()) != checksum:
        raise ProtocolError(f"frame {frame.number} of kind {frame.kind}: wrong checksum")


async def receive_message(sock: socket.socket, frame: Frame) -> dict[str, Any]:
    """The control message whose header was read; ProtocolError for anything else."""
    _check_message(frame)
    data, left = bytearray(), frame.num_bytes + _SUM.size
    while left:  # a length that a peer only claims, before it says its token, takes no memory
        piece = bytearray(min(left, _STEP))
        await _receive(sock, piece)
        data += piece
        left -= len(piece)
    payload = data[: frame.num_bytes]
    if _SUM.pack(xxhash.xxh3_64_intdigest(frame.head + payload)) != data[frame.num_bytes :]:
        raise ProtocolError(f"a message of kind {frame.kind}: wrong checksum")
    try:
        message = json.loads(payload or b"{}")
    except (ValueError, RecursionError) as error:
        raise ProtocolError("a message is no JSON") from error
    if not isinstance(message, dict):
        raise ProtocolError("a message is no JSON object")
    return message


def read_nothing(sock: socket.socket, frame: Frame) -> None:
    """The rest of a message without content; ProtocolError for another."""
    _check_message(frame)
    if frame.num_bytes:
        raise ProtocolError(f"a message of kind {frame.kind} out of turn")
    read_payload(sock, frame, b"", ())


def _check_message(frame: Frame) -> None:
    if frame.kind == DATA or frame.key_bytes or frame.num_bytes > MAX_CONTROL:
        raise ProtocolError(f"wanted a message, got {frame.num_bytes} bytes of kind {frame.kind}")


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
