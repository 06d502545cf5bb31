"""Slabs: pieces of one array that pools take whole, fill with their blocks, and give back empty.

A block is the `place`-th of its slab, its id = slab * per_slab + place. The slabs of a pool that
have both used and unused places stand on its open stack, and its next block comes from the top one.
A slab that had been full goes on top, so that the others get a chance to empty; a new one is taken
only when none is open. Which places are used is a bit each: any number of blocks of one slab can
come and go in a pass, since bits add up in whatever order.
"""

import dataclasses
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvpool import bits, indices
from kvpool.indices import NULL_BLOCK
from kvpool.running import ranks, running_sum, stored, tally


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slabs:
    """S slabs, and what each of P pools has of them."""

    stacks: jax.Array  # i32[(1 + E) * S], that of the free slabs, then E pools' of open ones
    num_free: jax.Array  # i32[], slabs on the stack of free ones
    num_open: jax.Array  # i32[P], slabs on the open stack of each pool
    used: jax.Array  # u32[S, W], of a block handed out bit place % 32 of word place // 32
    height: jax.Array  # i32[S], of an open slab its place in that stack
    spare: jax.Array  # i32[P], unused blocks in the slabs of the pool
    per_slab: tuple[int, ...] = dataclasses.field(metadata={"static": True})  # 0: none of its own

    @property
    def offsets(self) -> tuple[int, ...]:
        """First element of each pool's open stack in `stacks`."""
        return tuple((np.cumsum([each > 0 for each in self.per_slab]) * self.count).tolist())

    @property
    def count(self) -> int:
        """S."""
        return self.used.shape[0]


