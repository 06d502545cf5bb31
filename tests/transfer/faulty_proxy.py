"""A proxy between a receiver and a sender that does one kind of harm to some connections."""

import asyncio
import contextlib
import socket
import struct

import xxhash

from kvpool.transfer import wire

KINDS = ("kill", "cut", "delay", "duplicate", "corrupt", "refuse", "reorder", "drop", "foreign",
         "corrupt hello", "corrupt copy", "other key")  # fmt: skip
HEAD, SUM = wire._HEADER.size, wire._SUM.size
DATA_KIND = bytes([wire.DATA])


def _resigned(frame):
    """The frame with the checksum that its bytes have."""
    return frame[:-SUM] + wire._SUM.pack(xxhash.xxh3_64_intdigest(frame[:-SUM]))


class Proxy:
    """Harms the first `hits` connections, each at a frame that `random` chooses."""

    def __init__(self, target, kind, hits, random, seconds=0.01):
        self.target, self.kind, self.hits = target, kind, hits
        self.random, self.seconds = random, seconds
        self.harmed = 0
        self.server = None
        self.connections = set()  # a task each

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()

    async def __aexit__(self, *error):
        self.server.close()
        await self.server.wait_closed()
        for task in self.connections:
            task.cancel()
        await asyncio.gather(*self.connections, return_exceptions=True)

    async def _serve(self, reader, writer):
        self.connections.add(asyncio.current_task())
        with contextlib.closing(writer):
            await self._connect(reader, writer)

    async def _connect(self, reader, writer):
        harmful = self.hits > 0
        self.hits -= harmful
        if harmful and self.kind == "refuse":
            self.harmed += 1
            return
        try:
            peer_reader, peer_writer = await asyncio.open_connection(*self.target)
        except OSError:
            return
        with contextlib.closing(peer_writer):
            up = asyncio.ensure_future(
                self._upstream(reader, peer_writer, harmful and self.kind == "corrupt hello")
            )
            try:
                with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                    await self._downstream(peer_reader, writer, harmful)
            finally:
                up.cancel()
                await asyncio.gather(up, return_exceptions=True)

    async def _upstream(self, reader, writer, harmful):
        while data := await reader.read(1 << 16):
            if harmful:
                data = self._corrupted(data)
            writer.write(data)
            await writer.drain()

    def _corrupted(self, data):
        self.harmed += 1
        place, bit = self.random.randrange(len(data)), 1 << self.random.randrange(8)
        return data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]

    async def _downstream(self, reader, writer, harmful):
        count, when = 0, self.random.randrange(8)
        held = b""
        while True:
            start = await reader.readexactly(HEAD)
            key, _, size, _ = struct.unpack("!HIQQ", start[6:28])
            frame = start + await reader.readexactly(key + size + SUM)
            is_data = start[4:5] == DATA_KIND
            if harmful and count == when:
                frame, held = await self._harm(writer, frame, is_data)
                if frame is None:
                    return
            elif held:
                frame, held = frame + held, b""
            count += 1
            writer.write(frame)
            await writer.drain()

    async def _harm(self, writer, frame, is_data):
        """(what to send now, what after the next frame); (None, _) ends the connection."""
        self.harmed += 1
        if self.kind == "kill":
            linger = struct.pack("ii", 1, 0)  # a reset, as of a process that died
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return None, b""
        if self.kind == "cut":
            writer.write(frame[: self.random.randrange(len(frame))])
            await writer.drain()
            return None, b""
        if self.kind == "delay":
            await asyncio.sleep(self.seconds)
        if self.kind == "corrupt":
            return self._corrupted(frame), b""
        if self.kind == "drop" and is_data:
            return b"", b""
        if self.kind == "reorder" and is_data:
            return b"", frame
        if self.kind == "duplicate":
            return frame + frame, b""
        if self.kind == "corrupt copy":
            return frame + self._corrupted(frame), b""
        if self.kind == "foreign":
            return _resigned(frame[:20] + bytes(8) + frame[28:]), b""
        if self.kind == "other key" and is_data:
            return _resigned(frame[:HEAD] + frame[HEAD:].replace(b"/-/", b"/7/", 1)), b""
        return frame, b""
