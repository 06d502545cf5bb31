"""Reads and writes on their way out of a store and into it."""

import dataclasses
import time
from typing import NamedTuple

import numpy as np

from kvpool.tiers import values
from kvpool.tiers.store_limit import StoreLimit
from kvpool.tiers.trouble import Trouble

Key = tuple[str, bytes]  # group, digest of the block's tokens and all before them


class Counts(NamedTuple):
    """What a store did so far."""

    hits: int = 0
    misses: int = 0
    written: int = 0
    dropped: int = 0  # puts that were not written
    evicted: int = 0


@dataclasses.dataclass
class StoreBooks:
    """What a store and all that is on its way share."""

    space: bytes  # values.namespace
    timeout_s: float
    trouble: Trouble
    limit: StoreLimit
    counts: Counts = dataclasses.field(default_factory=Counts)

    def count(self, name: str, number: int = 1) -> None:
        """`number` more of one of the counts."""
        self.counts = self.counts._replace(**{name: getattr(self.counts, name) + number})


class Put:
    """A block on its way into a store."""

    def __init__(self, books: StoreBooks, key: bytes, size: int, write):
        self.size = size  # bytes of the value
        self._books, self._key, self._write = books, key, write
        self._begin = time.monotonic()
        self._stored: bool | None = None
        if write is None:
            self._stored = False
            books.count("dropped")
            books.limit.gone(key)

    @property
    def age_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._begin

    @property
    def ended(self) -> bool:
        """Whether it is stored or has failed."""
        if self._stored is None and self._write.done():
            self._end()
        return self._stored is not None

    @property
    def done(self) -> bool:
        """Whether the block is stored: from now on every process reads it, whatever happens."""
        return self.ended and bool(self._stored)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until it has ended, at most the store's timeout; whether it is stored."""
        books = self._books
        if self._stored is None:
            left = books.timeout_s if timeout_s is None else timeout_s
            try:
                self._write.result(timeout=max(left, 0))
            except TimeoutError:
                if self.age_s >= books.timeout_s:  # else it is the caller who has no time
                    books.trouble.failed("write", f"no answer for {books.timeout_s:g} s")
            except Exception:  # _end reports it
                pass
        ended = self.ended
        books.trouble.say()
        return ended and bool(self._stored)

    def _end(self) -> None:
        error = self._write.exception()
        self._stored = error is None
        self._write = None
        self._books.count("written" if self._stored else "dropped")
        if error is None:
            self._books.limit.used(self._key, self.size)
        else:
            self._books.limit.gone(self._key)
            self._books.trouble.failed("write", error)


class Prefetch:
    """Blocks on their way out of a store."""

    def __init__(self, books: StoreBooks, reads: dict, deadline: float, patient: bool):
        self._books, self._reads, self._deadline = books, reads, deadline
        self._patient = patient
        self._blocks: dict[Key, np.ndarray | None] | None = None

    @property
    def ready(self) -> bool:
        """Whether `result` would not wait."""
        if self._blocks is not None or time.monotonic() >= self._deadline:
            return True
        return all(read is None or read.done() for _, _, read in self._reads.values())

    def result(self) -> dict[Key, np.ndarray | None]:
        """{(group, digest): bytes u8[n], read-only, or None for a miss}, by the deadline."""
        if self._blocks is None:
            self._blocks = {key: self._block(*read) for key, read in self._reads.items()}
            hits = sum(block is not None for block in self._blocks.values())
            self._books.count("hits", hits)
            self._books.count("misses", len(self._blocks) - hits)
            self._reads = {}
            self._books.trouble.say()
        return self._blocks

    def _block(self, key: bytes, size: int, read) -> np.ndarray | None:
        books = self._books
        if read is None:
            return None
        try:
            found = read.result(timeout=max(self._deadline - time.monotonic(), 0))
        except TimeoutError:
            read.cancel()
            if self._patient:  # else it is the caller who has no time, and the store may be well
                books.trouble.failed("read", f"no answer for {books.timeout_s:g} s")
            return None
        except Exception as error:
            books.trouble.failed("read", error)
            return None
        if found.state != "value":
            books.limit.gone(key)
            return None
        payload = values.unpack(books.space, key, found.value, size)
        if isinstance(payload, values.Bad):
            books.trouble.note(payload.kind, f"the value of {key.decode()} is {payload.reason}")
            return None
        books.limit.used(key, size + values.OVERHEAD)
        return np.frombuffer(payload, np.uint8)
