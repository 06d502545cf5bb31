"""Slab planning: how large the slabs of an elastic cache are, and how many."""

import dataclasses
from collections.abc import Mapping

from kvpool import pooling
from kvpool.budget import least_blocks
from kvpool.needs import Groups, bytes_of, largest
from kvpool.plan import Plan
from kvpool.status import SpecError


def cut(
    empty: Plan, groups: Groups, counts: Mapping[str, int], budget: int, charged: int, slab_bytes
) -> Plan:
    """The plan whose slabs, for `groups`, fit into budget - charged; the others have `counts`.

    There are no more slabs than all rows can use: a pool that takes a new one only when its own are
    full never holds more than its blocks fill.

    Raises:
      SpecError: with the numbers, for slabs that cannot be, or a budget that does not serve a row.
    """
    members = _Members(empty, groups)
    least = members.least()
    if slab_bytes is None:
        sizes = pooling.slab_sizes([size for size, _ in least])
    else:
        sizes = [pooling.checked_slab(slab_bytes, groups)]
    needs = {size: pooling.slabs_for(least, size) * size for size in sizes}
    if min(needs.values()) > budget - charged:
        raise _too_small(members, needs, budget, charged)
    budget -= charged
    fitting = [size for size in sizes if needs[size] <= budget]
    size = pooling.slab_size(fitting, members.shares(budget), budget)
    made = _with_slabs(empty, groups, counts, size)
    names = [group.name for group in empty.spec.groups]
    most = made.slabs_for([members.most_of(name) for name in names])
    count = min(budget // size, most)
    blocks = [
        each * count if each else have
        for each, have in zip(made.per_slab, made.blocks, strict=True)
    ]
    return dataclasses.replace(made, slabs=count, blocks=tuple(blocks))


def _too_small(
    members: "_Members", needs: Mapping[int, int], budget: int, charged: int
) -> SpecError:
    """Names the smallest budget that works: no size of slabs needs less for one row."""
    size = min(needs, key=lambda size: needs[size])
    left = max(0, budget - charged)
    beside = f", beside {charged:,} for the explicit groups" if charged else ""
    biggest = max(members.groups, key=lambda group: group.bytes_per_block)
    if biggest.bytes_per_block > left:
        why = f", but a block of {biggest.name!r} alone is {biggest.bytes_per_block:,}"
    else:
        why = f" is {left // size} slabs of {size:,}, but one row can hold {needs[size] // size}"
    return SpecError(
        f"budget_bytes: {left:,} for {members.names}{beside}{why}; "
        f"the smallest budget for it is {needs[size] + charged:,}"
    )


def _with_slabs(empty: Plan, groups: Groups, counts: Mapping[str, int], size: int) -> Plan:
    """The plan with slabs of `size` bytes, though none yet."""
    per_slab = tuple(
        pooling.blocks_in_slab(size, group.bytes_per_block) if group in groups else 0
        for group in empty.spec.groups
    )
    blocks = tuple(counts.get(group.name, 0) for group in empty.spec.groups)
    return dataclasses.replace(empty, blocks=blocks, slab_bytes=size, per_slab=per_slab)


@dataclasses.dataclass(frozen=True)
class _Members:
    """The groups that are to share the slabs."""

    empty: Plan
    groups: Groups

    @property
    def names(self) -> str:
        return ", ".join(group.name for group in self.groups)

    def least_of(self, name: str) -> int:
        """Blocks without which no row can be served."""
        return sum(least_blocks(self.empty, g) for g in self.groups if g.name == name)

    def most_of(self, name: str) -> int:
        """Blocks that all rows and snapshots can hold."""
        tokens = self.empty.max_tokens
        return sum(self.empty.blocks_for(g, tokens) for g in self.groups if g.name == name)

    def least(self) -> list[tuple[int, int]]:
        """(bytes of a block, blocks) of each pool that must fit at the same time."""
        pools: dict[int, int] = {}
        for group in self.groups:
            size = group.bytes_per_block
            pools[size] = pools.get(size, 0) + least_blocks(self.empty, group)
        return list(pools.items())

    def shares(self, budget: int) -> dict[int, float]:
        """{bytes of a block: share of the memory} when the budget is full of tokens."""

        def blocks(tokens):
            return [
                min(self.empty.max_seqs, tokens) + self.empty.snapshots
                if group.is_state
                else self.empty.blocks_for(group, tokens)
                for group in self.groups
            ]

        limit = self.empty.max_tokens
        tokens = max(1, largest(limit, lambda n: bytes_of(self.groups, blocks(n)) <= budget))
        whole = bytes_of(self.groups, blocks(tokens))
        shares: dict[int, float] = {}
        for group, count in zip(self.groups, blocks(tokens), strict=True):
            size = group.bytes_per_block
            shares[size] = shares.get(size, 0) + count * size / whole
        return shares
