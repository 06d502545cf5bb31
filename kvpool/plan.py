"""Plan: how many blocks each group gets, and the sizes of the state that follow from it."""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from kvpool.regions import positive, token_count
from kvpool.spec import CacheSpec, Group
from kvpool.status import SpecError


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Block counts and row limits for a spec.  Build with `plan`.

    `blocks` are counts per group, in the order of `spec.groups`. `pool_of` names the pool of each
    group: groups with the same number draw from the same blocks.
    """

    spec: CacheSpec
    blocks: tuple[int, ...]
    max_seqs: int
    max_seq_len: int
    max_step_tokens: int
    snapshots: int
    pool_of: tuple[int, ...]

    @property
    def num_blocks(self) -> dict[str, int]:
        """{group name: blocks}."""
        return {g.name: n for g, n in zip(self.spec.groups, self.blocks, strict=True)}

    @functools.cached_property
    def pool_sizes(self) -> tuple[int, ...]:
        """Blocks of each pool."""
        return tuple(dict(zip(self.pool_of, self.blocks, strict=True)).values())

    @property
    def total_bytes(self) -> int:
        """Bytes of the block arrays."""
        return self._bytes_of(self.blocks)

    @property
    def token_capacity(self) -> int:
        """Most tokens, over all rows, for which every group of tokens has its blocks."""

        def fits(tokens):
            groups = zip(self.spec.groups, self._needs(tokens), self.blocks, strict=True)
            return all(group.is_state or need <= have for group, need, have in groups)

        return _largest(self.max_tokens, fits)

    @property
    def max_tokens(self) -> int:
        """Tokens of all rows at their longest."""
        return self.max_seqs * self.max_seq_len

    def blocks_per_row(self, group: Group) -> int:
        """Most blocks of the group that one row can hold at a time."""
        return group.region.blocks_per_row(group.block_size, self.max_step_tokens, self.max_seq_len)

    @functools.cached_property
    def row_fits(self) -> bool:
        """Whether the longest row fits into the empty pools, so that nothing is never possible."""
        most = [0] * len(self.pool_sizes)
        for group, pool in zip(self.spec.groups, self.pool_of, strict=True):
            most[pool] += self.blocks_per_row(group)
        return all(need <= size for need, size in zip(most, self.pool_sizes, strict=True))

    def columns(self, group: Group) -> int:
        """Columns of the group's block table."""
        return group.columns(self.max_seq_len)

    def _needs(self, tokens: int) -> tuple[int, ...]:
        """Blocks of each group for `tokens` tokens, however they are dealt to the rows."""
        needs = []
        for group in self.spec.groups:
            if group.is_state:
                needs.append(self.max_seqs + self.snapshots)
                continue
            need = -(-tokens // group.block_size)
            if group.region.span:
                need = min(need, self.max_seqs * self.blocks_per_row(group))
            needs.append(need)
        return tuple(needs)

    def cost(self, tokens: int) -> int:
        """Bytes of the blocks that `tokens` tokens need."""
        return self._bytes_of(self._needs(tokens))

    def _bytes_of(self, blocks: tuple[int, ...]) -> int:
        return sum(n * g.bytes_per_block for n, g in zip(blocks, self.spec.groups, strict=True))

    @functools.cached_property
    def _key(self) -> tuple:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other):
        return self is other or (isinstance(other, Plan) and self._key == other._key)

    def __hash__(self):
        return self._hash

    def __str__(self) -> str:
        rows = [("group", "layers", "tokens/block", "bytes/block", "blocks", "MiB")]
        for group, blocks in zip(self.spec.groups, self.blocks, strict=True):
            tokens = "-" if group.is_state else f"{group.block_size:,}"
            size = f"{group.bytes_per_block:,}"
            used = f"{blocks * group.bytes_per_block / 2**20:,.1f}"
            rows.append((group.name, str(len(group.layers)), tokens, size, f"{blocks:,}", used))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        lines.append(
            f"{self.total_bytes / 2**20:,.1f} MiB; {self.token_capacity:,} tokens in up to "
            f"{self.max_seqs:,} rows of up to {self.max_seq_len:,}"
        )
        return "\n".join(lines)


