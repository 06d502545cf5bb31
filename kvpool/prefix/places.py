"""Places: what a prefix cache can keep for one unit of tokens, and where a query looks for it.

Every hit ends at a multiple of the unit, the least common multiple of the block sizes of all groups
of tokens. A unit has a place for every block of each group, and one for a snapshot of each state
group; they are numbered 0, 1, ... in the order of the groups.
"""

import dataclasses
import math

from kvpool import regions
from kvpool.group import Group
from kvpool.plan import Plan


@dataclasses.dataclass(frozen=True)
class GroupPlaces:
    """The places of one group: `first` and the `count` - 1 after it."""

    name: str
    group: Group
    index: int  # of the group in the spec
    pool: int
    memory: int
    per_slab: int  # blocks of the pool in a slab, 0 where it has none
    first: int
    count: int
    unit: int  # tokens
    keeps_all: bool  # a hit needs every block up to its end
    is_state: bool
    cost: int  # bytes of what goes together: a block, of what keeps all those of a unit
    reach: int  # of a window's block, units after its own at which a hit may still read it
    under: int | None  # the place, in the same memory, of what is no use without it: stays longer

    @property
    def places(self) -> range:
        """All of them, in the order of the tokens."""
        return range(self.first, self.first + self.count)

    def needed(self, length: int) -> range:
        """The table columns that a query at `length`, a multiple of the unit, reads."""
        if self.is_state:
            return range(length > 0)
        return range(self.group.dead_columns(length), self.group.ceil_columns(length))


@dataclasses.dataclass(frozen=True)
class Places:
    """The unit of a plan's spec and its places."""

    plan: Plan
    unit: int  # tokens
    groups: tuple[GroupPlaces, ...]
    of_place: tuple[GroupPlaces, ...]
    whole: tuple[GroupPlaces, ...]  # the groups that keep everything
    windows: tuple[GroupPlaces, ...]  # those that keep the last tokens: windows and chunks
    states: tuple[GroupPlaces, ...]

    @classmethod
    def of(cls, plan: Plan) -> "Places":
        """Those of a plan; where all groups keep states a unit has the spec's block size."""
        sizes = [group.block_size for group in plan.spec.groups if not group.is_state]
        unit = math.lcm(*sizes) if sizes else plan.spec.block_size
        groups = _groups_of(plan, unit)
        return cls(
            plan=plan,
            unit=unit,
            groups=groups,
            of_place=tuple(group for group in groups for _ in group.places),
            whole=tuple(group for group in groups if group.keeps_all),
            windows=tuple(group for group in groups if group.group.region.span),
            states=tuple(group for group in groups if group.is_state),
        )

    @property
    def costs(self) -> tuple[int, int]:
        """Bytes of a unit in the groups that keep everything; of a snapshot with windows' tails."""
        longest = max((group.group.region.span or 0 for group in self.windows), default=0)
        length = (longest // self.unit + 2) * self.unit  # windows are full there
        tails = [len(group.needed(length)) * group.cost for group in (*self.windows, *self.states)]
        return sum(group.cost for group in self.whole), sum(tails)

    def last_hit(self, tokens: int) -> int:
        """The longest hit of a prompt of so many tokens, which leaves one of them to compute."""
        return max(tokens - 1, 0) // self.unit * self.unit


def memories_of(plan: Plan) -> tuple[int, ...]:
    """The memory of each pool: a block of any pool of a memory makes room for the others' needs."""
    # Pools of slabs give an empty slab to whichever of them needs it.
    of_slabs = [pool for pool, blocks in enumerate(plan.pool_per_slab) if blocks]
    return tuple(of_slabs[0] if pool in of_slabs else pool for pool in range(len(plan.pool_sizes)))


def _groups_of(plan: Plan, unit: int) -> tuple[GroupPlaces, ...]:
    memory_of = memories_of(plan)
    found: list[GroupPlaces] = []
    for index, group in enumerate(plan.spec.groups):
        pool, keeps_all = plan.pool_of[index], group.region.kind == regions.ALL
        count = 1 if group.is_state else unit // group.block_size
        places = GroupPlaces(
            name=group.name,
            group=group,
            index=index,
            pool=pool,
            memory=memory_of[pool],
            per_slab=plan.pool_per_slab[pool],
            first=sum(before.count for before in found),
            count=count,
            unit=unit,
            keeps_all=keeps_all,
            is_state=group.is_state,
            cost=group.bytes_per_block * (count if keeps_all else 1),
            reach=-(-max(group.region.span - 1, 0) // unit) - 1 if group.region.span > 1 else 0,
            under=None,
        )
        found.append(places)
    under = {places.memory: places.first for places in reversed(found) if places.keeps_all}
    return tuple(dataclasses.replace(places, under=under.get(places.memory)) for places in found)
