"""Planning: a plan from a budget, from counts, or from both."""

import dataclasses
from collections.abc import Mapping

from kvpool import budget, plan_checks, pooling, schema, slab_planning
from kvpool.needs import bytes_of
from kvpool.plan import Plan
from kvpool.regions import positive, token_count
from kvpool.spec import CacheSpec
from kvpool.status import SpecError


def plan(
    spec: CacheSpec,
    budget_bytes: int | None = None,
    *,
    max_seqs: int,
    max_seq_len: int,
    max_step_tokens: int | None = None,
    snapshots: int = 0,
    snapshots_per_row: int = 0,
    num_blocks: Mapping[str, int] | None = None,
    charge_explicit: bool | None = None,
    ratio: str | None = None,
    request_tokens: int | None = None,
    tail_only: bool = False,
    growing: bool = True,
    keep_free: float | Mapping[str, float] = 0,
    slab_bytes: int | None = None,
) -> Plan:
    """Decides how many blocks each group gets.

    By default the plan holds the most tokens, at most max_seqs * max_seq_len, whose blocks fit into
    the budget, however the tokens are dealt to the rows. Windows and chunks get no more than all
    rows can hold at once, states one block a row. Groups of a shared pool get theirs together; in
    an elastic cache the whole budget is slabs for whoever needs them, and no more than all rows can
    use.

    Args:
      spec: the cache.
      budget_bytes: bytes for the block arrays.
      max_seqs: rows, S.
      max_seq_len: tokens a row may hold.
      max_step_tokens: tokens a row may reserve at once; default max_seq_len.
      snapshots: blocks of each state group beyond one a row.
      snapshots_per_row: the same for each of the max_seqs rows; the two add up.
      num_blocks: {group name: blocks}, explicit counts; they go before the budget. They are fixed:
        whatever the pooling, these groups have pools of their own.
      charge_explicit: True or False lets num_blocks name only some groups, and the others share the
        budget: what is left of it (True), or all of it (False).
      ratio: "4:1", a weight for each group without an explicit count: its share of the budget.
      request_tokens: shapes the pools for requests of this length: the most of them, at most
        max_seqs, prefilled one after another in steps of max_step_tokens, fit.
      tail_only: those steps reserve with `tail_only`.
      growing: those requests hold the most that they do anywhere on their way to that length, a
        token at a time. False: they rest there, as before they are sent elsewhere.
      keep_free: the share of the blocks that admission is to leave free for the rows that run, at
        least 0 and below 1, or {group name: share}; `Plan.keep_free` holds it in blocks for `fits`.
        Of slabs it is the share of what each pool has of them at the plan's token capacity.
      slab_bytes: of an elastic cache; by default the size that is expected to waste least.

    Raises:
      SpecError: with the numbers, where the plan cannot be met; a budget too small comes with the
        smallest that works.
    """
    step = max_seq_len if max_step_tokens is None else max_step_tokens
    explicit = num_blocks if isinstance(num_blocks, Mapping) else ()
    limits = (max_seqs, max_seq_len, step, snapshots, snapshots_per_row)
    empty = _without_blocks(spec, explicit, *limits)
    request = None
    if request_tokens is not None:
        request = (request_tokens, bool(tail_only), bool(growing))
    made = _with_blocks(
        empty, budget_bytes, num_blocks, charge_explicit, ratio, request, slab_bytes
    )
    sizes = budget.expected_blocks(made)
    kept = budget.kept_free(sizes, tuple(made.num_blocks), keep_free, made.pool_of)
    made = dataclasses.replace(made, kept=kept if any(kept) else ())
    plan_checks.check_counts(made)
    return made


def _with_blocks(empty: Plan, size, num_blocks, charge, ratio, request, slab_bytes) -> Plan:
    """The plan with the explicit counts, and the others from the budget."""
    counts, spec = {}, empty.spec
    if num_blocks is not None:
        counts = budget.explicit(empty, num_blocks, all_groups=charge is None)
    given = tuple(group for group in spec.groups if group.name in counts)
    rest = tuple(group for group in spec.groups if group.name not in counts)
    if ratio is not None and request is not None:
        raise SpecError("plan: wanted ratio or request_tokens, got both")
    if size is None and (rest or charge or ratio is not None or request is not None):
        raise SpecError("plan: wanted budget_bytes or num_blocks, got neither for " + _names(rest))
    size = size if size is None else positive("budget_bytes", size)
    charged = bytes_of(given, [counts[group.name] for group in given]) if charge else 0
    slabbed = spec.pooling == pooling.ELASTIC and bool(rest)
    if charged and charged > size and not slabbed:  # slabs name the smallest budget
        raise SpecError(
            f"budget_bytes: got {size:,}, but the explicit groups alone are {charged:,}"
        )
    if slab_bytes is not None and not slabbed:
        raise SpecError(f"slab_bytes: no group here has slabs; pooling is {spec.pooling!r}")
    if slabbed:
        if ratio is not None or request is not None:
            name = "request_tokens" if ratio is None else "ratio"
            raise SpecError(f"{name}: shapes pools, but {_names(rest)} draw from the same slabs")
        return slab_planning.cut(empty, rest, counts, size, charged, slab_bytes)
    if rest and ratio is not None:
        counts |= budget.by_ratio(empty, rest, size, charged, ratio)
    elif rest and request is not None:
        counts |= budget.by_requests(empty, rest, size, charged, *request)
    elif rest:
        counts |= budget.by_tokens(empty, rest, size, charged)
    return _pooled(empty, counts)


def _pooled(empty: Plan, counts: Mapping[str, int]) -> Plan:
    """The plan with pools of as many blocks as their groups are to have."""
    sums = empty.by_pool([counts[group.name] for group in empty.spec.groups])
    return dataclasses.replace(empty, blocks=tuple(sums[pool] for pool in empty.pool_of))


def _names(groups) -> str:
    return ", ".join(group.name for group in groups) or "any group"


def _without_blocks(
    spec: CacheSpec, explicit, max_seqs, max_seq_len, step, snapshots, per_row
) -> Plan:
    max_seqs = positive("max_seqs", max_seqs)
    max_seq_len = token_count("max_seq_len", max_seq_len)
    step = token_count("max_step_tokens", step)
    snapshots = schema.count("snapshots", snapshots)
    snapshots += max_seqs * schema.count("snapshots_per_row", per_row)
    pools = pooling.pools_of(spec.groups, spec.pooling, explicit)
    empty = Plan(spec, (0,) * len(pools), max_seqs, max_seq_len, step, snapshots, pools)
    plan_checks.check_rows(empty)
    return empty
