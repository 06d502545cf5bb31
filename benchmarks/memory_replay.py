"""The scheduler of `memory.py`, which is the same for every way to divide the memory.

A tick of the clock has three parts:

1. Every running request decodes: one reserve and one advance of `clock.decode` tokens, or of what
   is left of its output. Where they do not all fit, the newest running request is preempted, and
   again the newest, until they do: it goes back to the head of the queue, and later computes its
   prompt and its output so far again. Requests that are done give up their memory.
2. Requests enter in the order of their arrival. The first in the queue is prefilled in chunks of
   `clock.chunk` tokens. It stays when every chunk was granted and all rows could then still
   decode the next tick; else it gives back what it got, and it and all behind it wait. A prefill
   takes no time: memory is to be the limit, and not a processor.
3. What runs is recorded.

A request that does not fit even alone is rejected, or the queue would stand still for ever.
"""

import dataclasses
import heapq
from typing import NamedTuple, Protocol

import numpy as np
from tqdm import tqdm

from kvpool.needs import Groups, block_bytes, needed_bytes, row_blocks
from memory_traffic import Traffic


class Clock(NamedTuple):
    """What a tick is worth."""

    decode: int = 8  # tokens that every running request decodes
    chunk: int = 2048  # tokens of a step of a prefill
    seconds: float = 8.0  # of the trace: so many that requests always wait


class Books(Protocol):
    """Who holds which memory: the cache's own bookkeeping, or a model of it. Rows 0..S-1."""

    def decode(self, count: np.ndarray, age: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """Every row settles count i64[S] more tokens, and those that end bool[S] leave.

        Returns:
          kept bool[S]: the rows that did. The others were preempted, the highest age i64[S] first.
        """

    def enter(self, row: int, tokens: int, count: np.ndarray) -> bool:
        """Prefills a free row with `tokens`, if all rows can then still decode count i64[S]."""


class Tick(NamedTuple):
    """The rows at the end of a tick."""

    number: int
    waiting: int
    tokens: np.ndarray  # i64[running], settled of each request that runs

    @property
    def running(self) -> int:
        """Requests that run."""
        return len(self.tokens)


@dataclasses.dataclass
class Run:
    """What became of the requests."""

    groups: Groups
    ticks: list[Tick] = dataclasses.field(default_factory=list)
    preempted: int = 0
    rejected: int = 0
    without_row: int = 0  # ticks at which a request waited for a row, and not for memory

    @property
    def loaded(self) -> np.ndarray:
        """bool[ticks]: requests waited, so that memory was the limit; all where none ever did."""
        waited = np.array([tick.waiting > 0 for tick in self.ticks])
        return waited if waited.any() else ~waited

    @property
    def concurrency(self) -> float:
        """Running requests, the mean over the loaded ticks."""
        return float(np.mean([tick.running for tick in self.ticks], where=self.loaded))

    @property
    def peak(self) -> int:
        """Most requests that ran at a time."""
        return max(tick.running for tick in self.ticks)

    @property
    def held(self) -> np.ndarray:
        """Bytes i64[ticks, G] of the blocks of all rows."""
        return self._sums(lambda tokens: row_blocks(self.groups, tokens)) * block_bytes(self.groups)

    def use(self, budget: int) -> float:
        """Bytes that the next queries read over those of the memory, mean over loaded ticks."""
        needed = self._sums(lambda tokens: needed_bytes(self.groups, tokens)).sum(axis=1)
        return float(np.mean(needed, where=self.loaded)) / budget

    def _sums(self, of_rows) -> np.ndarray:
        """i64[ticks, G]: of_rows(tokens of R rows), i64[G, R], summed over the rows of a tick."""
        ends = np.cumsum([tick.running for tick in self.ticks])
        rows = of_rows(np.concatenate([tick.tokens for tick in self.ticks]))
        sums = np.pad(np.cumsum(rows, axis=1), ((0, 0), (1, 0)))[:, ends]
        return np.diff(sums, axis=1, prepend=0).T


class Server:
    """Requests in rows, and their queue."""

    def __init__(self, books: Books, traffic: Traffic, groups: Groups, clock: Clock, rows: int):
        self.books, self.traffic, self.clock = books, traffic, clock
        self.request = np.full(rows, -1)  # which request a row serves
        self.settled, self.left = np.zeros((2, rows), np.int64)  # tokens of it; of its output
        self.left_of = traffic.outputs.copy()  # tokens that each request has yet to decode
        self.arrives = np.floor(traffic.seconds / clock.seconds).astype(np.int64)
        self.queue = list(range(len(traffic)))  # a heap: the first to arrive is the first to enter
        self.tick, self.run = 0, Run(groups)

    @property
    def next_count(self) -> np.ndarray:
        """Tokens i64[S] that each row decodes in the next tick."""
        return np.minimum(self.left, self.clock.decode)

    def decode(self) -> int:
        """Part 1; how many requests left for good."""
        count = self.next_count
        running = count > 0
        kept = self.books.decode(count, self.request, running & (count == self.left))
        self.settled += np.where(kept, count, 0)
        self.left -= np.where(kept, count, 0)
        self.left_of[self.request[running]] = self.left[running]
        lost = sorted(self.request[running & ~kept].tolist())
        done = int((kept & (self.left == 0)).sum())
        if lost and not kept.any():  # in the end the oldest ran alone, and did not fit
            self.run.rejected += 1
            lost, done = lost[1:], done + 1
        for request in lost:
            heapq.heappush(self.queue, request)
        self.run.preempted += len(lost)
        gone = running & (~kept | (self.left == 0))
        self.request[gone], self.settled[gone], self.left[gone] = -1, 0, 0
        return done

    def admit(self) -> int:
        """Part 2; how many requests were rejected."""
        rejected = 0
        while self.queue and self.arrives[self.queue[0]] <= self.tick:
            request = self.queue[0]
            free = np.flatnonzero(self.request < 0)
            if not len(free):
                self.run.without_row += 1
                break
            row, left = int(free[0]), self.left_of[request]
            tokens = int((self.traffic.prompts + self.traffic.outputs)[request] - left)
            count = self.next_count
            count[row] = min(left, self.clock.decode)
            if self.books.enter(row, tokens, count):
                self.request[row], self.settled[row], self.left[row] = request, tokens, left
            elif len(free) == len(self.request):
                rejected += 1
            else:
                break
            heapq.heappop(self.queue)
        self.run.rejected += rejected
        return rejected

    def record(self) -> None:
        """Part 3."""
        waiting = sum(self.arrives[request] <= self.tick for request in self.queue[:1])
        tokens = self.settled[self.request >= 0]
        self.run.ticks.append(Tick(self.tick, waiting, tokens))


def replay(
    books: Books, traffic: Traffic, groups: Groups, clock: Clock, rows: int, title=""
) -> Run:
    """Serves the traffic to its end."""
    server = Server(books, traffic, groups, clock, rows)
    with tqdm(total=len(traffic), desc=title, leave=False, disable=not title) as bar:
        done = 0
        while done < len(traffic):
            if server.queue and (server.request < 0).all():
                server.tick = max(server.tick, server.arrives[server.queue[0]])
            ended = server.decode()
            ended += server.admit()
            if not ended and (server.request < 0).all():
                raise RuntimeError(f"tick {server.tick}: nothing runs, and nothing can enter")
            server.record()
            server.tick += 1
            done += ended
            bar.update(ended)
    return server.run
