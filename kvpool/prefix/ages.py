"""Ages: how likely what was kept for so long is to be used soon, learned from what was seen.

Ages are counted in requests and fall into bins of half an octave. For each class of visits the
share that was used again in each bin is learned, from visits whose blocks are still there and from
those evicted. The worth of keeping one is then the best ratio, over all times to wait, of the
chance of a use to the expected wait: the Gittins index, after which a memory that is to serve the
most uses is best filled. Unlike a plain recency it can rise with age: a user who reads
an answer does not ask again in its first seconds.
"""

import bisect
import itertools
import math
from collections import deque
from typing import Protocol

BINS = 36  # of half an octave: ages up to 2**18 requests
EDGES = [2 ** (number / 2) - 1 for number in range(BINS + 1)]
_WIDTHS = [stop - start for start, stop in itertools.pairwise(EDGES)]
# Before anything was seen, uses are spread evenly over the octaves of age, which is LRU's order.
_PRIOR = 0.05
_PRIOR_WEIGHT = 300.0  # visits: as many that were seen count as much
_CLASS_WEIGHT = 30.0  # visits that a class borrows from all classes
_RENEWED = 256  # requests from one solution to the next


class Watched(Protocol):
    """What `Ages` follows."""

    kind: int  # class
    share: float  # that was not used again yet, 1 at first
    begun: int  # when
    bin: int


class Table:
    """Uses by age, of one class."""

    def __init__(self):
        self.used = [0.0] * BINS
        self.seen = [0.0] * BINS
        self.chances = [_PRIOR] * BINS  # to be used in a bin, for what has reached it
        self.worth = [0.0] * BINS

    def solve(self, prior: list[float], weight: float) -> None:
        """Computes `chances` and `worth` from what was seen; `prior` counts as `weight` visits."""
        self.chances = [
            min(1.0, (used + chance * weight) / (seen + weight))
            for used, seen, chance in zip(self.used, self.seen, prior, strict=True)
        ]
        self.worth = [self._worth(start) for start in range(BINS)]

    def _worth(self, start: int) -> float:
        best = uses = wait = 0.0
        left = 1.0
        for chance, width in zip(self.chances[start:], _WIDTHS[start:], strict=True):
            use = left * chance
            uses += use
            wait += (left - use / 2) * width  # a use comes in the middle of its bin
            left -= use
            best = max(best, uses / wait)
        return best


class Ages:
    """The tables of all classes, and the clock; of the last class no use is expected at first."""

    def __init__(self, kinds: int):
        self.now = 0
        self._all = Table()
        self._tables = [Table() for _ in range(kinds)]
        self._waiting: list[deque[Watched]] = [deque() for _ in range(BINS)]
        self._solve()

    def tick(self) -> None:
        """A request came."""
        self.now += 1
        for number in range(BINS - 1):
            waiting = self._waiting[number]
            while waiting and self.now - waiting[0].begun >= EDGES[number + 1]:
                visit = waiting.popleft()
                if visit.share > 0:
                    self._count(visit, visit.share, 0.0)
                    visit.bin = number + 1
                    self._waiting[number + 1].append(visit)
        if self.now % _RENEWED == 0:
            self._solve()

    def watch(self, visit: Watched) -> None:
        """A visit begins now."""
        self._waiting[0].append(visit)

    def use(self, visit: Watched, share: float) -> None:
        """A part of what a visit kept is used again."""
        share = min(share, visit.share)
        self._count(visit, share, share)
        visit.share -= share

    def worth(self, kind: int, age: int) -> float:
        """Uses to be had for a request's time in memory, by what has this age."""
        return self._tables[kind].worth[bin_of(age)]

    def _count(self, visit, seen, used) -> None:
        tables = [self._tables[visit.kind], self._all]
        for table in tables[: 1 if visit.kind == len(self._tables) - 1 else 2]:
            table.seen[visit.bin] += seen
            table.used[visit.bin] += used

    def _solve(self) -> None:
        self._all.solve([_PRIOR] * BINS, _PRIOR_WEIGHT)
        for table in self._tables[:-1]:
            table.solve(self._all.chances, _CLASS_WEIGHT)
        self._tables[-1].solve([0.0] * BINS, _CLASS_WEIGHT)


def bin_of(age: int) -> int:
    """The bin of an age in requests."""
    return min(BINS - 1, bisect.bisect_right(EDGES, age) - 1)


def next_bin(age: int) -> int:
    """The least age in a later bin; beyond the last bin any later age."""
    return max(age + 1, math.ceil(EDGES[bin_of(age) + 1]))
