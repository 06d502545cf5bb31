"""Sender: serves the offers of one rank over TCP.

A receiver connects with several streams. Each says what it wants and what it has already, and gets
the parcels that fall to it. An offer ends when everyone has said that all has come, when a receiver
cancels, or when nobody has asked for a while; a stream that ends early ends nothing else.
"""

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import itertools
import socket
import time

from kvpool.status import SpecError
from kvpool.transfer import wire
from kvpool.transfer.agreement import Agreement, agreement
from kvpool.transfer.offer import Offer
from kvpool.transfer.parcels import parcel_key
from kvpool.transfer.plan import TransferPlan, plan
from kvpool.transfer.stream import Stream, shards_of

_AGAIN = 0.05  # seconds until a listener that found no room tries again


class Sender:
    """A listener and the offers that it serves."""

    def __init__(self, *, token: str | None = None, timeout: float = 30.0):
        """Nothing listens yet.

        Args:
          token: what a peer has to say.
          timeout: seconds after which a peer that takes nothing, or says nothing, is given up.

        Raises:
          SpecError: for a token that is no text, or a timeout that is none.
        """
        self.token, self.timeout = wire.token_text(token), wire.seconds("timeout", timeout)
        self.offers: dict[int | str, Offer] = {}
        self.port = 0
        self.sent = 0  # bytes of payload
        self._listener: socket.socket | None = None
        self._tasks: set[asyncio.Task] = set()

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listens, and returns the port; 0 takes a free one.

        Raises:
          SpecError: for a port in use or none at all, an address beyond this machine without a
            token, or when it listens already.
        """
        if self._listener:
            raise SpecError(f"listen: this sender listens on port {self.port} already")
        if not _is_loopback(host) and not self.token:
            raise SpecError(f"host: {host} can be reached from other machines; give a token")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setblocking(False)
        try:
            listener.bind((host, port))
            listener.listen(128)
        except (OSError, OverflowError, TypeError, UnicodeError) as error:
            listener.close()
            reason = getattr(error, "strerror", None) or error
            raise SpecError(f"port: cannot listen on {host}:{port}: {reason}") from error
        self._listener, self.port = listener, listener.getsockname()[1]
        self._start(self._accept(listener))
        return self.port

    def offer(self, offer: Offer) -> Offer:
        """Serves an offer from now on; SpecError for one that ended, or where its name is taken."""
        if offer.request in self.offers:
            raise SpecError(f"request {offer.request!r} is offered already")
        if offer.outcome:
            raise SpecError(
                f"request {offer.request!r}: the offer was {offer.outcome}; make another"
            )
        self.offers[offer.request] = offer
        return offer

    async def delivered(self, offer: Offer, patience: float | None = None) -> bool:
        """Waits for the end of an offer, and forgets it.

        Args:
          patience: seconds without a sign of a receiver after which it ends; None: the timeout.

        Returns:
          Whether everyone has all of it; False when a receiver cancelled or none came.
        """
        patience = self.timeout if patience is None else patience
        while True:
            news = offer.news
            if offer.outcome:
                break
            left = offer.active + patience - time.monotonic()
            if left <= 0:
                offer.outcome = "withdrawn"
                break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), left)
        self.withdraw(offer)
        return offer.outcome == "delivered"

    def withdraw(self, offer: Offer) -> None:
        """Ends an offer; streams that are on their way are cut."""
        offer.outcome = offer.outcome or "withdrawn"
        if self.offers.get(offer.request) is offer:  # and not one that took its name since
            del self.offers[offer.request]
        for task in offer.streams:  # a peer that takes a byte now and then would hold them
            task.cancel()
        offer.notify()

    async def close(self) -> None:
        """Ends every offer and stream, and listens no more."""
        for offer in list(self.offers.values()):
            self.withdraw(offer)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._listener:
            self._listener.close()
            self._listener = None

    def _start(self, work) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError:  # such as too many open files, which others may close
                await asyncio.sleep(_AGAIN)
                continue
            self._start(self._serve(sock))

    async def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(ConnectionError, TimeoutError, OSError):
            wire.prepared(sock, self.timeout)
            async with asyncio.timeout(self.timeout):
                frame = await wire.receive_header(sock)
                if frame.kind != wire.HELLO:
                    raise wire.ProtocolError("wanted a hello")
                hello = await wire.receive_message(sock, frame)
            try:
                offer, agreed, stream, version = self._agree(hello)
            except (SpecError, wire.ProtocolError) as error:
                async with asyncio.timeout(self.timeout):
                    await wire.send_message(sock, wire.REFUSE, 0, {"reason": str(error)})
                return
            with contextlib.suppress(SpecError):  # items that are gone: the stream just ends
                await self._stream(sock, offer, agreed, stream, version)

    def _agree(self, hello: dict):
        """(offer, plan, stream, version) of a hello; SpecError or ProtocolError for a wrong one."""
        if self.token and not _is_token(hello.get("token"), self.token):
            raise SpecError("token: wrong or missing")
        request = hello.get("request")
        offer = self.offers.get(request) if isinstance(request, (int, str)) else None
        if offer is None:
            raise SpecError(f"no request {request!r:.80} is offered")
        if hello.get("mark") not in (None, offer.mark):
            raise SpecError(f"request {request!r:.80}: that offer has ended, this is another")
        if hello.get("sender") != offer.rank:
            raise SpecError(
                f"sender: wanted rank {hello.get('sender')!r:.80}, this is {offer.rank}"
            )
        receiver = shards_of(hello)
        mine = agreement(offer.spec, offer.shards, receiver)
        version = mine.settle(Agreement.from_dict(hello.get("agreement")))
        has = hello.get("has", {})
        if not isinstance(has, dict):
            raise wire.ProtocolError("wanted masks as an object")
        masks = {name: wire.bits_from_text(bits) for name, bits in has.items()}
        agreed = plan(offer.spec, offer.num_tokens, offer.shards, receiver, masks, offer.snapshots)
        if agreed.digest != hello.get("digest"):
            there = f"{hello.get('num_tokens')!r:.20} and {hello.get('snapshots')!r:.200}"
            raise SpecError(
                f"plans differ: {offer.num_tokens} tokens and snapshots at "
                f"{list(agreed.snapshots)} here, {there} there"
            )
        return offer, agreed, Stream.of(hello, agreed, offer), version

    async def _stream(
        self, sock, offer: Offer, agreed: TransferPlan, stream: Stream, version: int
    ) -> None:
        channel = wire.channel_of(agreed, offer.request, offer.rank, stream.receiver)
        if stream.outcome == "delivered":
            offer.served.add(stream.receiver)
        if stream.outcome == "cancelled" or (
            stream.outcome and {r for s, r in agreed.pairs if s == offer.rank} <= offer.served
        ):
            offer.outcome = offer.outcome or stream.outcome
        offer.notify()
        lacks = {name: sorted(of_group.items()) for name, of_group in offer.lacks.items()}
        async with asyncio.timeout(self.timeout):
            answer = {"version": version, "mark": offer.mark, "lacks": lacks}
            await wire.send_message(sock, wire.ACCEPT, channel, answer)
        if stream.outcome:
            return
        task = asyncio.current_task()
        assert task is not None
        offer.streams.add(task)
        try:
            await self._send(sock, offer, agreed, stream, channel)
        finally:
            offer.streams.discard(task)

    async def _send(self, sock, offer, agreed, stream: Stream, channel: int) -> None:
        left = stream.numbers
        while left:
            news = offer.news
            ready = list(itertools.takewhile(functools.partial(stream.is_ready, offer), left))
            if ready:
                sent = await wire.in_thread(
                    sock, _send_parcels, offer, agreed, stream, channel, ready
                )
                self.sent += sent
                left = left[len(ready) :]
                continue
            if offer.outcome:
                raise ConnectionError("the offer has ended")
            try:
                # Often enough for whoever is the first to give up.
                await asyncio.wait_for(news.wait(), min(self.timeout, stream.timeout) / 4)
            except TimeoutError:
                async with asyncio.timeout(self.timeout):
                    await wire.send(sock, wire.PING, channel)
                offer.touch()
        async with asyncio.timeout(self.timeout):
            await wire.send(sock, wire.END, channel)


def _send_parcels(sock, offer: Offer, agreed: TransferPlan, stream, channel: int, numbers) -> int:
    """Sends parcels from a thread of its own; gives their bytes."""
    sent = 0
    for number in numbers:
        if offer.outcome:
            raise ConnectionError("the offer has ended")
        listed, parcel = stream.outline, stream.outline.parcels[number]
        key = parcel_key(agreed, listed, number, offer.request, offer.rank, stream.receiver)
        data = parcel.num_bytes, offer.portions(listed, parcel)
        wire.send_data(sock, channel, str(key).encode(), number, *data, offer.touch)
        sent += parcel.num_bytes
    return sent


def _is_token(said, token: str) -> bool:
    said = said.encode(errors="replace") if isinstance(said, str) else b""
    return hmac.compare_digest(said, token.encode())


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
