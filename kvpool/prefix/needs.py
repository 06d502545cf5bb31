"""Needs: how many blocks of each pool are to be free, and what else is given as a number."""

from collections.abc import Iterator, Mapping

import numpy as np

from kvpool.plan import Plan


def wanted(plan: Plan, free: list[int], need: Mapping, short: Mapping) -> list[int]:
    """Blocks of each pool that are to be free.

    Args:
      free: those of each pool that are.
      need: {group: blocks}; groups of one pool need them all.
      short: {group: blocks that are missing}, each group of a pool saying the same of it.

    Raises:
      SpecError: for an unknown group.
      ValueError: for counts that are none.
    """
    blocks = [0] * len(free)
    for pool, count in _counts(plan, "need", need):
        blocks[pool] += count
    for pool, count in _counts(plan, "short", short):
        if count:
            blocks[pool] = max(blocks[pool], free[pool] + count)
    return blocks


def whole_number(name: str, value, least: int, most: int | None = None) -> int:
    """The value, where it is an integer from `least` to `most`.

    Raises:
      ValueError: naming it, and what was wanted.
    """
    if np.ndim(value) or np.asarray(value).dtype.kind not in "iu":
        raise ValueError(f"{name}: wanted an integer, got {value!r}")
    if value < least or (most is not None and value > most):
        wanted = f"at least {least}" if most is None else f"{least} to {most}"
        raise ValueError(f"{name}: wanted {wanted}, got {value}")
    return int(value)


def _counts(plan: Plan, name: str, counts: Mapping) -> Iterator[tuple[int, int]]:
    """(pool, blocks) of each group named."""
    if not isinstance(counts, Mapping):
        raise ValueError(f"{name}: wanted {{group: blocks}}, got {type(counts).__name__}")
    for group, blocks in counts.items():
        pool = plan.pool_of[plan.spec.group_index(group)]
        if np.ndim(blocks) or np.asarray(blocks).dtype.kind not in "iu":
            raise ValueError(f"{name}[{group!r}]: wanted a number of blocks, got {blocks!r}")
        yield pool, max(0, int(blocks))
