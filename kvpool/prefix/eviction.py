"""Eviction: in which order what is cached goes."""

import heapq
import itertools
from collections.abc import Iterator, Sequence


class LRU:
    """What was used least recently goes first, and nothing before what hangs on it."""

    def __init__(self):
        self._clock = itertools.count()
        self._stamp: dict = {}
        self._parent: dict = {}
        self._children: dict = {}  # how many
        self._pinned: set = set()
        self._heap: list = []  # (stamp, number, key) of leaves, and outdated ones

    def add(self, key, cost, parent=None, tail=False, name=None, reach=0) -> None:
        """A key came in, after its parent."""
        self._stamp[key] = next(self._clock)
        self._parent[key] = parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._push(key)

    def touch(self, path: Sequence, tails: Sequence = ()) -> None:
        """A request used a path, deepest first, and what hangs on its end."""
        self._stamp.update(zip((*tails, *path), self._clock, strict=False))

    def remove(self, key) -> None:
        """A key left."""
        del self._stamp[key]
        self._pinned.discard(key)
        parent = self._parent.pop(key)
        if parent is not None:
            self._children[parent] -= 1
            if not self._children[parent]:
                del self._children[parent]
                if parent in self._stamp:
                    self._push(parent)

    def pin(self, key) -> None:
        """A key is no victim until `unpin`."""
        self._pinned.add(key)

    def unpin(self, key) -> None:
        """A key may be a victim again."""
        self._pinned.discard(key)
        self._push(key)

    def victims(self) -> Iterator:
        """Keys, best to lose first; those taken are removed before the next is asked for."""
        left = []
        try:
            while self._heap:
                entry = heapq.heappop(self._heap)
                stamp, _, key = entry
                if key not in self._stamp or key in self._children or key in self._pinned:
                    continue
                if stamp != self._stamp[key]:
                    self._push(key)
                    continue
                left.append(entry)
                yield key
        finally:
            for entry in left:
                heapq.heappush(self._heap, entry)

    def _push(self, key) -> None:
        heapq.heappush(self._heap, (self._stamp[key], next(self._clock), key))
