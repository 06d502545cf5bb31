"""Plan checks: what a plan must be for planning to have made it; the others are refused."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvpool import pooling, schema
from kvpool.status import SpecError

if TYPE_CHECKING:
    from kvpool.plan import Plan

SLABS = ("slabs", "slab_bytes", "per_slab")  # keys of a stored plan since version 3


def check_keys(data: Mapping, known) -> None:
    """SpecError for keys of a stored plan that its version does not have, by name."""
    schema.check_version("plan", data)
    version = data["schema_version"]
    schema.refuse_unknown(
        f"plan of version {version}", data, set(known) - set(SLABS if version < 3 else ())
    )


def check_counts(plan: "Plan") -> None:
    """SpecError for more than a state or a storage can number, or more kept than fits."""
    total = sum(plan.pool_sizes)
    if total >= 2**31:
        raise SpecError(f"wanted less than 2^31 blocks in all, got {total:,}")
    check_entries(plan, in_slabs=True)
    _check_kept(plan)


def check_entries(plan: "Plan", in_slabs: bool = False) -> None:
    """SpecError for a group with more entries than slots can number.

    Args:
      in_slabs: only groups that draw from slabs, whose blocks nobody asked for.
    """
    per_slab = plan.per_slab or (0,) * len(plan.blocks)
    for group, blocks, each in zip(plan.spec.groups, plan.blocks, per_slab, strict=True):
        if blocks * group.entries_per_block >= 2**31 and (each or not in_slabs):
            raise SpecError(
                f"group {group.name!r}: wanted less than 2^31 entries, got {blocks:,} blocks of "
                f"{group.entries_per_block:,}"
                + (f", if it gets all {plan.slabs:,} slabs" if each else "")
            )


def check_rows(plan: "Plan") -> None:
    """SpecError for more columns of block tables than can be numbered."""
    entries = plan.max_seqs * sum(plan.columns(group) for group in plan.spec.groups)
    if entries >= 2**31:
        raise SpecError(
            f"wanted less than 2^31 table entries, got {entries:,} of {plan.max_seqs:,} rows of up "
            f"to {plan.max_seq_len:,} tokens"
        )


def check_pools(plan: "Plan") -> None:
    """SpecError unless the pools of the groups, their sizes and the slabs fit together."""
    names = [group.name for group in plan.spec.groups]
    numbered = list(dict.fromkeys(plan.pool_of)) == list(range(len(set(plan.pool_of))))
    if len(plan.pool_of) != len(names) or not numbered:
        raise SpecError(
            f"pool_of: wanted a pool for each of {', '.join(names)}, in the order of the groups, "
            f"got {plan.pool_of}"
        )
    _check_together(plan)
    if plan.per_slab and len(plan.per_slab) != len(names):
        raise SpecError(
            f"per_slab: wanted a count for each of {', '.join(names)}, got {plan.per_slab}"
        )
    _check_slabs(plan)
    for name, pool, have in zip(names, plan.pool_of, plan.blocks, strict=True):
        first = plan.pool_of.index(pool)
        if have != plan.blocks[first]:
            raise SpecError(
                f"num_blocks[{name!r}]: wanted {plan.blocks[first]} like {names[first]!r}, which "
                f"draws from the same pool, got {have}"
            )


def _check_together(plan: "Plan") -> None:
    """Groups that are not alone draw from one pool where their blocks have such sizes."""
    groups, pool_of = plan.spec.groups, plan.pool_of
    alone = [g.name for g, pool in zip(groups, pool_of, strict=True) if pool_of.count(pool) == 1]
    wanted = pooling.pools_of(groups, plan.spec.pooling, alone)
    if pool_of != wanted:
        sizes = ", ".join(f"{group.name} {group.bytes_per_block:,}" for group in groups)
        raise SpecError(
            f"pool_of: wanted {wanted} for pooling {plan.spec.pooling!r} and blocks of {sizes} "
            f"bytes, got {pool_of}"
        )


def _check_slabs(plan: "Plan") -> None:
    """Slabs hold as many blocks of each group as have room, and are there for some group."""
    given = f"{plan.slabs:,} slabs of {plan.slab_bytes:,} bytes"
    groups = plan.spec.groups
    members = tuple(g for g, each in zip(groups, plan.per_slab, strict=False) if each)
    if not members:
        if plan.per_slab or plan.slabs or plan.slab_bytes:
            raise SpecError(f"per_slab: wanted counts above 0 for {given}, got {plan.per_slab}")
        return
    if plan.spec.pooling != pooling.ELASTIC:
        raise SpecError(f"per_slab: no group here has slabs; pooling is {plan.spec.pooling!r}")
    size = pooling.checked_slab(plan.slab_bytes, members)
    for index, (group, each) in enumerate(zip(groups, plan.per_slab, strict=True)):
        wanted, have = pooling.blocks_in_slab(size, group.bytes_per_block), plan.blocks[index]
        if each != wanted and (each or plan.pool_of.count(plan.pool_of[index]) > 1):
            raise SpecError(
                f"per_slab: wanted {wanted:,} blocks of {group.name!r}, of "
                f"{group.bytes_per_block:,} bytes, in a slab of {size:,}, got {each:,}"
            )
        if each and have != each * plan.slabs:
            raise SpecError(
                f"num_blocks[{group.name!r}]: wanted {each} in each of {given}, got {have} of "
                f"{group.bytes_per_block}"
            )


def _check_kept(plan: "Plan") -> None:
    kept, pools = plan.kept, len(plan.pool_sizes)
    if kept and len(kept) != pools:
        raise SpecError(f"kept: wanted a count for each of {pools} pools, got {kept}")
    if any(keep > size for keep, size in zip(kept, plan.pool_sizes, strict=False)):
        raise SpecError(f"kept for keep_free: got {kept}, more than the pools {plan.pool_sizes}")
    pairs = zip(kept, plan.pool_per_slab, strict=False)
    slabs = sum(-(-keep // each) for keep, each in pairs if each)
    if slabs > plan.slabs:
        raise SpecError(f"kept for keep_free: got {kept}, in {slabs:,} slabs of {plan.slabs:,}")
