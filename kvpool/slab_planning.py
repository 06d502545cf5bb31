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
    budget -= charged
    biggest = max(groups, key=lambda group: group.bytes_per_block)
    if biggest.bytes_per_block > budget:
        raise SpecError(
            f"budget_bytes: {budget:,} for {members.names}, but a block of {biggest.name!r} alone "
            f"is {biggest.bytes_per_block:,}"
        )
    if slab_bytes is None:
        size = pooling.slab_size(members.shares(budget), budget, members.least())
    else:
        size = pooling.checked_slab(slab_bytes, groups)
    made = _with_slabs(empty, groups, counts, size)
    names = [group.name for group in empty.spec.groups]
    need = made.slabs_for([members.least_of(name) for name in names])
    if need * size > budget:
        raise SpecError(
            f"budget_bytes: {budget:,} for {members.names} is {budget // size} slabs of {size:,}, "
            f"but one row can hold {need}; the smallest budget for it is {need * size + charged:,}"
        )
    most = made.slabs_for([members.most_of(name) for name in names])
    count = min(budget // size, most)
    blocks = [
        each * count if each else have
        for each, have in zip(made.per_slab, made.blocks, strict=True)
    ]
    return dataclasses.replace(made, slabs=count, blocks=tuple(blocks))


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
