"""Pooling: which groups draw from the same memory, and in what sizes it is cut.

"independent" gives every group blocks of its own. "shared" lets groups whose blocks have nearly the
same bytes draw from one pool, and makes blocks of tokens longer where that brings them there.
"elastic" cuts one array into slabs, which whichever group needs one fills with its blocks.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence

from kvpool.group import Group
from kvpool.needs import Groups
from kvpool.regions import ALIGNMENT, positive
from kvpool.status import SpecError

INDEPENDENT, SHARED, ELASTIC = "independent", "shared", "elastic"
POOLINGS = (INDEPENDENT, SHARED, ELASTIC)

TOLERATED = 1 / 16  # of a row of a shared array may stay unused beside a block
MOST_TOKENS = 256  # of a block that is made longer: on average half of it is empty in every row
FINEST = 8  # tokens by which a block is made longer
MOST_IN_SLAB = 1024  # blocks; a slab has a bit for each
MOST_OF_LARGEST = 8  # slabs of more than so many of the largest block are not considered
CANDIDATES = 4096  # slab sizes considered for the sake of one block size
SCATTER_COST = 0.002  # of memory lost to half-used slabs for every doubling of blocks in a slab


def equal_sizes(groups: Groups, fixed: Collection[str]) -> dict[str, int]:
    """{group: tokens of a block} of all groups of tokens, so that blocks get nearly the same bytes.

    A block grows to the bytes of a larger one where no more than `TOLERATED` of those stay unused,
    but not beyond MOST_TOKENS or half a window. Groups in `fixed` keep their size.
    """
    sizes: dict[str, int] = {}
    larger: list[int] = []
    for group in sorted(groups, key=lambda group: -group.bytes_per_block):
        grown = None
        if not group.is_state and group.name not in fixed:
            grown = next(filter(None, (_grown(group, size) for size in larger)), None)
        if grown is None:
            larger += [group.bytes_per_block]
        if not group.is_state:
            sizes[group.name] = grown or group.block_size
    return sizes


def _grown(group: Group, size: int) -> int | None:
    """Tokens of the group's blocks that have `size` bytes or little less, None if none have."""
    most = max(group.block_size, MOST_TOKENS)
    if group.region.span:
        most = max(group.block_size, group.region.span // 2)
    step = group.block_size & -group.block_size
    while True:
        tokens = min(most, group.block_size * size // group.bytes_per_block) // step * step
        try:
            longer = group.region.block_tokens(max(tokens, group.block_size))
        except SpecError:  # this region cannot have such blocks
            longer = group.block_size
        block = dataclasses.replace(group, block_size=longer).bytes_per_block
        if size * (1 - TOLERATED) <= block <= size:
            return longer
        if step <= FINEST:
            return None
        step //= 2


def pools_of(groups: Groups, pooling: str, apart: Collection[str]) -> tuple[int, ...]:
    """The pool of each group, numbered in the order of the groups; those in `apart` share none."""
    tolerated = {INDEPENDENT: None, SHARED: TOLERATED, ELASTIC: 0.0}[pooling]
    homes: dict[str, tuple] = {}
    rows: list[int] = []
    for group in sorted(groups, key=lambda group: -group.bytes_per_block):
        size = group.bytes_per_block
        if tolerated is None or group.name in apart:
            homes[group.name] = ("alone", group.name)
            continue
        fitting = (row for row in rows if row * (1 - tolerated) <= size)
        row = next(fitting, None)
        if row is None:
            rows += [row := size]
        homes[group.name] = ("together", row)
    numbers: dict[tuple, int] = {}
    for group in groups:
        numbers.setdefault(homes[group.name], len(numbers))
    return tuple(numbers[homes[group.name]] for group in groups)


def blocks_in_slab(slab_bytes: int, block_bytes: int) -> int:
    """How many blocks a slab holds."""
    return min(MOST_IN_SLAB, slab_bytes // block_bytes)


def checked_slab(slab_bytes, groups: Groups) -> int:
    """A size of slabs that was asked for; SpecError where a block of some group has no place."""
    size, largest = positive("slab_bytes", slab_bytes), max(groups, key=_bytes)
    if size < largest.bytes_per_block:
        raise SpecError(
            f"slab_bytes: got {size:,}, but a block of {largest.name!r} is "
            f"{largest.bytes_per_block:,}; give that or more, or smaller blocks"
        )
    if size % ALIGNMENT:
        below = size // ALIGNMENT * ALIGNMENT
        raise SpecError(
            f"slab_bytes: wanted a multiple of {ALIGNMENT}, got {size:,}; the nearest are "
            f"{below:,} and {below + ALIGNMENT:,}"
        )
    return size


def _bytes(group: Group) -> int:
    return group.bytes_per_block


def slab_sizes(sizes: Collection[int]) -> list[int]:
    """The sizes of slabs that are considered for blocks of so many bytes, in ascending order."""
    largest = max(sizes)
    candidates = {largest}
    for size in sizes:
        first = -(-largest // size)
        stop = min(MOST_OF_LARGEST * largest // size + 1, first + CANDIDATES)
        candidates.update(size * count for count in range(first, stop))
    return sorted(candidates)


def slab_size(sizes: Sequence[int], shares: Mapping[int, float], budget: int) -> int:
    """Of `sizes` the one that is expected to waste least, in bytes.

    A large slab loses less at its end, where no further block fits. A small one loses less while it
    is half used: of every kind of block one slab is, and more the more blocks share a slab.

    Args:
      shares: {bytes of a block: share of the memory that such blocks are going to take}.
      budget: bytes of all slabs.
    """

    def cost(slab):
        counts = {size: blocks_in_slab(slab, size) for size in shares}
        ends = sum(share * (1 - counts[size] * size / slab) for size, share in shares.items())
        scatter = sum(share * math.log2(counts[size]) for size, share in shares.items())
        return ends + len(shares) * slab / (2 * budget) + SCATTER_COST * scatter

    return min(sizes, key=cost)


def slabs_for(blocks: Sequence[tuple[int, int]], slab: int) -> int:
    """Slabs of `slab` bytes that hold (bytes of a block, blocks) of each pool at the same time."""
    return sum(-(-count // blocks_in_slab(slab, size)) for size, count in blocks)
