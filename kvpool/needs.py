"""Needs: what requests of a length hold and need, from the arithmetic that the verbs keep to."""

from collections.abc import Callable, Iterable

import numpy as np

from kvpool.group import Group
from kvpool.held import IntArray, Lengths, held_columns, lengths_after
from kvpool.status import SpecError

Groups = tuple[Group, ...]


def row_blocks(groups: Groups, tokens: IntArray, writing: bool = False) -> IntArray:
    """Blocks i64[G, R] that rows of `tokens` i64[R] >= 1 tokens hold.

    Args:
      groups: a spec's.
      tokens: settled, with room exactly for them.
      writing: the last of the tokens is just being computed, and not settled yet.
    """
    tokens = np.asarray(tokens, np.int64)
    return held_columns(groups, Lengths.exactly(tokens)._replace(settled=tokens - writing)).count


def growing_blocks(groups: Groups, tokens: int) -> IntArray:
    """Most blocks i64[G] that a row holds anywhere on its way to `tokens`, a token at a time."""
    return np.array([group.blocks_per_row(1, tokens) for group in groups], np.int64)


def prefill_blocks(groups: Groups, num_tokens: int, step_tokens: int, tail_only: bool) -> IntArray:
    """Blocks i64[G, steps] of a row that prefills num_tokens, once each step has its room.

    Step i reserves up to (i + 1) * step_tokens tokens and then advances by all of them.
    """
    if num_tokens > step_tokens << 20:
        raise SpecError(
            f"step_tokens: wanted at most 2^20 steps, got {num_tokens:,} tokens in {step_tokens:,}s"
        )
    settled = np.arange(0, num_tokens, step_tokens, dtype=np.int64)
    target = np.minimum(settled + step_tokens, num_tokens)
    lengths = lengths_after(groups, Lengths.exactly(settled), target, tail_only)
    return held_columns(groups, lengths).count


def needed_bytes(groups: Groups, tokens: IntArray) -> IntArray:
    """Bytes i64[G, R] of the entries that the query at the last of `tokens` i64[R] >= 1 reads.

    The query's own entry counts. No cache can hold less and still serve that query.
    """
    tokens = np.asarray(tokens, np.int64)
    return np.stack([group.bytes_per_entry * group.entries_read(tokens) for group in groups])


def block_bytes(groups: Groups) -> IntArray:
    """Bytes i64[G] of a block of each group."""
    return np.array([group.bytes_per_block for group in groups], np.int64)


def bytes_of(groups: Groups, blocks: Iterable[int]) -> int:
    """Bytes of so many blocks of each group, i64[G], without overflow."""
    return sum(int(n) * group.bytes_per_block for n, group in zip(blocks, groups, strict=True))


def requests_blocks(row: IntArray, peak: IntArray, requests: int) -> IntArray:
    """Blocks i64[G] for requests that come one after another.

    All but the last hold `row` i64[G] while the last, in its prefill, holds up to `peak` i64[G].
    """
    return (requests - 1) * row + np.maximum(row, peak)


def largest(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest n in 0..limit for which fits(n), which is true up to some n; 0 if it never is."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
