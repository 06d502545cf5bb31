"""Match: the longest hit that all groups can serve together.

Each group says how far it reaches below a length; the length goes down until all of them reach it.
A group never looks at the same block twice: a hole rules out every length that reads it.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvpool.indices import NULL_BLOCK
from kvpool.plan import Plan
from kvpool.prefix.keys import Salt
from kvpool.prefix.places import GroupPlaces, Places
from kvpool.prefix.tree import Kept, Node
from kvpool.sharing import Prefix

Used = tuple[tuple[Kept, ...], ...]  # what a hit reads: for each group, in the order of tokens


@dataclasses.dataclass(frozen=True, eq=False)
class Hit:
    """What the cache has of a prompt. It holds nothing: admit before the next eviction."""

    length: int  # tokens; leaves at least one of the prompt to compute
    prefix: Prefix  # for `admit`; its arrays have the widths of the block tables
    missed: dict[str, str | None]  # why a group can not serve a longer hit; None: not to blame
    known: int  # tokens up to which the cache knows the prompt, at least `length`
    stops: tuple[int, ...]  # lengths beyond the hit at which to `insert` the row too, ascending
    pending: int  # the hit that a row which `begin` announced is going to make possible, else 0
    raw: bytes = dataclasses.field(repr=False)  # the prompt, as `keys.token_bytes` gives it
    salt: Salt = dataclasses.field(repr=False)
    used: Used = dataclasses.field(repr=False)


class _Window:
    """How far a window or chunk group reaches."""

    def __init__(self, group: GroupPlaces, chain: list[Node], unit: int):
        self.group, self.chain, self.unit = group, chain, unit
        self.present = len(chain) * group.count  # from this column to the candidate's all are there

    def longest(self, length: int) -> tuple[int, str | None]:
        """The longest hit up to `length` that has its blocks, and what a longer one lacks."""
        why = None
        while length:
            needed = self.group.needed(length)
            column = min(self.present, needed.stop)
            while column > needed.start and self._has(column - 1):
                column -= 1
            self.present = column
            if column <= needed.start:
                break
            begin = (column - 1) * self.group.group.block_size
            end = begin + self.group.group.block_size - 1
            why = why or f"length {length} reads tokens {begin} to {end}, which are not cached"
            length = begin // self.unit * self.unit
        return length, why

    def _has(self, column: int) -> bool:
        node, place = divmod(column, self.group.count)
        return self.chain[node].kept[self.group.first + place] is not None


class _Snapshots:
    """How far a group of recurrent states reaches."""

    def __init__(self, group: GroupPlaces, chain: list[Node], unit: int):
        self.place, self.chain, self.unit = group.first, chain, unit

    def longest(self, length: int) -> tuple[int, str | None]:
        """The longest hit up to `length` that has a snapshot, and what a longer one lacks."""
        units = length // self.unit
        while units and self.chain[units - 1].kept[self.place] is None:
            units -= 1
        if units * self.unit == length:
            return length, None
        return units * self.unit, f"no snapshot at length {length}"


def longest(places: Places, chain: list[Node], limit: int) -> tuple[int, dict[str, str | None]]:
    """The longest hit, and for each group why it is not longer.

    Args:
      chain: the nodes of the prompt, as far as it is known; at most up to `limit`.
      limit: tokens of the longest hit that the prompt could have.
    """
    unit, length = places.unit, len(chain) * places.unit
    missed: dict[str, str | None] = {group.name: None for group in places.groups}
    if length < limit:
        for group in places.whole or places.groups:
            missed[group.name] = f"tokens {length} to {length + unit - 1} are not cached"
    windows = [(group.name, _Window(group, chain, unit)) for group in places.windows]
    snapshots = [(group.name, _Snapshots(group, chain, unit)) for group in places.states]
    reaches: list[tuple[str, _Window | _Snapshots]] = [*windows, *snapshots]
    agreed = 0
    while length and agreed != length:
        agreed = length
        for name, reach in reaches:
            reached, why = reach.longest(agreed)
            missed[name] = missed[name] or why
            length = min(length, reached)
    return length, missed


def used_by(places: Places, chain: list[Node], length: int) -> Used:
    """What a hit of `length` reads."""
    return tuple(tuple(_used(group, chain[: length // places.unit])) for group in places.groups)


def _used(group: GroupPlaces, chain: list[Node]) -> Iterator[Kept]:
    if group.is_state:
        return filter(None, (node.kept[group.first] for node in chain[-1:]))
    first_column = group.needed(len(chain) * group.unit).start
    first, skipped = divmod(first_column, group.count)
    kept = [node.kept[place] for node in chain[first:] for place in group.places]
    return filter(None, kept[skipped:])


def prefix_of(places: Places, plan: Plan, used: Used, length: int) -> Prefix:
    """What a hit reads, as `admit` takes it.

    The arrays are as wide as the block tables, so that one trace of `admit` serves every hit.
    """
    blocks: dict[str, Any] = {}
    for group, kept in zip(places.groups, used, strict=True):
        ids = np.full(plan.columns(group.group), NULL_BLOCK, np.int32)
        start = group.needed(length).start
        ids[start : start + len(kept)] = [one.block for one in kept]
        blocks[group.name] = ids
    whole: Any = np.int32(length)
    return Prefix(whole, blocks)