def plan(
    spec: CacheSpec,
    budget_bytes: int | None = None,
    *,
    max_seqs: int,
    max_seq_len: int,
    max_step_tokens: int | None = None,
    snapshots: int = 0,
    num_blocks: Mapping[str, int] | None = None,
) -> Plan:
    """Decides how many blocks each group gets.

    Args:
      spec: the cache.
      budget_bytes: bytes for the block arrays; the plan holds the most tokens, at most
        max_seqs * max_seq_len, whose blocks fit.
      max_seqs: rows, S.
      max_seq_len: tokens a row may hold.
      max_step_tokens: tokens a row may reserve at once; default max_seq_len.
      snapshots: blocks of each state group beyond one a row.
      num_blocks: {group name: blocks}, explicit counts; they go before the budget.

    Raises:
      SpecError: with the numbers, where the plan cannot be met.
    """
    step = max_seq_len if max_step_tokens is None else max_step_tokens
    empty = _without_blocks(spec, max_seqs, max_seq_len, step, snapshots)
    if num_blocks is not None:
        blocks = _explicit(empty, num_blocks)
    elif budget_bytes is not None:
        blocks = _from_budget(empty, budget_bytes)
    else:
        raise SpecError("plan: wanted budget_bytes or num_blocks, got neither")
    if sum(blocks) >= 2**31:
        raise SpecError(f"wanted less than 2^31 blocks in all, got {sum(blocks):,}")
    return dataclasses.replace(empty, blocks=blocks)


def _without_blocks(spec: CacheSpec, max_seqs, max_seq_len, step, snapshots) -> Plan:
    max_seqs = positive("max_seqs", max_seqs)
    max_seq_len = token_count("max_seq_len", max_seq_len)
    step = token_count("max_step_tokens", step)
    if isinstance(snapshots, bool) or not isinstance(snapshots, (int, np.integer)) or snapshots < 0:
        raise SpecError(f"snapshots: wanted an integer of at least 0, got {snapshots!r}")
    entries = max_seqs * sum(group.columns(max_seq_len) for group in spec.groups)
    if entries >= 2**31:
        raise SpecError(
            f"wanted less than 2^31 table entries, got {entries:,} of {max_seqs:,} rows of up to "
            f"{max_seq_len:,} tokens"
        )
    pools = tuple(range(len(spec.groups)))
    return Plan(spec, (0,) * len(pools), max_seqs, max_seq_len, step, int(snapshots), pools)


def _explicit(empty: Plan, num_blocks: Mapping[str, int]) -> tuple[int, ...]:
    groups = empty.spec.groups
    names = [group.name for group in groups]
    for name in num_blocks:
        empty.spec.group_index(name)
    missing = [name for name in names if name not in num_blocks]
    if missing:
        raise SpecError(
            f"num_blocks: no count for {', '.join(missing)}; the groups are {', '.join(names)}"
        )
    blocks = tuple(positive(f"num_blocks[{name!r}]", num_blocks[name]) for name in names)
    for group, have in zip(groups, blocks, strict=True):
        need = empty.blocks_per_row(group)
        if group.region.span and have < need:
            raise SpecError(
                f"num_blocks[{group.name!r}]: got {have}, but one row can hold {need} blocks "
                f"({group.region.kind} {group.region.span}, steps of {empty.max_step_tokens}, "
                f"{group.block_size} tokens a block); give {need} or smaller steps"
            )
    return blocks


def _from_budget(empty: Plan, budget_bytes: int) -> tuple[int, ...]:
    budget = positive("budget_bytes", budget_bytes)
    tokens = _largest(empty.max_tokens, lambda tokens: empty.cost(tokens) <= budget)
    if tokens < 1:
        raise SpecError(
            f"budget_bytes: got {budget:,}, but one token needs at least {empty.cost(1):,} "
            f"(a block of every group, {empty.max_seqs + empty.snapshots} of each state group)"
        )
    return empty._needs(tokens)


def _largest(limit: int, fits) -> int:
    """The largest n in 0..limit for which fits(n), which is true up to some n; 0 if it never is."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
