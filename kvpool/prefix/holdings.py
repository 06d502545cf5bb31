"""Holdings: the blocks and snapshots that the cache holds, and in which order they go."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from kvpool.prefix.match import Used
from kvpool.prefix.places import GroupPlaces
from kvpool.prefix.stats import Stats
from kvpool.prefix.tree import Kept, Node, Tree

MOST_EVENTS = 2**17  # that wait to be fetched


class Event(NamedTuple):
    """A block or snapshot came into the cache or left it; for whoever routes prompts to caches."""

    kind: str  # "stored", "removed"; "lost": so many events before this one that they were not kept
    group: str
    key: bytes  # of the tokens up to the end of the unit it belongs to
    parent: bytes  # the key of the unit before
    place: int  # which of the unit's blocks of the group, in the order of tokens


class _Slabs:
    """How many blocks of each slab are held, while some of them go."""

    def __init__(self, holders):
        self._holders = holders
        self._held: dict[tuple[int, int], int] = {}

    def empties(self, group: GroupPlaces, block: int) -> bool:
        """Whether the slab of a block is free once the block goes too."""
        slab = block // group.per_slab
        which = group.pool, slab
        if which not in self._held:
            places = slice(slab * group.per_slab, (slab + 1) * group.per_slab)
            self._held[which] = int((self._holders[group.pool][places] > 0).sum())
        self._held[which] -= 1
        return self._held[which] == 0


class Watcher:
    """Whoever is told what an `insert` or `evict` changes; this one does nothing."""

    def came(self, kept: list[Kept]) -> None:
        """A row's blocks or snapshots are held now."""

    def going(self, kept: list[Kept]) -> None:
        """They have left the books, and are dropped once this returns."""


