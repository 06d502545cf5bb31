"""Visits: who used what last, at no cost per block.

A visit is a request's path from the root. Of the blocks on it, a visit owns those that no later
visit went through: a run at its end, positions `start` to `end - 1` counted from the root. A
later visit that shares the first k takes those, from all who owned them; the owner of a block is
found from the visit that added it, by following who took from whom.
"""

from collections.abc import Hashable, Iterator

from kvpool.prefix.classes import INNER, goes_on


class Visit:
    """One request's path, as far as it still owns it."""

    __slots__ = (
        "begun", "bin", "blocks", "cost", "end", "heir", "kind", "leaf", "new", "share",
        "spoilt", "start", "tail_cost", "tails", "version",
    )  # fmt: skip

    def __init__(self, begun: int, kind: int, end: int):
        self.begun = begun
        self.kind = kind
        self.start, self.end = 0, end
        self.new = 0  # blocks of its path that it was the first to go through
        self.heir: Visit | None = None  # who took all before `start`
        self.blocks, self.cost = 0, 0.0  # that it owns and that are still cached
        self.tails: list[Item] = []  # snapshots and window blocks on what it owns, by depth
        self.tail_cost = 0.0
        self.spoilt = False  # its last tail is not whole any more
        self.leaf: Item | None = None  # what can go: its last block, where nothing hangs on it
        self.share = 1.0  # of its path, neither used again nor forgotten
        self.bin = 0
        self.version = 0

    @property
    def victim(self) -> "Item | None":
        """What of it would go first; None where something hangs on its last block."""
        if self.leaf is None and self.kind != INNER:
            return None
        return self.tails[-1] if self.tails else self.leaf


class Item:
    """One block, or snapshot, that is cached."""

    __slots__ = (
        "alone", "children", "cost", "depth", "is_tail", "key", "name", "parent", "reach",
        "tail_cost", "visit",
    )  # fmt: skip

    def __init__(self, key, cost: float, parent: "Item | None", name: Hashable):
        self.key, self.cost, self.name = key, cost, name
        self.parent = parent
        self.depth: int = parent.depth + 1 if parent else 1
        self.children = 0
        self.is_tail = False  # a snapshot or window block, on the block that is its parent
        self.reach = 0  # of a tail, units after its own at which a hit still reads it
        self.tail_cost = 0.0  # of all tails on it
        self.alone: Visit | None = None  # that of an inner tail, which goes by its own worth
        self.visit: Visit | None = None  # one from which the owner is found

    @property
    def base(self) -> "Item":
        """The block that a tail lies on."""
        assert self.parent is not None
        return self.parent


def owner_at(visit: Visit, depth: int) -> Visit:
    """Who owns the block at a depth, 1 for the first, that `visit` went through."""
    while depth <= visit.start:
        assert visit.heir is not None
        visit = visit.heir
    return visit


def owner_of(item: Item) -> Visit:
    """The last visit that went through a block."""
    assert item.visit is not None
    item.visit = owner_at(item.visit, item.depth)
    return item.visit


def owners_of_path(item: Item) -> Iterator[tuple[Visit, int]]:
    """Who owns the path to a block, from its end: (visit, depth at which its part ends)."""
    visit, depth = owner_of(item), item.depth
    while True:
        start = visit.start
        yield visit, depth
        if not start:
            return
        assert visit.heir is not None
        depth, visit = start, owner_at(visit.heir, start)


def take(begun: int, item: Item) -> tuple[Visit, list[tuple[Visit, float]]]:
    """A new visit that goes through the path to a block, and takes it from its owners.

    Returns:
      (the visit, [(a former owner, the share of its path that was taken)]).
    """
    last = owner_of(item)
    most = 2 * item.depth > last.end  # else it shares a beginning, and goes another way
    new = Visit(begun, goes_on(last.kind) if most else 0, item.depth)
    taken: list[tuple[Visit, float]] = []
    for old, depth in list(owners_of_path(item)):
        count = depth - old.start
        part = old.cost * count / old.blocks
        old.blocks, old.cost = old.blocks - count, old.cost - part
        new.blocks, new.cost = new.blocks + count, new.cost + part
        taken.append((old, count / old.end))
        _move_tails(old, new, depth)
        old.start, old.heir = depth, new
    if last.leaf is item:
        last.leaf = None
    if not item.children:
        new.leaf = item
    return new, taken


def _move_tails(old: Visit, new: Visit, depth: int) -> None:
    moved = [tail for tail in old.tails if tail.depth - 1 <= depth]
    if moved:
        old.tails = old.tails[len(moved) :]
        new.tails = moved + new.tails  # owners come from the end of the path
        cost = sum(tail.cost for tail in moved)
        old.tail_cost -= cost
        new.tail_cost += cost
        new.spoilt |= old.spoilt and not old.tails
