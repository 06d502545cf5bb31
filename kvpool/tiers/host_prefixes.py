"""HostPrefixes: which blocks of prompts lie in host memory, and which of them go first.

A block is known by the key of all tokens up to its unit's end and its place in the unit, so it is
found whatever became of those before it. Each has an allocation of its own: one that goes, for
whichever request, leaves a hole where it was, and nothing else changes.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvpool.prefix.places import Places
from kvpool.prefix.tree import Kept
from kvpool.tiers.host_tier import HostTier
from kvpool.tiers.pool_group import Allocation, Shortfall
from kvpool.tiers.trouble import Trouble

Name = tuple[bytes, int]  # key of the tokens up to the end of a unit, place in the unit


class HostBlock:
    """One block or snapshot in host memory."""

    __slots__ = ("allocation", "block", "name", "readers", "ready")

    def __init__(self, name: Name, allocation: Allocation, block: int):
        self.name = name
        self.allocation = allocation
        self.block = block  # of the host
        self.ready = False  # whether its bytes are there
        self.readers = 0  # who keep it from going

    @property
    def place(self) -> int:
        """Its place in the unit."""
        return self.name[1]


class PrefixCounts(NamedTuple):
    """What a prefix tier did so far, in blocks."""

    saved: int = 0  # that came to the host from the device
    lost: int = 0  # that did not, for want of room or of a copy that worked
    promoted: int = 0  # that came back to the device
    host: int = 0  # that the host has now


class HostPrefixes:
    """The blocks of prompts on a host tier, in the order of their last use for each group."""

    def __init__(self, tier: HostTier, places: Places, trouble: Trouble):
        self._tier, self._places, self._trouble = tier, places, trouble
        self._blocks: dict[Name, HostBlock] = {}
        self._ages: dict[str, OrderedDict[Name, HostBlock]] = {
            group.name: OrderedDict() for group in places.groups
        }
        self._most = sum(tier.pools.available().values())
        tier.reclaimers.append(self._offered)

    def get(self, key: bytes, place: int) -> HostBlock | None:
        """A block whose bytes are there."""
        found = self._blocks.get((key, place)) if self._blocks else None
        return found if found is not None and found.ready and self._stays(found) else None

    def knows(self, key: bytes, place: int) -> bool:
        """Whether a block is there or on its way."""
        found = self._blocks.get((key, place))
        return found is not None and self._stays(found)

    def add(self, name: Name) -> HostBlock | None:
        """Room for a block that is not known; None where there is none."""
        group = self.group_of(name)
        try:
            allocation = self._tier.pools.allocate({group: 1})
        except Exception as error:
            self._trouble.note("allocate", f"host blocks cannot be taken: {error}")
            return None
        if isinstance(allocation, Shortfall):
            return None
        if len(self._blocks) >= 2 * self._most:  # others took blocks that nobody asked for since
            for block in [*self._blocks.values()]:
                self._stays(block)
        block = HostBlock(name, allocation, allocation.ids[group][0])
        self._blocks[name] = self._ages[group][name] = block
        return block

    def drop(self, block: HostBlock) -> None:
        """Gives up a block."""
        if self._stays(block):
            self._forget(block)
            self._tier.pools.release(block.allocation)

    def touch(self, blocks: Iterable[HostBlock]) -> None:
        """These were used, the first of them longest ago."""
        for block in blocks:
            if block.name in self._ages[self.group_of(block.name)]:
                self._ages[self.group_of(block.name)].move_to_end(block.name)

    def touch_kept(self, kept: Iterable[Kept]) -> None:
        """These of the device were used, as far as they are known here: the deepest longest ago."""
        deepest_first = sorted(kept, key=lambda one: -one.node.depth)
        names = [(one.node.key, one.place) for one in deepest_first]
        self.touch(self._blocks[name] for name in names if self.knows(*name))

    def everything(self) -> list[HostBlock]:
        """All blocks that are still there."""
        return [block for block in [*self._blocks.values()] if self._stays(block)]

    def group_of(self, name: Name) -> str:
        """The group that a block belongs to."""
        return self._places.of_place[name[1]].name

    def _stays(self, block: HostBlock) -> bool:
        """Whether the tier has not taken it back meanwhile; forgets it if so."""
        stays = self._tier.pools.holds(block.allocation)
        if not stays:
            self._forget(block)
        return stays

    def _forget(self, block: HostBlock) -> None:
        if self._blocks.get(block.name) is block:
            del self._blocks[block.name]
            del self._ages[self.group_of(block.name)][block.name]

    def _offered(self, group: str) -> Iterator[Allocation]:
        ages = self._ages[group]
        while ages and not self._stays(next(iter(ages.values()))):
            pass  # what went before, which every request would else pass by
        for block in ages.values():
            if block.ready and not block.readers:
                yield block.allocation


def let_go(reading: Iterable[HostBlock]) -> None:
    """Ends a reading of each of them: one that nobody reads may go."""
    for block in reading:
        block.readers -= 1
