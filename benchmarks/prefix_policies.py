"""The policies alone: snapshots and evictors on one memory that any block and snapshot may fill."""

import heapq
import itertools

from kvpool.prefix.snapshots import FAR

BLOCK = 512


class Books:
    """What one memory holds of prompts given as one id per block; the rules of `PrefixCache`."""

    def __init__(self, block: int, snapshot: int, budget, evictor, policy):
        self.block, self.snapshot, self.budget = block, snapshot, budget
        self.evictor, self.policy = evictor, policy
        self.blocks: dict[int, int | None] = {}  # id: the id before
        self.next: dict[int, set[int]] = {}
        self.snapshots: set[int] = set()
        self.used = self.tokens = self.hit = self.taken = self.found = 0
        self.pressed = False

    def serve(self, ids: list[int], tokens: int) -> None:
        """One request, whose blocks are inserted at once."""
        full, last = ids[: tokens // BLOCK], (tokens - 1) // BLOCK
        found = sum(1 for _ in itertools.takewhile(self.blocks.__contains__, full))
        self.found += found
        known = min(found, last)
        hit = known
        while self.snapshot and hit and full[hit - 1] not in self.snapshots:
            hit -= 1
        self.tokens, self.hit = self.tokens + tokens, self.hit + hit * BLOCK
        path = [("block", one) for one in reversed(full[:hit])]
        tails = [("snapshot", full[hit - 1])] if self.snapshot and hit else []
        self.evictor.touch(path, tails)
        stops: tuple[int, ...] = ()
        if self.snapshot:
            beyond = self._goes_on(full[known - 1]) if known else 0
            lengths = (tokens, hit * BLOCK, known * BLOCK, beyond, self.pressed)
            stops = self.policy.stops(*lengths)
        for before, one in zip([None, *full][found:], full[found:], strict=False):
            self._add(one, before)
        for stop in stops:
            self._add_snapshot(full[stop // BLOCK - 1])
        if self.budget is not None and self.used > self.budget:
            self._evict(set(full))

    def _goes_on(self, one: int) -> int:
        for count in range(FAR):
            if not self.next[one]:
                return count
            one = next(iter(self.next[one]))
        return FAR

    def _add(self, one: int, before: int | None) -> None:
        self.blocks[one], self.next[one] = before, set()
        if before is not None:
            self.next[before].add(one)
        self.used += self.block
        under = None if before is None else ("block", before)
        self.evictor.add(("block", one), self.block, under, False, one)

    def _add_snapshot(self, one: int) -> None:
        if one in self.snapshots:
            return
        self.snapshots.add(one)
        self.taken += 1
        self.used += self.snapshot
        self.evictor.add(("snapshot", one), self.snapshot, ("block", one), True, ("snapshot", one))

    def _evict(self, running: set[int]) -> None:
        self.pressed = True
        for kind, one in self.evictor.victims():
            if one in running or (kind == "block" and self.next[one]):
                continue
            if one in self.snapshots:
                self.snapshots.remove(one)
                self.used -= self.snapshot
                self.evictor.remove(("snapshot", one))
            if kind == "block":
                self._remove(one)
            if self.used <= self.budget:
                return

    def _remove(self, one: int) -> None:
        before = self.blocks.pop(one)
        del self.next[one]
        if before is not None:
            self.next[before].remove(one)
        self.used -= self.block
        self.evictor.remove(("block", one))


def belady(requests, capacity: int) -> float:
    """Share of blocks found by the best possible eviction of `capacity` blocks of [(ids, tokens)].

    It knows all requests to come, needs no snapshots, and keeps the blocks that come next soonest.
    """
    ids = [one for blocks, _ in requests for one in blocks]
    following, later = [0] * len(ids), {}
    for place in range(len(ids) - 1, -1, -1):
        following[place] = later.get(ids[place], len(ids))
        later[ids[place]] = place
    held: dict[int, int] = {}
    farthest: list[tuple[int, int]] = []
    hits = 0
    for one, follows in zip(ids, following, strict=True):
        hits += one in held
        held[one] = follows
        heapq.heappush(farthest, (-follows, one))
        while len(held) > capacity:
            when, out = heapq.heappop(farthest)
            if held.get(out) == -when:
                del held[out]
    return hits / len(ids)
