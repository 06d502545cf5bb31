"""Receiver: fetches what one rank needs of a request from everyone who sends it something.

Bytes go into arrays of the receiver's own, the inbox, and count only once their checksum is right;
what was lost on the way is asked for again. Nothing of the cache is touched before all has come.
"""

import asyncio
import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvpool.buffers import count, positive
from kvpool.status import SpecError
from kvpool.transfer import wire
from kvpool.transfer.answers import lacks_of, version_of
from kvpool.transfer.arrivals import Arrivals
from kvpool.transfer.keys import checked_request
from kvpool.transfer.offer import as_slice, local_items, places_of
from kvpool.transfer.parcels import MAX_BYTES, PORTION, outline, parcel_key, unpack
from kvpool.transfer.plan import TransferPlan
from kvpool.transfer.shards import rank_groups


class TransferError(Exception):
    """A transfer that did not come to its end; the request is to be computed instead."""


class Refused(TransferError):
    """The sender said no, and why."""


class Inbox:
    """The bytes of one receiving rank: `blocks` u8[K, bytes_per_block] of each group's `items`."""

    def __init__(
        self, plan: TransferPlan, rank: int, max_bytes: int = MAX_BYTES, by_layer: bool = False
    ):
        """An empty inbox; SpecError for a rank that there is not, or max_bytes as in `outline`."""
        plan.receiver.check_rank(rank)
        self.plan, self.rank = plan, rank
        self.max_bytes, self.by_layer = max_bytes, by_layer
        self.items = local_items(plan, plan.receiver, rank)
        self.blocks: list[Any] = [
            np.zeros((len(items), group.bytes_per_block), np.uint8)
            for items, group in zip(
                self.items, rank_groups(plan.spec, plan.receiver.heads), strict=True
            )
        ]
        senders = [sender for sender, receiver in plan.pairs if receiver == rank]
        self.arrivals = Arrivals(
            {sender: outline(plan, sender, rank, max_bytes, by_layer) for sender in senders}
        )
        self.lacks: dict[str, dict[int, int]] = {}
        self.marks: dict[int, str] = {}  # of the offer of each sender that anything came from
        self.received = 0  # bytes of payload that came, also twice
        self._lock = threading.Lock()
        self.began: float | None = None  # time.perf_counter() at the first parcel's header

    def check_peers(self, peers: Mapping[int, Any]) -> None:
        """SpecError unless every sender has an entry."""
        missing = sorted(set(self.arrivals.outlines) - set(peers))
        if missing:
            raise SpecError(f"peers: wanted senders {missing} too")

    def aside(self) -> np.ndarray:
        """u8[...], room for any portion; memory that is used again is there already."""
        listed = self.arrivals.outlines.values()
        layers = [piece.lane.layer_bytes for of_sender in listed for piece in of_sender.pieces]
        return np.empty(max([PORTION, *layers]), np.uint8)

    def portions(self, sender: int, number: int, aside: np.ndarray) -> Iterator[np.ndarray]:
        """Buffers u8[...] to fill, one after the other, with the bytes of a parcel.

        They are where the bytes belong, if that is one run; else they are `aside`, and what was
        filled is put in its place when the next is asked for.
        """
        listed = self.arrivals.outlines[sender]
        parcel = listed.parcels[number]
        piece = listed.pieces[parcel.piece]
        lane, blocks = piece.lane, self.blocks[piece.group]
        places = places_of(self.items[piece.group], piece.items[parcel.start : parcel.stop])
        for items, layers in parcel.portions():
            # Views one and all: other threads write to the same blocks.
            runs = as_slice(places[items])
            rows = [blocks[runs]] if isinstance(runs, slice) else [blocks[p : p + 1] for p in runs]
            part = slice(layers.start * lane.layer_bytes, layers.stop * lane.layer_bytes)
            if lane.kept_as_it_comes and rows[0][:, part].flags.c_contiguous:
                yield from (row[:, part].reshape(-1) for row in rows)
                continue
            data = aside[: len(places[items]) * (part.stop - part.start)]
            yield data
            data = data.reshape(len(rows), len(rows[0]), -1)
            for row, came in zip(rows, data, strict=True):
                unpack(lane, came, row, layers)

    def count(self, num_bytes: int) -> None:
        """Adds to `received`, from any thread."""
        with self._lock:
            self.received += num_bytes


