"""BlockPool: which blocks are free, and how many holders each of the others has.

The pools of all groups lie side by side in the same arrays, so that one pass moves blocks of
every group and compile time does not grow with their number. Pool p owns the elements
`offsets[p] .. offsets[p] + sizes[p] - 1`; the block ids that everyone else sees start at 0 in each.
A pool takes free blocks from a stack of its own, or from slabs that it shares with other pools.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np

from kvpool import indices
from kvpool import slabs as slab_stacks
from kvpool.indices import NULL_BLOCK
from kvpool.running import ranks
from kvpool.slabs import Slabs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockPool:
    """Free blocks and holder counts of P pools with N blocks in all, M of them on free stacks."""

    free_ids: jax.Array  # i32[M], of pool p the first num_free[p] are its free stack
    num_free: jax.Array  # i32[P], 0 of a pool that draws from slabs
    holders: jax.Array  # i32[N], table columns and retains that name the block
    retained: jax.Array  # i32[N], the retains among them
    unwritten: jax.Array | None  # i32[N], tokens that a held block lacks at its start; None: 0
    num_cached: jax.Array  # i32[P], blocks that only retains hold
    slabs: Slabs | None
    sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def offsets(self) -> tuple[int, ...]:
        """First element of each pool in the arrays over N."""
        return _offsets(self.sizes)

    @property
    def per_slab(self) -> tuple[int, ...]:
        """Blocks of each pool in a slab, 0 where it has a free stack."""
        return (0,) * len(self.sizes) if self.slabs is None else self.slabs.per_slab

    @property
    def stack_sizes(self) -> tuple[int, ...]:
        """Elements of each pool in free_ids."""
        return tuple(
            0 if each else size for size, each in zip(self.sizes, self.per_slab, strict=True)
        )

    def place(self, pool: jax.Array, ids: jax.Array) -> jax.Array:
        """Index of block `ids` of `pool` in the arrays over N; N for an absent id."""
        valid = indices.is_valid(ids, indices.lookup(self.sizes, pool))
        return jnp.where(valid, indices.lookup(self.offsets, pool) + ids, sum(self.sizes))


def _offsets(sizes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sum(sizes[:pool]) for pool in range(len(sizes)))


def init(
    sizes: tuple[int, ...],
    slabs: int = 0,
    per_slab: tuple[int, ...] = (),
    may_lack: bool = False,
) -> BlockPool:
    """Pools of `sizes` blocks, all free; a pool hands out its ids from 0 upwards.

    Args:
      slabs: how many there are for the pools that have `per_slab` blocks in each, 0 for the others.
      may_lack: a held block may lack tokens at its start, which rows would have to know.
    """
    per_slab = per_slab or (0,) * len(sizes)
    stacks = [0 if each else size for size, each in zip(sizes, per_slab, strict=True)]
    free = np.concatenate([np.arange(size)[::-1] for size in stacks]).astype(np.int32)
    return BlockPool(
        free_ids=jnp.array(free),
        num_free=jnp.array(stacks, jnp.int32),
        holders=jnp.zeros(sum(sizes), jnp.int32),
        retained=jnp.zeros(sum(sizes), jnp.int32),
        unwritten=jnp.zeros(sum(sizes), jnp.int32) if may_lack else None,
        num_cached=jnp.zeros(len(sizes), jnp.int32),
        slabs=slab_stacks.init(slabs, per_slab) if any(per_slab) else None,
        sizes=tuple(sizes),
    )


def free(pool: BlockPool) -> jax.Array:
    """Blocks i32[P] that each pool can hand out if no other one takes any."""
    if pool.slabs is None:
        return pool.num_free
    return pool.num_free + slab_stacks.obtainable(pool.slabs, pool.slabs.num_free)


def fit(pool: BlockPool, asked: jax.Array, keep: jax.Array | None = None) -> jax.Array:
    """Whether all pools can hand out `asked` i32[P, ...] blocks together, bool[...].

    Args:
      keep: i32[P], blocks that each must be able to hand out after that.
    """
    per_pool = (-1, *(1,) * (asked.ndim - 1))
    keep = jnp.zeros_like(pool.num_free) if keep is None else keep
    own = np.array([each == 0 for each in pool.per_slab]).reshape(per_pool)
    fits = jnp.all(~own | (asked <= (pool.num_free - keep).reshape(per_pool)), axis=0)
    if pool.slabs is None:
        return fits
    keep = jnp.minimum(keep, 2**30)  # more than any pool has, and no overflow
    needed = slab_stacks.needed(pool.slabs, asked + keep.reshape(per_pool))
    needed = jnp.minimum(needed, pool.slabs.count + 1)  # nor in the sum
    return fits & (jnp.sum(needed, axis=0, dtype=jnp.int32) <= pool.slabs.num_free)


def shortfall(pool: BlockPool, asked: jax.Array) -> jax.Array:
    """Blocks i32[P] of those `asked` i32[P] that a pool lacks, the others served first."""
    have = pool.num_free
    if pool.slabs is not None:
        needed = slab_stacks.needed(pool.slabs, asked)
        others = jnp.sum(needed, dtype=jnp.int32) - needed
        left = jnp.maximum(pool.slabs.num_free - others, 0)
        have = have + slab_stacks.obtainable(pool.slabs, left)
    return jnp.maximum(asked - have, 0)


def held_in_slabs(pool: BlockPool) -> list[jax.Array | None]:
    """For each pool bool[S, per_slab], which blocks of its slabs are held; None: it has a stack."""
    of_pools: list[jax.Array | None] = []
    for start, size, each in zip(pool.offsets, pool.sizes, pool.per_slab, strict=True):
        held = pool.holders[start : start + size].reshape(-1, each) > 0 if each else None
        of_pools.append(held)
    return of_pools


def allocate(pool: BlockPool, which: jax.Array, wanted: jax.Array) -> tuple[BlockPool, jax.Array]:
    """Hands out a free block of pool which[k] for every k that is `wanted` bool[K].

    Returns:
      (pool, ids i32[K], NULL where not wanted).  The caller has made sure that there are enough.
    """
    chex.assert_equal_shape([which, wanted])
    ids = jnp.full(wanted.shape, NULL_BLOCK, jnp.int32)
    if wanted.shape[0] == 0:
        return pool, ids
    in_slab = indices.lookup(pool.per_slab, which) > 0
    if pool.slabs is not None:
        slabs, ids = slab_stacks.take(pool.slabs, which, wanted & in_slab)
        pool = dataclasses.replace(pool, slabs=slabs)
    if pool.free_ids.shape[0] > 0:
        rank, counts = ranks(which, wanted & ~in_slab, len(pool.sizes))
        depth = indices.lookup(pool.num_free, which) - 1 - rank
        popped = wanted & ~in_slab & (depth >= 0)
        place = indices.lookup(_offsets(pool.stack_sizes), which) + depth
        ids = jnp.where(
            in_slab, ids, indices.take(pool.free_ids, jnp.where(popped, place, -1), NULL_BLOCK)
        )
        pool = dataclasses.replace(pool, num_free=pool.num_free - counts)
    return _add_holders(set_lacking(pool, which, ids, 0), which, ids), ids


def _add_holders(pool: BlockPool, which: jax.Array, ids: jax.Array) -> BlockPool:
    return dataclasses.replace(pool, holders=indices.add(pool.holders, pool.place(which, ids), 1))


def hold(pool: BlockPool, which: jax.Array, ids: jax.Array) -> BlockPool:
    """One more holder, a table's, for each block named; absent ids are skipped."""
    places = pool.place(which, ids)
    before = indices.take(pool.holders, places, 0)
    cached = (before > 0) & (before == indices.take(pool.retained, places, 0))
    first = jax.lax.cond(jnp.any(cached), _first_of_each, lambda _, cached: cached, places, cached)
    pool = dataclasses.replace(pool, num_cached=pool.num_cached - _count(pool, which, first))
    # The scatter's indices derive from what was read: otherwise XLA copies the whole array.
    return _add_holders(pool, which, jnp.where(before >= 0, ids, NULL_BLOCK))


