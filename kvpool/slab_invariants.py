"""What the slabs of a state must look like; a part of `check`, on the host."""

import numpy as np

from kvpool.bits import WIDTH
from kvpool.block_pool import BlockPool, held_in_slabs
from kvpool.slabs import Slabs


def check(pool: BlockPool, require) -> None:
    """Verifies every invariant of the slabs, given a pool of numpy arrays.

    Args:
      require: (bool[...], message of an index) raises where something does not hold.
    """
    if pool.slabs is None:
        return
    slabs, count = pool.slabs, pool.slabs.count
    _check_apart(pool, require)
    of_pools = enumerate(held_in_slabs(pool))
    held = {number: np.asarray(blocks) for number, blocks in of_pools if blocks is not None}
    owners = np.zeros(count, np.int32)
    for blocks in held.values():
        owners += blocks.any(axis=1)
    require(
        owners <= 1,
        lambda slab: f"slab {slab}: blocks of {owners[slab]} pools lie in it and have holders",
    )
    bits = np.zeros((count, slabs.used.shape[1] * WIDTH), np.bool_)
    for number, blocks in held.items():
        bits[:, : slabs.per_slab[number]] |= blocks
    words = np.asarray(slabs.used).astype("<u4").view(np.uint8)
    marked = np.unpackbits(words, axis=1, bitorder="little") == 1
    require(
        marked == bits,
        lambda slab, place: (
            f"slab {slab}: place {place} is marked {('unused', 'used')[int(marked[slab, place])]}, "
            f"but its block has {('no', 'a')[int(bits[slab, place])]} holder"
        ),
    )
    _check_stack(slabs, require, "the free stack", 0, slabs.num_free, owners == 0)
    for number, blocks in held.items():
        _check_pool(slabs, require, number, blocks)


def _check_apart(pool: BlockPool, require) -> None:
    """A pool has blocks in slabs or on a stack of its own, and counts none of the other kind."""
    assert pool.slabs is not None
    in_slabs = np.array(pool.per_slab) > 0
    require(
        ~in_slabs | (pool.num_free == 0),
        lambda number: (
            f"pool {number}: counts {pool.num_free[number]} blocks on a free stack, but has slabs"
        ),
    )
    for name in ("num_open", "spare"):
        counted = getattr(pool.slabs, name)
        require(
            in_slabs | (counted == 0),
            lambda number, name=name, counted=counted: (
                f"pool {number}: counts {counted[number]} as {name}, but has no slabs"
            ),
        )


def _check_pool(slabs: Slabs, require, number: int, held) -> None:
    each, start = slabs.per_slab[number], slabs.offsets[number]
    name, used = f"the open stack of pool {number}", held.sum(axis=1)
    _check_stack(slabs, require, name, start, slabs.num_open[number], (used > 0) & (used < each))
    stack = slabs.stacks[start : start + slabs.num_open[number]]
    require(
        slabs.height[stack] == np.arange(stack.shape[0]),
        lambda height: f"slab {stack[height]}: at {height} on its stack, but not by its own count",
    )
    unused = int(np.sum(each - used[used > 0]))
    require(
        [slabs.spare[number] == unused],
        lambda _: f"pool {number}: counts {slabs.spare[number]} unused blocks, but has {unused}",
    )


def _check_stack(slabs: Slabs, require, name: str, start: int, size, wanted) -> None:
    """The slabs on a stack are those that are `wanted` bool[S], each once."""
    require(
        [0 <= size <= slabs.count],
        lambda _: f"{name}: counts {size} slabs, but there are {slabs.count}",
    )
    stack = slabs.stacks[start : start + size]
    inside = (stack >= 0) & (stack < slabs.count)
    require(inside, lambda height: f"{name}: at {height} is slab {stack[height]} of {slabs.count}")
    times = np.bincount(stack, minlength=slabs.count)
    require(
        times == wanted,
        lambda slab: (
            f"slab {slab}: wanted {int(wanted[slab])} times on {name}, is there {times[slab]} times"
        ),
    )