async def fetch(
    inbox: Inbox,
    request: int | str,
    peers: Mapping[int, tuple[str, int]],
    *,
    has: Mapping[str, np.ndarray] | None = None,
    token: str | None = None,
    streams: int = 2,
    timeout: float = 30.0,
    retries: int = 3,
) -> Inbox:
    """Fills an inbox.

    Args:
      inbox: of a plan and a rank; one that a failed call has filled in part goes on from there, as
        long as the senders have the same offers.
      request: its name at the senders, which is for one sequence and no other.
      peers: {sender's rank: (host, port)}; those that send nothing are told how it ended too.
      has: the masks that the plan was made with.
      streams: connections to each sender.
      timeout: seconds without a byte after which a connection is given up.
      retries: how often a stream connects again.

    Raises:
      SpecError: for arguments that cannot be, and masks that the plan was not made with.
      Refused: by a sender, with its reason.
      TransferError: when streams broke too often; the inbox keeps what came.
    """
    inbox.check_peers(peers)
    peers = {sender: wire.address(f"peers[{sender}]", peer) for sender, peer in peers.items()}
    streams, retries = positive("streams", streams), count("retries", retries)
    timeout, token = wire.seconds("timeout", timeout), wire.token_text(token)
    request = checked_request(request)
    if inbox.plan.given(has) != inbox.plan:
        raise SpecError("has: the plan was made with other masks")
    call = _Call(inbox, request, has or {}, token, streams, timeout, retries)
    await call.run(peers)
    return inbox