def retain(pool: BlockPool, which: jax.Array, ids: jax.Array) -> BlockPool:
    """One more holder for each held block named, on record as a retain."""
    retained = indices.add(pool.retained, pool.place(which, ids), 1)
    return _add_holders(dataclasses.replace(pool, retained=retained), which, ids)


def keep(pool: BlockPool, which: jax.Array, ids: jax.Array) -> BlockPool:
    """Makes the one holder of each fresh block named, none twice, a retain."""
    retained = indices.add(pool.retained, pool.place(which, ids), 1)
    added = _count(pool, which, ids != NULL_BLOCK)
    return dataclasses.replace(pool, retained=retained, num_cached=pool.num_cached + added)


def unretain(pool: BlockPool, which: jax.Array, ids: jax.Array, first: jax.Array):
    """Takes a retain of each retained block named, ids i32[K], off the record.

    Args:
      first: bool[K], no earlier k names the same block.

    Returns:
      (pool, ids i32[K] to give to `unhold`).
    """
    places = pool.place(which, ids)
    retained, holders = (indices.take(kept, places, 0) for kept in (pool.retained, pool.holders))
    cached = first & (retained > 0) & (retained == holders)
    pool = dataclasses.replace(
        pool,
        retained=indices.add(pool.retained, jnp.where(retained > 0, places, sum(pool.sizes)), -1),
        num_cached=pool.num_cached - _count(pool, which, cached),
    )
    # Indices that derive from the holders read: otherwise XLA copies the array.
    return pool, jnp.where(holders > 0, ids, NULL_BLOCK)