def init(count: int, per_slab: tuple[int, ...]) -> Slabs:
    """`count` free slabs, handed out from 0 upwards, for pools of `per_slab` blocks in each."""
    pools, words = len(per_slab), -(-max(per_slab) // bits.WIDTH)
    sharing = sum(each > 0 for each in per_slab)
    free = np.pad(np.arange(count)[::-1], (0, sharing * count), constant_values=NULL_BLOCK)
    return Slabs(
        stacks=jnp.asarray(free, jnp.int32),
        num_free=jnp.array(count, jnp.int32),
        num_open=jnp.zeros(pools, jnp.int32),
        used=jnp.zeros((count, words), jnp.uint32),
        height=jnp.full(count, NULL_BLOCK, jnp.int32),
        spare=jnp.zeros(pools, jnp.int32),
        per_slab=tuple(per_slab),
    )


def needed(slabs: Slabs, blocks: jax.Array) -> jax.Array:
    """New slabs i32[P, ...] that each pool must take to hand out `blocks` i32[P, ...]."""
    spare = slabs.spare.reshape(-1, *(1,) * (blocks.ndim - 1))
    return slabs_for(slabs.per_slab, jnp.maximum(blocks - spare, 0))


def slabs_for(per_slab: tuple[int, ...], blocks: jax.Array) -> jax.Array:
    """Slabs i32[P, ...] that `blocks` i32[P, ...] of each pool fill, without overflow."""
    counts = []
    for of_pool, each in zip(blocks, per_slab, strict=True):
        whole = lax.div(of_pool, np.int32(max(each, 1)))
        counts.append((whole + (whole * each < of_pool)) if each else of_pool * 0)
    return jnp.stack(counts)


def obtainable(slabs: Slabs, count: jax.Array) -> jax.Array:
    """Blocks i32[P] that each pool can hand out if it gets `count` i32[] or i32[P] new slabs."""
    return slabs.spare + count * jnp.asarray(slabs.per_slab, jnp.int32)


def take(slabs: Slabs, which: jax.Array, wanted: jax.Array) -> tuple[Slabs, jax.Array]:
    """A block of pool which[k] for every k that is `wanted` bool[K].

    Returns:
      (slabs, ids i32[K], NULL where not wanted).  The caller has made sure that there are enough.
    """
    chex.assert_equal_shape([which, wanted])
    rank, counts = ranks(which, wanted, len(slabs.per_slab))
    opened = jnp.minimum(counts, slabs.spare)  # blocks that come from open slabs
    taken = needed(slabs, counts)
    left = slabs.spare + taken * jnp.asarray(slabs.per_slab, jnp.int32) - counts
    before = _before(taken)
    beyond = rank - indices.lookup(opened, which)
    number, place_in_new = _divide(slabs.per_slab, which, beyond)
    is_new = wanted & (beyond >= 0)
    new = slabs.num_free - 1 - indices.lookup(before, which) - number
    # What is left of the last new slab is open: no other slab of its pool is.
    last = slabs.num_free - jnp.stack(before) - taken
    pool = _pool_of_each(counts, which.shape[0])
    places = [
        _looked_at(slabs, pool, counts, opened),
        jnp.where(is_new, new, NULL_BLOCK),
        jnp.where((taken > 0) & (left > 0), last, NULL_BLOCK),
    ]
    read = indices.take(slabs.stacks, jnp.concatenate(places), NULL_BLOCK)
    candidate, new, last = jnp.split(read, [which.shape[0], 2 * which.shape[0]])
    old, place, consumed = _deal(slabs, which, rank, counts, opened, pool, candidate)
    slab = jnp.where(is_new, new, jnp.where(wanted, old, NULL_BLOCK))
    ids = slab * indices.lookup(slabs.per_slab, which) + jnp.where(is_new, place_in_new, place)
    ids = stored(jnp.where(slab == NULL_BLOCK, NULL_BLOCK, ids))
    slab, place = _divide(slabs.per_slab, which, ids)
    slab = jnp.where(ids == NULL_BLOCK, NULL_BLOCK, slab)
    bottoms = jnp.where(last >= 0, jnp.asarray(slabs.offsets, jnp.int32), NULL_BLOCK)
    slabs = dataclasses.replace(
        slabs,
        stacks=indices.put(slabs.stacks, bottoms, last),
        num_free=slabs.num_free - jnp.sum(taken, dtype=jnp.int32),
        num_open=slabs.num_open - consumed + (last >= 0),
        used=bits.add(slabs.used, slab, place, 1),
        height=indices.put(slabs.height, last, 0),
        spare=left,
    )
    return slabs, ids


def _pool_of_each(counts: jax.Array, width: int) -> jax.Array:
    """The pool of each of the blocks, i32[K], numbered one pool after the other."""
    number = jnp.arange(width, dtype=jnp.int32)
    pool = jnp.zeros_like(number)
    for start in _before(counts)[1:]:
        pool += number >= start
    return pool


def _looked_at(slabs: Slabs, pool, counts, opened) -> jax.Array:
    """Elements of `stacks` i32[K] with the open slabs that may serve, NULL where there is none.

    Of each pool as many as it needs blocks, since each has at least one, from the top of the stack;
    they are numbered like the blocks.
    """
    nth = jnp.arange(pool.shape[0], dtype=jnp.int32) - indices.lookup(_before(counts), pool)
    height = indices.lookup(slabs.num_open, pool) - 1 - nth
    looked = (nth < indices.lookup(opened, pool)) & (height >= 0)
    return jnp.where(looked, indices.lookup(slabs.offsets, pool) + height, NULL_BLOCK)


def _deal(slabs: Slabs, which, rank, counts, opened, pool, candidate):
    """Deals the blocks that come from open slabs out to the `candidate` slabs, in their order.

    Returns:
      (slab of each k i32[K], place in it i32[K], slabs that are used up i32[P]).
    """
    pools = jnp.arange(counts.shape[0], dtype=jnp.int32)[:, None]
    starts = _before(counts)
    used = indices.take(slabs.used, candidate, 0)
    room = indices.lookup(slabs.per_slab, pool) - bits.count(used)
    room = stored(jnp.where(candidate == NULL_BLOCK, 0, room))
    before = running_sum(room) - room
    before -= indices.lookup([indices.take(before, start, 0) for start in starts], pool)
    before = stored(before)
    serves = (room > 0) & (before < indices.lookup(opened, pool))
    used_up = serves & (before + room <= indices.lookup(opened, pool))
    consumed = jnp.sum(used_up & (pool == pools), axis=1, dtype=jnp.int32)
    first = jnp.where(serves, indices.lookup(starts, pool) + before, NULL_BLOCK)
    begun = running_sum(indices.add(jnp.zeros_like(room), first, 1))
    earlier = indices.lookup([indices.take(begun, start - 1, 0) for start in starts], which)
    mine = indices.lookup(starts, which)
    nth = indices.take(begun, mine + rank, 0) - earlier - 1
    from_open = rank < indices.lookup(opened, which)
    chosen = stored(jnp.where(from_open, mine + nth, NULL_BLOCK))
    depth = rank - indices.take(before, chosen, 0)
    place = bits.nth_unset(indices.take(used, chosen, 0), depth)
    return indices.take(candidate, chosen, NULL_BLOCK), place, consumed


def give(slabs: Slabs, which: jax.Array, ids: jax.Array, freed: jax.Array) -> Slabs:
    """Takes back blocks ids[k] of pool which[k], each once, where `freed` bool[K]."""
    chex.assert_equal_shape([which, ids, freed])
    pools = jnp.arange(len(slabs.per_slab), dtype=jnp.int32)[:, None]
    slab, place = _divide(slabs.per_slab, which, ids)
    slab, place = stored(jnp.where(freed, slab, NULL_BLOCK)), stored(place)
    before = indices.take(slabs.used, slab, 0)
    # Only where a block was: the scatter must derive from what was read, or XLA copies.
    used = bits.add(slabs.used, jnp.where(bits.count(before) > 0, slab, NULL_BLOCK), place, -1)
    after = indices.take(used, slab, 0)
    speaks = freed & bits.is_lowest(before ^ after, place)  # one for each slab
    emptied = speaks & (bits.count(after) == 0)
    was_full = bits.count(before) == indices.lookup(slabs.per_slab, which)
    closed, opened = emptied & ~was_full, speaks & ~emptied & was_full
    kinds = stored(jnp.where(closed, 3, jnp.where(emptied, 1, jnp.where(opened, 4, 0))))
    emptied, closed, opened = (kinds & 1) > 0, (kinds & 2) > 0, (kinds & 4) > 0
    (below, closed_rank, opened_rank), counts = tally(
        which, [emptied, closed, opened], len(slabs.per_slab)
    )
    lost = counts[0]
    below += indices.lookup(_before(lost), which) + slabs.num_free
    freed_to = jnp.where(emptied, below, NULL_BLOCK)
    given = jnp.sum(freed & (which == pools), axis=1, dtype=jnp.int32)
    slabs = dataclasses.replace(
        slabs,
        num_free=slabs.num_free + jnp.sum(lost, dtype=jnp.int32),
        used=used,
        num_open=slabs.num_open - counts[1],
        spare=slabs.spare + given - lost * jnp.asarray(slabs.per_slab, jnp.int32),
    )
    slabs = _restack(slabs, which, slab, freed_to, closed, closed_rank, opened, opened_rank)
    return dataclasses.replace(slabs, num_open=slabs.num_open + counts[2])


def _restack(
    slabs: Slabs, which, slab, freed_to, closed, closed_rank, opened, opened_rank
) -> Slabs:
    """Puts empty slabs where `freed_to` says, and `opened` ones on top of the open stacks.

    The `closed` ones leave before that, and `num_open` does not count either. Of a stack that loses
    n, the slabs among its top n that stay move down into the gaps.
    """
    stop, offset = (indices.lookup(of, which) for of in (slabs.num_open, slabs.offsets))
    top = jnp.where(closed, offset + stop + closed_rank, NULL_BLOCK)
    above = indices.take(slabs.stacks, top, NULL_BLOCK)
    height = indices.take(slabs.height, slab, NULL_BLOCK)
    stays = closed & (bits.count(indices.take(slabs.used, above, 0)) > 0)
    gap = closed & (height < stop)
    (gap_rank, stay_rank), counts = tally(which, [gap, stays], len(slabs.per_slab))
    before = indices.lookup(_before(counts[0]), which)
    gaps = indices.put(jnp.zeros_like(slab), before + gap_rank, height, where=gap)
    down = indices.take(gaps, before + stay_rank, NULL_BLOCK)
    # Both scatters' indices derive from what was read: otherwise XLA copies the arrays.
    opened &= height >= NULL_BLOCK
    moved = opened | stays
    height = stored(jnp.where(moved, jnp.where(opened, stop + opened_rank, down), NULL_BLOCK))
    placed = stored(jnp.where(moved, jnp.where(opened, slab, above), NULL_BLOCK))
    to = jnp.concatenate([freed_to, jnp.where(moved, offset + height, NULL_BLOCK)])
    return dataclasses.replace(
        slabs,
        stacks=indices.put(slabs.stacks, to, jnp.concatenate([slab, placed])),
        height=indices.put(slabs.height, placed, height),
    )


def rebuilt(slabs: Slabs, held: Sequence[jax.Array | None]) -> Slabs:
    """The slabs whose used places are those `held`, bool[S, per_slab] of each pool that has slabs.

    Of open slabs the fullest stand on top. Looks at all blocks.
    """
    count, words = slabs.used.shape
    used = jnp.zeros_like(slabs.used)
    height = jnp.full(count, NULL_BLOCK, jnp.int32)
    stacks, num_open, spare = [], [], []
    for each, of_pool in zip(slabs.per_slab, held, strict=True):
        blocks = jnp.zeros(count, jnp.int32)
        if of_pool is not None:
            used |= bits.packed(of_pool, words)
            blocks = jnp.sum(of_pool, axis=1, dtype=jnp.int32)
        is_open = (blocks > 0) & (blocks < each)
        stack = jnp.argsort(jnp.where(is_open, blocks, each)).astype(jnp.int32)
        num_open.append(jnp.sum(is_open, dtype=jnp.int32))
        spare.append(jnp.sum(jnp.where(is_open, each - blocks, 0), dtype=jnp.int32))
        if of_pool is not None:
            stacks.append(stack)
            of_stack = jnp.where(jnp.arange(count) < num_open[-1], stack, NULL_BLOCK)
            height = indices.put(height, of_stack, jnp.arange(count, dtype=jnp.int32))
    is_free = bits.count(used) == 0
    free = jnp.argsort(jnp.where(is_free, -jnp.arange(count), 1)).astype(jnp.int32)
    return dataclasses.replace(
        slabs,
        stacks=jnp.concatenate([free, *stacks]),
        num_free=jnp.sum(is_free, dtype=jnp.int32),
        num_open=jnp.stack(num_open),
        used=used,
        height=height,
        spare=jnp.stack(spare),
    )


def _before(counts: jax.Array) -> list[jax.Array]:
    """Of each of a few counts [P] the sum of those before it."""
    sums = [jnp.int32(0)]
    for pool in range(counts.shape[0] - 1):
        sums.append(sums[-1] + counts[pool])
    return sums


def _divide(per_slab: tuple[int, ...], which: jax.Array, ids: jax.Array):
    """(slab, place) i32[K] of blocks `ids` of pool which[k]; by constants, which is cheap."""
    ids = jnp.maximum(ids, 0)
    slab = place = jnp.zeros_like(ids)
    for pool, each in enumerate(per_slab):
        if each:
            whole = lax.div(ids, np.int32(each))
            slab = jnp.where(which == pool, whole, slab)
            place = jnp.where(which == pool, ids - whole * each, place)
    return slab, place
