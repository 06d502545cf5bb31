"""Places: what a prefix cache can keep for one unit of tokens, and where a query looks for it.

Every hit ends at a multiple of the unit, the least common multiple of the block sizes of all groups
of tokens. A unit has a place for every block of each group, and one for a snapshot of each state
group; they are numbered 0, 1, ... in the order of the groups.
"""

import dataclasses
import functools
import math

from kvpool import regions
from kvpool.group import Group
from kvpool.spec import CacheSpec


@dataclasses.dataclass(frozen=True)
class GroupPlaces:
    """The places of one group: `first` and the `count` - 1 after it."""

    group: Group
    index: int  # of the group in the spec
    first: int
    count: int
    tokens: int  # of a unit

    @property
    def name(self) -> str:
        """The group's."""
        return self.group.name

    @property
    def keeps_all(self) -> bool:
        """Whether a hit needs every block up to its end."""
        return self.group.region.kind == regions.ALL

    @property
    def places(self) -> range:
        """All of them, in the order of the tokens."""
        return range(self.first, self.first + self.count)

    def needed(self, length: int) -> range:
        """The table columns that a query at `length`, a multiple of the unit, reads."""
        if self.group.is_state:
            return range(length > 0)
        return range(self.group.dead_columns(length), self.group.ceil_columns(length))


@dataclasses.dataclass(frozen=True)
class Places:
    """The unit of a spec and its places."""

    unit: int  # tokens
    groups: tuple[GroupPlaces, ...]

    @classmethod
    def of(cls, spec: CacheSpec) -> "Places":
        """Those of a spec; where all groups keep states a unit has the spec's block size."""
        sizes = [group.block_size for group in spec.groups if not group.is_state]
        unit = math.lcm(*sizes) if sizes else spec.block_size
        groups: list[GroupPlaces] = []
        first = 0
        for index, group in enumerate(spec.groups):
            count = 1 if group.is_state else unit // group.block_size
            groups.append(GroupPlaces(group, index, first, count, unit))
            first += count
        return cls(unit, tuple(groups))

    @functools.cached_property
    def of_place(self) -> tuple[GroupPlaces, ...]:
        """The group of each place."""
        return tuple(group for group in self.groups for _ in range(group.count))

    @functools.cached_property
    def whole(self) -> tuple[GroupPlaces, ...]:
        """The groups that keep everything."""
        return tuple(group for group in self.groups if group.keeps_all)

    @functools.cached_property
    def windows(self) -> tuple[GroupPlaces, ...]:
        """The groups that keep the last tokens: windows and chunks."""
        return tuple(group for group in self.groups if group.group.region.span)

    @functools.cached_property
    def states(self) -> tuple[GroupPlaces, ...]:
        """The groups of recurrent states."""
        return tuple(group for group in self.groups if group.group.is_state)

    def last_hit(self, tokens: int) -> int:
        """The longest hit of a prompt of so many tokens, which leaves one of them to compute."""
        return max(tokens - 1, 0) // self.unit * self.unit
