"""Budget: the ways to decide how many blocks each group gets.

Every strategy is exact: what it grants costs at most the budget, and one token, or one request,
more would cost more than it. A budget too small is refused with the smallest that works.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction

import numpy as np

from kvpool.group import Group
from kvpool.needs import (
    Groups,
    growing_blocks,
    largest,
    prefill_blocks,
    requests_blocks,
    row_blocks,
)
from kvpool.plan import Plan
from kvpool.regions import ALL, positive, token_count
from kvpool.status import SpecError
from kvpool.text import parse_ratio


def explicit(empty: Plan, num_blocks, all_groups: bool) -> dict[str, int]:
    """{group: blocks} as given, once checked; with `all_groups` none may be missing."""
    spec, names = empty.spec, [group.name for group in empty.spec.groups]
    if not isinstance(num_blocks, Mapping):
        raise SpecError(f"num_blocks: wanted {{group name: blocks}}, got {num_blocks!r}")
    for name in num_blocks:
        spec.group_index(name)
    missing = [name for name in names if name not in num_blocks]
    if missing and all_groups:
        raise SpecError(
            f"num_blocks: no count for {', '.join(missing)}; the groups are {', '.join(names)}. "
            "To give them the rest of a budget, set charge_explicit"
        )
    blocks = {name: positive(f"num_blocks[{name!r}]", num_blocks[name]) for name in num_blocks}
    for name, have in blocks.items():
        group = spec.group(name)
        need = least_blocks(empty, group)
        if have < need:
            raise SpecError(f"num_blocks[{name!r}]: got {have}, but {_one_row(empty, group, need)}")
    return blocks


def least_blocks(empty: Plan, group: Group) -> int:
    """Blocks without which the group cannot serve a single row whatever its length."""
    return empty.blocks_per_row(group) if group.region.span else 1


def _one_row(empty: Plan, group: Group, need: int) -> str:
    return (
        f"one row can hold {need} blocks ({group.region.kind} {group.region.span}, steps of "
        f"{empty.max_step_tokens}, {group.block_size} tokens a block); give {need} or smaller steps"
    )


def by_tokens(empty: Plan, groups: Groups, budget: int, charged: int) -> dict[str, int]:
    """The most tokens, over all rows, whose blocks of these groups fit into budget - charged."""
    # Where none of them keeps the whole past, tokens do not bound a row: a window needs its most.
    bounded = any(group.region.kind == ALL for group in groups)
    least = [1 if bounded else least_blocks(empty, group) for group in groups]

    def blocks(tokens):
        need = [empty.blocks_for(group, tokens) for group in groups]
        return [max(pair) for pair in zip(least, need, strict=True)]

    tokens = _most(
        empty,
        empty.max_tokens,
        groups,
        budget,
        charged,
        blocks,
        "one token",
        f"(a block of every group, {empty.max_seqs + empty.snapshots} of each state group)",
    )
    return {group.name: have for group, have in zip(groups, blocks(tokens), strict=True)}


def by_requests(
    empty: Plan, groups: Groups, budget: int, charged: int, tokens, tail_only: bool, growing: bool
) -> dict[str, int]:
    """The most requests of `tokens` tokens, prefilled one after another, that fit."""
    tokens = token_count("request_tokens", tokens)
    if tokens > empty.max_seq_len:
        raise SpecError(f"request_tokens: got {tokens:,}, but max_seq_len is {empty.max_seq_len:,}")
    row = growing_blocks(groups, tokens) if growing else row_blocks(groups, [tokens])[:, 0]
    peak = prefill_blocks(groups, tokens, empty.max_step_tokens, tail_only).max(axis=1)
    extra = np.array([empty.snapshots * group.is_state for group in groups])
    least = np.array([least_blocks(empty, group) for group in groups])

    def blocks(requests):
        return np.maximum(least, requests_blocks(row, peak, requests) + extra)

    what = f"one request of {tokens:,} tokens"
    requests = _most(empty, empty.max_seqs, groups, budget, charged, blocks, what, "")
    pairs = zip(groups, blocks(requests).tolist(), strict=True)
    return {group.name: have for group, have in pairs}


def bytes_in_pools(empty: Plan, groups: Groups, blocks: Iterable[int]) -> int:
    """Bytes that so many blocks of each group take where they have pools of their own."""
    return sum(int(n) * empty.row_bytes(group) for n, group in zip(blocks, groups, strict=True))


def _most(
    empty: Plan, limit: int, groups: Groups, budget: int, charged: int, blocks: Callable, what, of
) -> int:
    """The largest n up to `limit` for which `blocks(n)` of the groups fit, or SpecError."""
    number = largest(limit, lambda n: bytes_in_pools(empty, groups, blocks(n)) <= budget - charged)
    if number < 1:
        least = charged + bytes_in_pools(empty, groups, blocks(1))
        others = f", with {charged:,} for the explicit groups" if charged else ""
        raise SpecError(
            f"budget_bytes: got {budget:,}, but {what} needs at least {least:,} {of}".rstrip()
            + others
        )
    return number


def by_ratio(empty: Plan, groups: Groups, budget: int, charged: int, ratio) -> dict[str, int]:
    """The blocks that fit into each group's share of budget - charged."""
    weights = parse_ratio(ratio, [group.name for group in groups])
    whole = sum(weights)
    shares = [(budget - charged) * weight / whole for weight in weights]
    least = [least_blocks(empty, group) for group in groups]
    needed = max(
        need * empty.row_bytes(group) * whole / weight
        for group, need, weight in zip(groups, least, weights, strict=True)
    )
    blocks = {}
    for group, share, need in zip(groups, shares, least, strict=True):
        blocks[group.name] = have = max(0, int(share // empty.row_bytes(group)))
        if have < need:
            reason = _one_row(empty, group, need) if group.region.span else "it needs one"
            raise SpecError(
                f"ratio {ratio!r}: {group.name!r} gets {int(share):,} of {budget:,} bytes, which "
                f"is {have} blocks of {empty.row_bytes(group):,}, but {reason}; the smallest "
                f"budget_bytes for this ratio is {charged + -int(-needed // 1):,}"
            )
    return blocks


def kept_free(
    sizes: Sequence[int], names: Sequence[str], keep_free, pool_of: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Blocks of each pool that make up the share kept free.

    Args:
      sizes: blocks of each pool.
      names: of the groups.
      keep_free: the share of every pool, at least 0 and below 1, or {group name: share}; of a pool
        of several groups the largest share that one of them asks.
      pool_of: the pool of each group; by default each has its own.

    Returns:
      Whole blocks; their sum is the share of all pools together, rounded up. Blocks that are left
      over when each pool's part is rounded down go to the largest remainders.
    """
    shares = [Fraction(0)] * len(sizes)
    for name, pool in zip(names, pool_of or range(len(names)), strict=True):
        shares[pool] = max(shares[pool], _share(name, keep_free, names))
    parts = [share * size for share, size in zip(shares, sizes, strict=True)]
    kept = [int(part // 1) for part in parts]
    left = -int(-sum(parts) // 1) - sum(kept)
    by_remainder = sorted(range(len(parts)), key=lambda pool: kept[pool] - parts[pool])
    for pool in by_remainder[:left]:
        kept[pool] += 1
    return tuple(kept)


def expected_blocks(plan: Plan) -> tuple[int, ...]:
    """Blocks of each pool; of slabs as many as it holds at the plan's token capacity."""
    if not plan.slabs:
        return plan.pool_sizes
    full = plan.by_pool([plan.counted(g, plan.token_capacity) for g in plan.spec.groups])
    pools = zip(full, plan.pool_sizes, plan.pool_per_slab, strict=True)
    return tuple(count if each else size for count, size, each in pools)


def _share(name: str, keep_free, names: Sequence[str]) -> Fraction:
    share, where = keep_free, "keep_free"
    if isinstance(keep_free, Mapping):
        unknown = [key for key in keep_free if key not in names]
        if unknown:
            raise SpecError(f"keep_free: no group {unknown[0]!r}; there are {', '.join(names)}")
        share, where = keep_free.get(name, 0), f"keep_free[{name!r}]"
    is_number = isinstance(share, (int, float)) and not isinstance(share, bool)
    if not is_number or not 0 <= share < 1:
        raise SpecError(f"{where}: wanted a share of at least 0 and below 1, got {share!r}")
    return Fraction(str(share))  # 0.1 is one tenth here, and not the float beside it
