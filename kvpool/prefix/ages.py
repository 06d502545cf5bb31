"""Ages: how likely what was kept for so long is to be used soon, learned from what was seen.

Ages are counted in requests and fall into bins of half an octave. Of all visits the share that was
used again in each bin is learned, from those whose blocks are still there and from those evicted.
Classes of visits (`classes`) are used so many times as often as that, at any age: a factor learned
for each class from its uses over those that its parent's factor would have brought, so that a fine
class begins as its parent and few uses are enough to tell it apart. What a class saw of one age
itself counts as well, once that is much. The worth of keeping one is then the best ratio, over all
times to wait, of the chance of a use to the expected wait: the Gittins index, after which a memory
that is to serve the most uses is best filled. Unlike a plain recency it can rise with age: a user
who reads an answer does not ask again in its first seconds.
"""

import bisect
import itertools
import math
from collections import deque
from collections.abc import Sequence

from kvpool.prefix.classes import INNER, classes_of
from kvpool.prefix.visits import Visit

BINS = 36  # of half an octave: ages up to 2**18 requests
EDGES = [2 ** (number / 2) - 1 for number in range(BINS + 1)]
_WIDTHS = [stop - start for start, stop in itertools.pairwise(EDGES)]
# Before anything was seen, uses are spread evenly over the octaves of age, which is LRU's order.
_PRIOR = 0.05
_PRIOR_WEIGHT = 100.0  # visits: as many that were seen count as much
_INNER_WEIGHT = 30.0  # visits: as many inner snapshots without a use are taken as seen
_CLASS_WEIGHT = 8.0  # uses that a class borrows from its parent
_SHAPE_WEIGHT = 3000.0  # visits: as many that a class saw at an age count as much as its factor
_RENEWED = 256  # requests from one solution to the next, at most


class Table:
    """Uses by age, of one class."""

    def __init__(self, chances: Sequence[float]):
        self.used = [0.0] * BINS
        self.seen = [0.0] * BINS
        self.chances = chances  # to be used in a bin, for what has reached it
        self.worth: list[float] = []  # by bin; empty until asked for

    def solve(self, prior: Sequence[float], weight: float) -> None:
        """Computes `chances` bin by bin from what was seen; `prior` counts as `weight` visits."""
        self.chances = [
            min(1.0, (used + chance * weight) / (seen + weight))
            for used, seen, chance in zip(self.used, self.seen, prior, strict=True)
        ]
        self.worth = []

    def scale(self, parent: Sequence[float], weight: float) -> None:
        """Computes `chances` as the parent's by one factor, as if `weight` uses confirmed it."""
        pairs = zip(self.seen, parent, strict=True)
        expected = sum(seen * chance for seen, chance in pairs)
        factor = (sum(self.used) + weight) / (expected + weight)
        self.chances = [min(1.0, factor * chance) for chance in parent]
        self.worth = []

    def worth_at(self, number: int) -> float:
        """Uses to be had for a request's time in memory, by what has reached a bin."""
        if not self.worth:
            self.worth = [self._worth(start) for start in range(BINS)]
        return self.worth[number]

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
    """The tables of all classes, and the clock; of inner snapshots no use is expected at first."""

    def __init__(self):
        self.now = 0
        self._all = Table([_PRIOR] * BINS)
        self._inner = Table([0.0] * BINS)
        self._tables: dict[tuple[int, ...], Table] = {(): self._all}  # parents first
        self._waiting: list[deque[Visit]] = [deque() for _ in range(BINS)]
        self._next = 32  # when they are solved first; then when twice as much was seen

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
        if self.now >= self._next:
            self._next += min(self.now, _RENEWED)
            self._solve()

    def watch(self, visit: Visit) -> None:
        """A visit begins now."""
        self._waiting[0].append(visit)

    def use(self, visit: Visit, share: float) -> None:
        """A part of what a visit kept is used again."""
        share = min(share, visit.share)
        self._count(visit, share, share)
        visit.share -= share

    def worth(self, visit: Visit, age: int) -> float:
        """Uses to be had for a request's time in memory, by what has this age."""
        return self._of(visit)[-1].worth_at(bin_of(age))

    def _of(self, visit: Visit) -> list[Table]:
        if visit.kind == INNER:
            return [self._inner]
        return [self._table(name) for name in classes_of(visit.kind, visit.new, visit.end)]

    def _table(self, name: tuple[int, ...]) -> Table:
        if name not in self._tables:
            self._tables[name] = Table(self._table(name[:-1]).chances)
        return self._tables[name]

    def _count(self, visit: Visit, seen: float, used: float) -> None:
        for table in self._of(visit):
            table.seen[visit.bin] += seen
            table.used[visit.bin] += used

    def _solve(self) -> None:
        self._all.solve([_PRIOR] * BINS, _PRIOR_WEIGHT)
        self._inner.solve([0.0] * BINS, _INNER_WEIGHT)
        for name, table in self._tables.items():
            if name:
                table.scale(self._tables[name[:-1]].chances, _CLASS_WEIGHT)
                table.solve(table.chances, _SHAPE_WEIGHT)


def bin_of(age: int) -> int:
    """The bin of an age in requests."""
    return min(BINS - 1, bisect.bisect_right(EDGES, age) - 1)


def next_bin(age: int) -> int:
    """The least age in a later bin; beyond the last bin any later age."""
    return max(age + 1, math.ceil(EDGES[bin_of(age) + 1]))
