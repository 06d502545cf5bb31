"""The figures of `kvpool plan`: of the groups, and of a request at each length."""

import dataclasses
from typing import Any

import numpy as np

from kvpool.group import Group
from kvpool.held import Lengths
from kvpool.needs import (
    Groups,
    block_bytes,
    bytes_of,
    growing_blocks,
    largest,
    needed_bytes,
    prefill_blocks,
    requests_blocks,
    row_blocks,
)
from kvpool.plan import Plan
from kvpool.plan_text import sharing
from kvpool.planning import plan
from kvpool.pooling import ELASTIC, pools_of
from kvpool.spec import CacheSpec
from kvpool.status import SpecError
from kvpool.variants import without_regions

AVERAGED = 256  # lengths; blocks are no longer than that, so every place within one counts alike


@dataclasses.dataclass(frozen=True)
class Question:
    """What `kvpool plan` was asked: the spec of one rank, and what it is to serve."""

    name: str
    spec: CacheSpec
    budget_bytes: int | None
    rows: int | None
    lengths: tuple[int, ...]
    step_tokens: int
    tail_only: bool
    ratio: str | None = None
    snapshots: int = 0
    ranks: int = 1
    compare: bool = False

    @property
    def in_slabs(self) -> bool:
        """Whether all groups draw from the same slabs."""
        return self.spec.pooling == ELASTIC

    @property
    def longest(self) -> int:
        """The longest of the lengths, which a row must hold."""
        return max(self.lengths)


def report(question: Question) -> dict[str, Any]:
    """All figures as JSON values."""
    made, groups = _plan(question), question.spec.groups
    figures: dict[str, Any] = {
        "model": question.name,
        "layers": len(question.spec.layers),
        "ranks": question.ranks,
        "budget_bytes": question.budget_bytes,
        "step_tokens": question.step_tokens,
        "tail_only": question.tail_only,
        "groups": [_group(question.spec, index, made) for index in range(len(groups))],
        "requests": [_request(question, made, tokens) for tokens in question.lengths],
        "plan": made and made.to_dict(),
        "total_bytes": made and made.total_bytes,
        "sharing": sharing(made) if made else [],
    }
    if question.compare:
        alone = dataclasses.replace(question, spec=without_regions(question.spec))
        figures["uniform"] = [_request(alone, None, tokens) for tokens in question.lengths]
    return figures


def _plan(question: Question) -> Plan | None:
    """The plan for the rows asked for, or for the most requests of the longest length that fits."""
    if question.budget_bytes is None:
        if question.rows is not None or question.ratio is not None or question.snapshots:
            raise SpecError("--rows, --ratio and --snapshots divide a budget: give --budget too")
        return None
    longest = question.longest
    if question.rows is None:
        fitting = [n for n in question.lengths if requests_in_budget(question, n)]
        longest = max(fitting, default=min(question.lengths))
        if question.in_slabs and question.ratio is None:
            return _for_requests(question, longest)
    limits: dict[str, Any] = {
        "max_seqs": question.rows,
        "max_seq_len": longest,
        "max_step_tokens": min(question.step_tokens, longest),
        "snapshots": question.snapshots,
    }
    if question.rows is None:
        limits["max_seqs"] = max(1, requests_in_budget(question, longest))
        if question.ratio is None:
            limits |= {"request_tokens": longest, "tail_only": question.tail_only}
    return plan(question.spec, question.budget_bytes, ratio=question.ratio, **limits)


def _for_requests(question: Question, tokens: int) -> Plan:
    """The plan with slabs for the most requests of `tokens` tokens.

    Raises:
      SpecError: when not even one of them fits.
    """
    shaped = _in_slabs(question, tokens, max(1, _requests_by_bytes(question, tokens)))
    requests = _requests_in(shaped, question, tokens)
    if requests < 1:
        row, peak = _row_and_peak(question, tokens)
        size = bytes_of(question.spec.groups, requests_blocks(row, peak, 1))
        raise SpecError(
            f"budget_bytes: got {question.budget_bytes:,}, but one request of {tokens:,} tokens, "
            f"with blocks of {size:,} bytes, does not fit into {shaped.slabs:,} slabs of "
            f"{shaped.slab_bytes:,}"
        )
    return _in_slabs(question, tokens, requests, slab_bytes=shaped.slab_bytes)