class Holdings:
    """What is held, and who decides what goes: an evictor for each memory."""

    def __init__(self, tree: Tree, new_evictor: Callable):
        self.tree, self.places = tree, tree.places
        self.evictors = {group.memory: new_evictor() for group in self.places.groups}
        self._costs = dict.fromkeys(self.evictors, 0)  # of a unit in all groups that keep all
        for group in self.places.whole:
            self._costs[group.memory] += group.cost
        # First what takes other blocks along, which may then be enough for those groups.
        groups = sorted(self.places.groups, key=lambda group: not group.keeps_all)
        self._order = {group.pool: self.evictors[group.memory] for group in groups}
        self._per_slab = {group.pool: group.per_slab for group in groups}
        names = [group.name for group in self.places.groups]
        self.held = dict.fromkeys(names, 0)
        self.stored = dict.fromkeys(names, 0)
        self.removed = dict.fromkeys(names, 0)
        self.pins: dict[Kept, int] = {}
        self.priorities: dict[Kept, int] = {}  # those above 0
        self.watcher = Watcher()
        self._events: list[Event] = []

    def keep(self, node: Node, place: int, block: int) -> Kept:
        """Notes a block as held; the node had none in this place."""
        kept = node.kept[place] = Kept(node, place, block)
        group = self.places.of_place[place]
        self.held[group.name] += 1
        self.stored[group.name] += 1
        self._tell("stored", kept, group)
        if self._is_listed(kept):
            base = node.parent if group.keeps_all else node
            under = (
                base.kept[group.under] if base and base.kept and group.under is not None else None
            )
            cost = self._costs[group.memory] if group.keeps_all else group.cost
            name = (node.key, place)
            tail = not group.keeps_all
            self.evictors[group.memory].add(kept, cost, under, tail, name, group.reach)
        return kept

    def lose(self, kept: Kept) -> list[Kept]:
        """Takes out a block, with what is of no use without it; all that went."""
        gone = self.going_with(kept)
        node = kept.node
        for one in gone:
            group = self.group_of(one)
            node.kept[one.place] = None
            self.pins.pop(one, None)
            self.priorities.pop(one, None)
            self.held[group.name] -= 1
            self.removed[group.name] += 1
            self._tell("removed", one, group)
            if self._is_listed(one):
                self.evictors[group.memory].remove(one)
        self.tree.prune(node)
        return gone

    def lose_all(self) -> list[Kept]:
        """Takes out everything, pinned or not."""
        gone: list[Kept] = []
        for one in reversed(self.everything()):
            if one.node.kept[one.place] is one:
                gone += self.lose(one)
        return gone

    def going_with(self, kept: Kept) -> list[Kept]:
        """A block and what is of no use without it.

        That is everything of its unit where it belongs to a group that keeps all, and the other
        snapshots of its unit where it is one.
        """
        group, others = self.group_of(kept), kept.node.kept
        if group.keeps_all:
            return [one for one in others if one]
        if group.is_state:
            return [one for state in self.places.states if (one := others[state.first])]
        return [kept]

    def make_room(
        self, short: list[int], holders, protected: set[Kept], freed, most: int | None = None
    ) -> list[Kept]:
        """Takes out what frees so many blocks of each pool, or as many as there are.

        Args:
          short: for each pool; counted down by the blocks that it can then hand out.
          holders: i32[N] for each pool; a block of which the cache is the only holder becomes free.
          protected: what stays.
          freed: {group: blocks}, counted up.
          most: the highest priority that may go; None: any.

        Returns:
          All that went, and is to be dropped.
        """
        gone: list[Kept] = []
        slabs = _Slabs(holders)
        for pool, evictor in self._order.items():
            if short[pool] <= 0:
                continue
            for kept in self._candidates(evictor, protected, most):
                memory = self.group_of(kept).memory
                free = [
                    (one, self.group_of(one))
                    for one in self.going_with(kept)
                    if holders[self.group_of(one).pool][one.block] == 1
                ]
                if all(group.memory != memory for _, group in free):
                    continue  # rows use them
                gone += self.lose(kept)
                for one, group in free:
                    freed[group.name] += 1
                    short[group.pool] -= 1
                    if group.per_slab and slabs.empties(group, one.block) and group.pool != pool:
                        short[pool] -= self._per_slab[pool]
                if short[pool] <= 0:
                    break
        return gone

    def _candidates(self, evictor, protected: set[Kept], most: int | None) -> Iterator[Kept]:
        """What may go, best first; take it out, or leave it, before the next.

        What has a higher priority follows after all else, and what was left is seen again then.
        """
        for level in sorted({0, *self.priorities.values()}):
            if most is not None and level > most:
                return
            for kept in evictor.victims():
                leads_on = kept.node.child and self.group_of(kept).keeps_all
                stays = kept in protected or kept in self.pins
                if not leads_on and not stays and self.priorities.get(kept, 0) <= level:
                    yield kept

    def touch(self, used: Used) -> None:
        """A hit used this of each group, or nothing: each memory is told once."""
        paths: dict[int, list[Kept]] = {memory: [] for memory in self.evictors}
        tails: dict[int, list[Kept]] = {memory: [] for memory in self.evictors}
        for group, kept in zip(self.places.groups, used, strict=True):
            if not group.keeps_all:
                tails[group.memory] += kept[::-1]
            elif group.first == group.under:
                paths[group.memory] += kept[:: group.count][::-1]
        for memory, evictor in self.evictors.items():
            evictor.touch(paths[memory], tails[memory])

    def guards(self, used: Used) -> set[Kept]:
        """What must stay so that all that a hit uses stays: of what keeps all, the last unit."""
        guards: set[Kept] = set()
        for group, kept in zip(self.places.groups, used, strict=True):
            if group.keeps_all:
                guards.update(filter(None, (one.node.kept[group.under or 0] for one in kept[-1:])))
            else:
                guards.update(kept)
        return guards

    def pin(self, kept: Iterable[Kept], times: int) -> None:
        """Pins once more (1) or once less (-1); what is pinned never goes by itself."""
        for one in kept:
            before, evictor = self.pins.get(one, 0), self.evictors[self.group_of(one).memory]
            self.pins[one] = before + times
            if not before:
                evictor.pin(one)
            elif not before + times:
                del self.pins[one]
                evictor.unpin(one)

    def raise_to(self, priority: int, kept: Iterable[Kept]) -> None:
        """Gives this priority to what has a lower one."""
        for one in kept:
            if priority > self.priorities.get(one, 0):
                self.priorities[one] = priority

    def follow(self, moves: Mapping[str, tuple]) -> None:
        """Renames what was moved, {group: (src, dst)}."""
        renamed = {
            name: dict(zip(src.tolist(), dst.tolist(), strict=True))
            for name, (src, dst) in moves.items()
        }
        for one in self.everything():
            one.block = renamed.get(self.group_of(one).name, {}).get(one.block, one.block)

    def everything(self) -> list[Kept]:
        """All that is held, parents first."""
        return [one for node in self.tree.nodes() for one in node.kept if one]

    def counted(self, stats: Stats) -> Stats:
        """Stats with the blocks held now, and stored and removed so far."""
        held, stored, removed = dict(self.held), dict(self.stored), dict(self.removed)
        return dataclasses.replace(stats, held=held, stored=stored, removed=removed)

    def events(self) -> list[Event]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def group_of(self, kept: Kept) -> GroupPlaces:
        """The group that a block belongs to."""
        return self.places.of_place[kept.place]

    def _tell(self, kind: str, kept: Kept, group: GroupPlaces) -> None:
        if len(self._events) >= MOST_EVENTS:
            self._events = [Event("lost", "", b"", b"", 0)]
        node = kept.node
        before = node.parent.key if node.parent else b""
        self._events.append(Event(kind, group.name, node.key, before, kept.place - group.first))

    def _is_listed(self, kept: Kept) -> bool:
        """Whether an evictor knows it: of what keeps all, one block stands for its unit."""
        group = self.group_of(kept)
        return not group.keeps_all or kept.place == group.under