def unhold(pool: BlockPool, which: jax.Array, ids: jax.Array) -> BlockPool:
    """One holder fewer for each block named, ids i32[K]; a block without holders becomes free."""
    chex.assert_equal_shape([which, ids])
    places = pool.place(which, ids)
    # The scatter's indices derive from what was read: otherwise XLA copies the whole array.
    before = indices.take(pool.holders, places, 0)
    places = jnp.where(before > 0, places, sum(pool.sizes))
    holders = indices.add(pool.holders, places, -1)
    # Only a block with several holders can be named twice here, or be left to retains.
    freed, cached = jax.lax.cond(
        jnp.any(before > 1),
        lambda: _freed_of_shared(pool, which, places, before),
        lambda: (before == 1, _count(pool, which, jnp.zeros_like(before, bool))),
    )
    pool = dataclasses.replace(pool, holders=holders, num_cached=pool.num_cached + cached)
    in_slab = indices.lookup(pool.per_slab, which) > 0
    if pool.slabs is not None:
        slabs = slab_stacks.give(pool.slabs, which, ids, freed & in_slab)
        pool = dataclasses.replace(pool, slabs=slabs)
    if pool.free_ids.shape[0] == 0:
        return pool
    rank, counts = ranks(which, freed & ~in_slab, len(pool.sizes))
    bottoms = jnp.asarray(_offsets(pool.stack_sizes), jnp.int32)
    top = indices.lookup(bottoms + pool.num_free, which) + rank
    return dataclasses.replace(
        pool,
        free_ids=indices.put(pool.free_ids, top, ids, where=freed & ~in_slab),
        num_free=pool.num_free + counts,
    )


def lacking(pool: BlockPool, which: jax.Array, ids: jax.Array) -> jax.Array:
    """Tokens at its start that each block named lacks; 0 for an absent id."""
    if pool.unwritten is None:
        return jnp.zeros_like(ids)
    return indices.take(pool.unwritten, pool.place(which, ids), 0)


def set_lacking(pool: BlockPool, which: jax.Array, ids: jax.Array, tokens) -> BlockPool:
    """Each block named lacks so many tokens at its start; absent ids are skipped."""
    if pool.unwritten is None:
        return pool
    unwritten = indices.put(pool.unwritten, pool.place(which, ids), tokens)
    return dataclasses.replace(pool, unwritten=unwritten)


def go_on(pool: BlockPool, pool_of, ids: jax.Array, original: jax.Array, before) -> BlockPool:
    """Rows go on in blocks `ids`, which had `before` tokens from `original` or have none of them.

    Args:
      pool_of: the pool of each of G groups.
      ids: i32[G, R]; absent ids are skipped.
      original: i32[G, R], the block itself or the one that it is to be a copy of; absent: none.
      before: i32[G, R].
    """
    which = jnp.asarray(pool_of, jnp.int32)[:, None]
    lacks = jnp.minimum(lacking(pool, which, original), before)
    return set_lacking(pool, which, ids, jnp.where(original == NULL_BLOCK, before, lacks))


def _freed_of_shared(pool: BlockPool, which: jax.Array, places: jax.Array, before: jax.Array):
    """The last naming of each block that loses all its holders, bool[K].

    Returns:
      That, and how many blocks of each pool lose all but retains, i32[P].
    """
    order = jnp.arange(places.shape[0])
    same = places[:, None] == places[None]
    last = ~jnp.any(same & (order[None] > order[:, None]), axis=1) & (before > 0)
    after = before - jnp.sum(same, axis=1, dtype=jnp.int32)
    cached = last & (after > 0) & (after == indices.take(pool.retained, places, 0))
    return last & (after == 0), _count(pool, which, cached)


def _first_of_each(places: jax.Array, chosen: jax.Array) -> jax.Array:
    """bool[K]: `chosen`, and no earlier k names the same place."""
    order = jnp.arange(places.shape[0])
    earlier = (places[:, None] == places[None]) & (order[None] < order[:, None])
    return chosen & ~jnp.any(earlier, axis=1)


def _count(pool: BlockPool, which: jax.Array, chosen: jax.Array) -> jax.Array:
    """How many of each pool are chosen, i32[P]."""
    pools = jnp.arange(len(pool.sizes), dtype=jnp.int32)[:, None]
    return jnp.sum(chosen & (which == pools), axis=1, dtype=jnp.int32)