@dataclasses.dataclass
class _Call:
    """One `fetch`."""

    inbox: Inbox
    request: int | str
    has: Mapping[str, np.ndarray]
    token: str | None
    streams: int
    timeout: float
    retries: int

    async def run(self, peers: Mapping[int, tuple[str, int]]) -> None:
        """All streams to their end, of which every sender is told."""
        try:
            async with asyncio.TaskGroup() as group:
                for sender in self.inbox.arrivals.outlines:
                    for stream in range(self.streams):
                        group.create_task(self.stream(sender, peers[sender], stream))
        except ExceptionGroup as failed:
            await self.tell(peers, "cancelled")
            found = [error for error in failed.exceptions if isinstance(error, TransferError)]
            if not found:
                raise
            raise found[0] from None
        except asyncio.CancelledError:
            await self.tell(peers, "cancelled")
            raise
        await self.tell(peers, "delivered")

    async def stream(self, sender: int, peer: tuple[str, int], stream: int) -> None:
        """Fetches every `streams`-th parcel of a sender, in as many connections as it takes."""
        here = self.inbox.arrivals.here(sender)
        for attempt in range(self.retries + 1):
            try:
                async with asyncio.timeout(self.timeout):
                    sock = await wire.connect(*peer, self.timeout)
                with sock:
                    await self._receive(sock, sender, stream)
                problem: Exception = ConnectionError("parcels are missing at the end")
            except (OSError, TimeoutError, wire.ProtocolError) as error:
                problem = error
            if here[stream :: self.streams].all():
                return
            await asyncio.sleep(min(0.01 * 2**attempt, self.timeout))
        missing = int((~here[stream :: self.streams]).sum())
        raise TransferError(
            f"request {self.request!r}: {missing} parcels of sender {sender} did not come in "
            f"{self.retries + 1} connections: {problem!r}"
        )

    async def tell(self, peers, outcome: str) -> None:
        """Tells every sender how it ended, also one that had nothing to send.

        One that cannot be told finds out by waiting.
        """
        await asyncio.gather(*(self._tell(peers[sender], sender, outcome) for sender in peers))

    async def _tell(self, peer: tuple[str, int], sender: int, outcome: str) -> None:
        mark = self.inbox.marks.get(sender)
        hello = {**self._hello(sender, 0), "outcome": outcome, "mark": mark}
        for _ in range(self.retries + 1):
            with contextlib.suppress(OSError, TimeoutError, wire.ProtocolError):
                async with asyncio.timeout(min(self.timeout, 1.0)):
                    with await wire.connect(*peer, self.timeout) as sock:
                        await wire.send_message(sock, wire.HELLO, 0, hello)
                        await wire.receive_header(sock)
                        return

    def _hello(self, sender: int, stream: int) -> dict:
        inbox = self.inbox
        here = inbox.arrivals.here(sender) if sender in inbox.arrivals.outlines else ()
        return {
            "token": self.token,
            "request": self.request,
            "agreement": inbox.plan.agreement.to_dict(),
            "digest": inbox.plan.digest,
            "num_tokens": inbox.plan.num_tokens,
            "snapshots": inbox.plan.snapshots,
            "shards": [inbox.plan.receiver.heads, inbox.plan.receiver.context],
            "sender": sender,
            "receiver": inbox.rank,
            "has": {name: wire.bits_to_text(mask) for name, mask in self.has.items()},
            "max_bytes": inbox.max_bytes,
            "by_layer": inbox.by_layer,
            "streams": self.streams,
            "stream": stream,
            "timeout": self.timeout,
            "here": wire.bits_to_text(here),
        }

    async def _receive(self, sock: socket.socket, sender: int, stream: int) -> None:
        """All parcels of one connection; returns at the sender's word that this is the end."""
        async with asyncio.timeout(self.timeout):
            await wire.send_message(sock, wire.HELLO, 0, self._hello(sender, stream))
            frame = await wire.receive_header(sock)
            answer = await wire.receive_message(sock, frame)
        if frame.kind == wire.REFUSE:
            reason = answer.get("reason")
            raise Refused(f"request {self.request!r}: sender {sender} refuses: {reason}")
        channel = wire.channel_of(self.inbox.plan, self.request, sender, self.inbox.rank)
        if frame.kind != wire.ACCEPT or frame.channel != channel:
            raise wire.ProtocolError(f"an answer to another request, {frame.channel:#x}")
        version_of(answer, self.inbox.plan)
        mark = str(answer.get("mark"))
        if self.inbox.marks.setdefault(sender, mark) != mark:
            raise TransferError(
                f"request {self.request!r}: sender {sender} has another offer of this name now; "
                "what came of the one before is of no use"
            )
        self.inbox.lacks.update(lacks_of(answer, self.inbox.plan))
        await wire.in_thread(sock, self._parcels, sender, stream, channel)

    def _parcels(self, sock: socket.socket, sender: int, stream: int, channel: int) -> None:
        """Receives parcels up to the end, in a thread of its own."""
        aside = self.inbox.aside()
        while True:
            frame = wire.read_header(sock)
            if frame.channel != channel:
                raise wire.ProtocolError(f"a message of an unknown request {frame.channel:#x}")
            if frame.kind == wire.DATA:
                if frame.number % self.streams != stream:
                    raise wire.ProtocolError(f"parcel {frame.number} in stream {stream}")
                self._parcel(sock, sender, frame, aside)
                continue
            wire.read_nothing(sock, frame)
            if frame.kind == wire.END:
                return
            if frame.kind != wire.PING:
                raise wire.ProtocolError(f"a message of kind {frame.kind} out of turn")

    def _parcel(self, sock, sender: int, frame: wire.Frame, aside: np.ndarray) -> None:
        """Receives one parcel, which counts only if its key and checksum are right."""
        inbox, number = self.inbox, frame.number
        inbox.began = inbox.began or time.perf_counter()
        listed = inbox.arrivals.outlines[sender]
        if number >= len(listed.parcels) or frame.num_bytes != listed.parcels[number].num_bytes:
            raise wire.ProtocolError(f"no parcel {number} of {frame.num_bytes} bytes is expected")
        key = wire.read_key(sock, frame)
        wanted = str(parcel_key(inbox.plan, listed, number, self.request, sender, inbox.rank))
        if key != wanted.encode():
            raise wire.ProtocolError(f"parcel {number}: wanted the key {wanted}, got {key!r:.80}")
        # What is right already must not be overwritten by what may be wrong.
        again = bool(inbox.arrivals.here(sender)[number])
        portions = inbox.portions(sender, number, aside)
        wire.read_payload(
            sock, frame, key, [np.empty(frame.num_bytes, np.uint8)] if again else portions
        )
        inbox.count(frame.num_bytes)
        if not again:
            inbox.arrivals.add(sender, number)