def _in_slabs(question: Question, tokens: int, rows: int, slab_bytes: int | None = None) -> Plan:
    """The plan with slabs for so many rows of `tokens` tokens, each in blocks of its own."""
    sizes = [group.block_size for group in question.spec.groups if not group.is_state]
    made = plan(
        question.spec,
        question.budget_bytes,
        max_seqs=rows,
        max_seq_len=max([tokens, *(-(-tokens // size) * size for size in sizes)]),
        max_step_tokens=min(question.step_tokens, tokens),
        snapshots=question.snapshots,
        slab_bytes=slab_bytes,
    )
    return dataclasses.replace(made, max_seq_len=tokens)


def _group(spec: CacheSpec, index: int, made: Plan | None) -> dict[str, Any]:
    group = spec.groups[index]
    figures: dict[str, Any] = {
        "name": group.name,
        "tags": tags_of(spec, group),
        "layers": len(group.layers),
        "block_tokens": None if group.is_state else group.block_size,
        "bytes_per_block": group.bytes_per_block,
    }
    if made is not None:
        array = made.array_of[index]  # several groups may have the whole of one
        size = made.array_rows[array] * made.array_bytes[array]
        figures |= {"blocks": made.blocks[index], "bytes": size, "share": size / made.total_bytes}
    return figures


def tags_of(spec: CacheSpec, group: Group) -> list[str]:
    """The tags under which layers of the group find their region, none for layers without tags."""
    pairs = [(layer, tag) for layer in group.layers for tag in spec.tags(layer) if tag is not None]
    return sorted({tag for layer, tag in pairs if spec.resolve(layer, tag)[0] == group.name})


def _request(question: Question, made: Plan | None, tokens: int) -> dict[str, Any]:
    """A request while its last of `tokens` tokens is computed."""
    groups = question.spec.groups
    held = block_bytes(groups) * row_blocks(groups, [tokens], writing=True)[:, 0]
    needed = needed_bytes(groups, [tokens])[:, 0]
    around = np.arange(max(1, tokens - AVERAGED + 1), tokens + 1)
    mean_held = held_bytes(groups, around).mean()
    sources = {group.name: _waste(group, around) for group in groups}
    prefill = prefill_blocks(groups, tokens, question.step_tokens, question.tail_only)
    return {
        "tokens": tokens,
        "held_bytes": int(held.sum()),
        "needed_bytes": int(needed.sum()),
        "efficiency": float(needed.sum() / held.sum()),
        "mean_efficiency": float(needed_bytes(groups, around).sum(axis=0).mean() / mean_held),
        "prefill_peak_bytes": int((block_bytes(groups) @ prefill).max()),
        "requests": requests_in_budget(question, tokens) if question.budget_bytes else None,
        "requests_in_plan": None if made is None else _requests_in(made, question, tokens),
        "held_by_group": {g.name: int(n) for g, n in zip(groups, held, strict=True)},
        "mean_waste": {
            name: {source: size / mean_held for source, size in of.items()}
            for name, of in sources.items()
        },
    }


def most_bytes(groups: Groups, tokens) -> np.ndarray:
    """Most bytes i64[G, R] that requests hold anywhere on their way to `tokens` i64[R]."""
    most = np.stack([growing_blocks(groups, int(length)) for length in tokens], axis=1)
    return block_bytes(groups)[:, None] * most


def held_bytes(groups: Groups, tokens) -> np.ndarray:
    """Bytes i64[R] that requests hold while their last of `tokens` i64[R] tokens is computed."""
    return block_bytes(groups) @ row_blocks(groups, tokens, writing=True)


def _waste(group: Group, tokens) -> dict[str, float]:
    """Mean bytes of a group that are held in vain, by what they are.

    "open block": places of the last block for tokens still to come; "dead tokens": tokens before
    the window in the first block held; "padding": to multiples of 16 bytes.
    """
    held = group.held(Lengths.exactly(tokens)._replace(settled=tokens - 1))
    raw = group.entries_per_block * group.bytes_per_entry
    padding = held.count * (group.bytes_per_block - raw)
    if group.is_state:
        return {"padding": float(padding.mean())}
    ratio, first = group.region.tokens_per_entry, group.region.first_read(tokens - 1)
    ahead = held.stop * group.entries_per_block - tokens // ratio
    before = first // ratio - held.start * group.entries_per_block
    return {
        "open block": float((ahead * group.bytes_per_entry).mean()),
        "dead tokens": float((before * group.bytes_per_entry).mean()),
        "padding": float(padding.mean()),
    }


def _row_and_peak(question: Question, tokens: int):
    groups = question.spec.groups
    prefill = prefill_blocks(groups, tokens, question.step_tokens, question.tail_only)
    return growing_blocks(groups, tokens), prefill.max(axis=1)


def requests_in_budget(question: Question, tokens: int) -> int:
    """Requests that grow to `tokens` tokens, prefilled one after another, in the best memory."""
    requests = _requests_by_bytes(question, tokens)
    if not requests or not question.in_slabs:
        return requests
    try:
        made = _in_slabs(question, tokens, requests)
    except SpecError:  # not even one row is served
        return 0
    return _requests_in(made, question, tokens)


def _requests_by_bytes(question: Question, tokens: int) -> int:
    """The most such requests whose blocks fit into the budget, which slabs may not reach."""
    groups, (row, peak) = question.spec.groups, _row_and_peak(question, tokens)
    pools = pools_of(groups, question.spec.pooling, ())
    pairs = list(zip(block_bytes(groups).tolist(), pools, strict=True))
    # Of groups that share a pool every block takes as much as the largest.
    sizes = [max(size for size, other in pairs if other == pool) for pool in pools]

    def total(blocks):
        return sum(int(count) * size for count, size in zip(blocks, sizes, strict=True))

    snapshots = total(question.snapshots * group.is_state for group in groups)
    budget = max(0, (question.budget_bytes or 0) - snapshots)
    limit = budget // total(row)
    return largest(limit, lambda n: total(requests_blocks(row, peak, n)) <= budget)


def _requests_in(made: Plan, question: Question, tokens: int) -> int:
    """The same in the memory of a plan, and no more than its rows."""
    row, peak = _row_and_peak(question, tokens)
    taken = np.array([made.snapshots * group.is_state for group in question.spec.groups])
    blocks = lambda n: (requests_blocks(row, peak, n) + taken).tolist()  # noqa: E731
    return largest(made.max_seqs, lambda n: made.holds(blocks(n)))
