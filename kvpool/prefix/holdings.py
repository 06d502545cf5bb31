"""Holdings: the blocks and snapshots that the cache holds, and in which order they go."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kvpool.plan import Plan
from kvpool.prefix.places import GroupPlaces
from kvpool.prefix.tree import Kept, Node, Tree

MOST_EVENTS = 2**17  # that wait to be fetched


class Event(NamedTuple):
    """A block or snapshot came into the cache or left it; for whoever routes prompts to caches."""

    kind: str  # "stored", "removed"; "lost": so many events before this one that they were not kept
    group: str
    key: bytes  # of the tokens up to the end of the unit it belongs to
    parent: bytes  # the key of the unit before
    place: int  # which of the unit's blocks of the group, in the order of tokens


class Holdings:
    """What is held, and who decides what goes: an evictor for each pool."""

    def __init__(self, tree: Tree, plan: Plan, new_evictor: Callable):
        self.tree, self.places, self.plan = tree, tree.places, plan
        self.evictors = [new_evictor() for _ in plan.pool_sizes]
        # First what takes other blocks along, which may then be enough for those groups.
        groups = sorted(self.places.groups, key=lambda group: not group.keeps_all)
        self._order = list(dict.fromkeys(plan.pool_of[group.index] for group in groups))
        names = [group.name for group in self.places.groups]
        self.held = dict.fromkeys(names, 0)
        self.stored = dict.fromkeys(names, 0)
        self.removed = dict.fromkeys(names, 0)
        self._pins: dict[Kept, int] = {}
        self._events: list[Event] = []

    def pool_of(self, kept: Kept) -> int:
        """The pool that a block lies in."""
        return self.plan.pool_of[self._group(kept).index]

    def keep(self, node: Node, place: int, block: int) -> Kept:
        """Notes a block as held; the node had none in this place."""
        kept = node.kept[place] = Kept(node, place, block)
        group = self._group(kept)
        self.held[group.name] += 1
        self.stored[group.name] += 1
        self._tell("stored", kept, group)
        if self._is_listed(kept):
            cost = group.group.bytes_per_block * (group.count if group.keeps_all else 1)
            evictor = self.evictors[self.plan.pool_of[group.index]]
            evictor.add(kept, cost, parent=self._before(kept, group), tail=not group.keeps_all)
        return kept

    def lose(self, kept: Kept) -> list[Kept]:
        """Takes out a block, with what is of no use without it; all that went."""
        gone = self.going_with(kept)
        node = kept.node
        for one in gone:
            group = self._group(one)
            node.kept[one.place] = None
            self._pins.pop(one, None)
            self.held[group.name] -= 1
            self.removed[group.name] += 1
            self._tell("removed", one, group)
            if self._is_listed(one):
                self.evictors[self.plan.pool_of[group.index]].remove(one)
        self.tree.prune(node)
        return gone

    def going_with(self, kept: Kept) -> list[Kept]:
        """A block and what is of no use without it.

        That is everything of its unit where it belongs to a group that keeps all, and the other
        snapshots of its unit where it is one.
        """
        group, others = self._group(kept), kept.node.kept
        if group.keeps_all:
            return [one for one in others if one]
        if group.group.is_state:
            return [one for state in self.places.states if (one := others[state.first])]
        return [kept]

    def make_room(self, short: list[int], holders, protected: set[Kept], freed) -> list[Kept]:
        """Takes out what frees so many blocks of each pool, or as many as there are.

        Args:
          short: for each pool; counted down by the blocks that become free.
          holders: i32[N] for each pool; a block of which the cache is the only holder becomes free.
          protected: what stays.
          freed: {group: blocks}, counted up.

        Returns:
          All that went, and is to be dropped.
        """
        gone: list[Kept] = []
        for pool in self._order:
            if short[pool] <= 0:
                continue
            for kept in self._candidates(pool, protected):
                going = self.going_with(kept)
                free = [one for one in going if holders[self.pool_of(one)][one.block] == 1]
                if all(self.pool_of(one) != pool for one in free):
                    continue  # rows use them
                gone += self.lose(kept)
                for one in free:
                    short[self.pool_of(one)] -= 1
                    freed[self._group(one).name] += 1
                if short[pool] <= 0:
                    break
        return gone

    def _candidates(self, pool: int, protected: set[Kept]) -> Iterator[Kept]:
        """What may go from a pool, best first; take it out, or leave it, before the next."""
        for kept in self.evictors[pool].victims():
            leads_on = self._group(kept).keeps_all and kept.node.children
            if not leads_on and kept not in protected and kept not in self._pins:
                yield kept

    def touch(self, used: Iterable[tuple[Kept, ...]]) -> None:
        """A hit used this of each group."""
        for group, kept in zip(self.places.groups, used, strict=True):
            listed = kept[:: group.count] if group.keeps_all else kept
            self.evictors[self.plan.pool_of[group.index]].touch(listed[::-1])

    def guards(self, used: Iterable[tuple[Kept, ...]]) -> set[Kept]:
        """What must stay so that all that a hit uses stays: of what keeps all, the last unit."""
        guards: set[Kept] = set()
        for group, kept in zip(self.places.groups, used, strict=True):
            if group.keeps_all:
                guards.update(filter(None, (one.node.kept[group.first] for one in kept[-1:])))
            else:
                guards.update(kept)
        return guards

    def pin(self, kept: Iterable[Kept], times: int) -> None:
        """Pins once more (1) or once less (-1); what is pinned never goes by itself."""
        for one in kept:
            before = self._pins.get(one, 0)
            self._pins[one] = before + times
            if not before:
                self.evictors[self.pool_of(one)].pin(one)
            elif not before + times:
                del self._pins[one]
                self.evictors[self.pool_of(one)].unpin(one)

    def everything(self) -> list[Kept]:
        """All that is held, parents first."""
        return [one for node in self.tree.nodes() for one in node.kept if one]

    def lose_all(self) -> list[Kept]:
        """Takes out everything, pinned or not."""
        gone: list[Kept] = []
        for one in reversed(self.everything()):
            if one.node.kept[one.place] is one:
                gone += self.lose(one)
        return gone

    def events(self) -> list[Event]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def _tell(self, kind: str, kept: Kept, group: GroupPlaces) -> None:
        if len(self._events) >= MOST_EVENTS:
            self._events = [Event("lost", "", b"", b"", 0)]
        parent = kept.node.parent
        before = parent.key if parent else b""
        self._events.append(
            Event(kind, group.name, kept.node.key, before, kept.place - group.first)
        )

    def _group(self, kept: Kept) -> GroupPlaces:
        return self.places.of_place[kept.place]

    def _is_listed(self, kept: Kept) -> bool:
        """Whether an evictor knows it: of what keeps all, the first block stands for its unit."""
        group = self._group(kept)
        return not group.keeps_all or kept.place == group.first

    def _before(self, kept: Kept, group: GroupPlaces) -> Kept | None:
        """What must not go before it does, of the same pool."""
        if group.keeps_all:
            parent = kept.node.parent
            return parent.kept[group.first] if parent and parent.kept else None
        pool = self.plan.pool_of[group.index]
        same = (g.first for g in self.places.whole if self.plan.pool_of[g.index] == pool)
        first = next(same, None)
        return None if first is None else kept.node.kept[first]
