"""Reuse: eviction by what was seen to be used again."""

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence

from kvpool.prefix.ages import Ages, next_bin
from kvpool.prefix.classes import INNER, LEFT_OVER, goes_on
from kvpool.prefix.visits import Item, Visit, owner_of, take

# Of what was evicted, names for so many times as many blocks as are cached: enough to see uses at
# four times the age at which blocks go, and still small beside the blocks.
_REMEMBERED = 4
# A visit whose last block was added so many requests after its begin is not the one that adds more.
_IN_FLIGHT = 64


class Reuse:
    """What is worth least for its bytes goes first, and nothing before what hangs on it.

    Worth is the chance of a use, for a request's time in memory, of a visit's path: learned for
    each class of visits (`classes`) and each age (`ages`). Where paths carry
    snapshots or window tails, it is divided by all bytes: a short path is little for a
    large snapshot. A snapshot on whose only way on there is a later one goes by a worth of its own.
    """

    def __init__(self):
        self._ages = Ages()
        self._items: dict = {}
        self._pinned: set = set()
        self._gone: OrderedDict[Hashable, tuple[Visit, int]] = OrderedDict()  # name: owner, depth
        self._changed: dict[Visit, None] = {}
        self._heap: list = []  # (worth, begun, number, visit, version)
        self._due: list = []  # (when the visit's worth changes with age, number, visit, version)
        self._number = itertools.count()
        self._has_tails = False

    def add(self, key, cost, parent=None, tail=False, name=None, reach=0) -> None:
        """A key came in, after its parent.

        Args:
          name: the same if it comes again.
          reach: of a tail, units after its own at which a hit still reads it.
        """
        item = Item(key, cost, None if parent is None else self._items[parent], name)
        self._items[key] = item
        item.is_tail, item.reach = tail and parent is not None, reach
        if item.is_tail:
            self._add_tail(item)
        else:
            self._add_block(item)

    def _add_block(self, item: Item) -> None:
        visit = self._adding(item)
        if item.parent:
            item.parent.children += 1
        item.visit = visit
        visit.end = item.depth
        visit.blocks, visit.cost = visit.blocks + 1, visit.cost + item.cost
        visit.leaf = item
        if item.name in self._gone:
            old, depth = self._gone.pop(item.name)
            self._ages.use(old, 1 / old.end)
            if 2 * depth > old.end and old.kind < LEFT_OVER:
                visit.kind = max(visit.kind, goes_on(old.kind))
        else:
            visit.new += 1
        self._changed[visit] = None

    def _adding(self, item: Item) -> Visit:
        """The visit to which a new block belongs."""
        if item.parent is None:
            visit = Visit(self._ages.now, 0, 0)
            self._ages.watch(visit)
            return visit
        visit = owner_of(item.parent)
        late = self._ages.now - visit.begun > _IN_FLIGHT
        return self._take(item.parent) if visit.end != item.parent.depth or late else visit

    def _add_tail(self, item: Item) -> None:
        self._has_tails, parent = True, item.base
        parent.tail_cost += item.cost
        visit = owner_of(parent)
        depth, inner = 0, []
        for other in visit.tails:
            before = other.base
            if before.depth + other.reach < parent.depth and before.children == 1:
                inner.append((other, before.depth - depth))
            if before.depth != depth:
                depth = before.depth
        for other, blocks in inner:
            self._leave_alone(other, visit, blocks * parent.cost)
        if item.name in self._gone:
            old, _ = self._gone.pop(item.name)
            self._ages.use(old, old.share)
        self._join(item, visit)
        visit.spoilt = False

    def _join(self, item: Item, visit: Visit) -> None:
        """A tail belongs to the visit that owns its block, and goes before it."""
        visit.tails.append(item)
        visit.tails.sort(key=lambda tail: tail.depth)
        visit.tail_cost += item.cost
        self._changed[visit] = None

    def _leave_alone(self, item: Item, visit: Visit, saved: float) -> None:
        """A later tail has made this one inner; it saves so many bytes of blocks."""
        visit.tails.remove(item)
        visit.tail_cost -= item.cost
        item.alone = Visit(self._ages.now, INNER, 1)
        item.alone.tails, item.alone.cost = [item], saved
        self._ages.watch(item.alone)
        self._changed[visit] = self._changed[item.alone] = None

    def touch(self, path: Sequence, tails: Sequence = ()) -> None:
        """A request came, and used a path, deepest first, and what hangs on its end; or nothing."""
        self._ages.tick()
        if path and self._items[path[0]].depth == len(path):
            self._take(self._items[path[0]])
            path = ()
        for item in (self._items[key] for key in (*path, *tails)):
            if not item.is_tail:
                self._take(item)
            elif item.alone:  # others were taken with their block
                self._ages.use(item.alone, 1.0)
                self._give_up(item.alone)
                item.alone = None
                self._join(item, owner_of(item.base))

    def _take(self, item: Item) -> Visit:
        visit, taken = take(self._ages.now, item)
        for old, share in taken:
            self._ages.use(old, share)
            if old.end <= 2 * old.start:
                old.kind = LEFT_OVER
            self._changed[old] = None
        self._ages.watch(visit)
        self._changed[visit] = None
        return visit

    def remove(self, key) -> None:
        """A key left."""
        item = self._items.pop(key)
        self._pinned.discard(key)
        if item.is_tail:
            self._remove_tail(item)
            return
        visit, parent = owner_of(item), item.parent
        visit.blocks, visit.cost = visit.blocks - 1, visit.cost - item.cost
        if visit.leaf is item:
            visit.leaf = None
        self._changed[visit] = None
        if parent:
            parent.children -= 1
            if not parent.children:
                before = owner_of(parent)
                before.leaf = parent
                self._changed[before] = None
        self._remember(item, visit)

    def _give_up(self, visit: Visit) -> None:
        visit.tails = []
        self._changed[visit] = None

    def _remove_tail(self, item: Item) -> None:
        item.base.tail_cost -= item.cost
        if item.alone:
            self._give_up(item.alone)
            self._remember(item, item.alone)
            return
        visit = owner_of(item.base)
        visit.tails.remove(item)
        visit.tail_cost -= item.cost
        visit.spoilt = True
        self._changed[visit] = None

    def _remember(self, item: Item, visit: Visit) -> None:
        if item.name is None:
            return
        self._gone[item.name] = (visit, item.depth)
        while len(self._gone) > _REMEMBERED * max(64, len(self._items)):
            _, (old, _) = self._gone.popitem(last=False)
            old.share -= 1 / old.end

    def pin(self, key) -> None:
        """A key is no victim until `unpin`."""
        self._pinned.add(key)

    def unpin(self, key) -> None:
        """A key may be a victim again."""
        self._pinned.discard(key)

    def victims(self) -> Iterator:
        """Keys, best to lose first; those taken are removed before the next is asked for."""
        left = []
        try:
            while self._refresh():
                entry = heapq.heappop(self._heap)
                visit, version = entry[3:]
                if version != visit.version:
                    continue
                item = visit.victim
                if item.key not in self._pinned:
                    yield item.key
                if visit not in self._changed:
                    left.append(entry)
        finally:
            for entry in left:
                heapq.heappush(self._heap, entry)

    def _refresh(self) -> list:
        """Brings the heap up to date, and returns it."""
        now = self._ages.now
        while self._due and self._due[0][0] <= now:
            _, _, visit, version = heapq.heappop(self._due)
            if version == visit.version:
                self._changed[visit] = None
        for visit in self._changed:
            visit.version += 1
            if visit.victim is None:
                continue
            number, age = next(self._number), now - visit.begun
            entry = (self._worth(visit, age), visit.begun, number, visit, visit.version)
            heapq.heappush(self._heap, entry)
            due = visit.begun + next_bin(age)
            heapq.heappush(self._due, (due, number, visit, visit.version))
        self._changed.clear()
        return self._heap

    def _worth(self, visit: Visit, age: int) -> float:
        if visit.kind == INNER:
            return self._ages.worth(visit, age) * visit.cost / visit.tails[0].base.tail_cost
        if self._has_tails and (visit.spoilt or not visit.tails):
            return 0.0  # blocks that no hit can end at
        return self._ages.worth(visit, age) * visit.cost / (visit.cost + visit.tail_cost)
