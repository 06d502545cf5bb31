"""BlockPool: which blocks are free, and how many holders each of the others has.

The pools of all groups lie side by side in the same arrays, so that one pass moves blocks of
every group and compile time does not grow with their number. Pool p owns the elements
`offsets[p] .. offsets[p] + sizes[p] - 1`; the block ids that everyone else sees start at 0 in each pool.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvpool import indices
from kvpool.indices import NULL_BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockPool:
    """Free stack and holder counts of P pools with N blocks in all."""

    free_ids: jax.Array  # i32[N], of pool p the first num_free[p] are its free stack
    num_free: jax.Array  # i32[P]
    holders: jax.Array  # i32[N], table columns and retains that name the block
    retained: jax.Array  # i32[N], the retains among them
    sizes: tuple[int, ...] = dataclasses.field(metadata=dict(static=True))

    @property
    def offsets(self) -> np.ndarray:  # i32[P]
        return (np.cumsum(self.sizes) - self.sizes).astype(np.int32)

    def place(self, pool: jax.Array, ids: jax.Array, where=True) -> jax.Array:
        """Index of block `ids` of `pool` in holders and retained; N for an absent id."""
        valid = (ids >= 0) & (ids < jnp.asarray(self.sizes, jnp.int32)[pool]) & where
        return jnp.where(valid, jnp.asarray(self.offsets)[pool] + ids, sum(self.sizes))


def init(sizes: tuple[int, ...]) -> BlockPool:
    """Pools of `sizes` blocks, all free; a pool hands out its ids from 0 upwards."""
    free = np.concatenate([np.arange(size)[::-1] for size in sizes]).astype(np.int32)
    zeros = np.zeros_like(free)
    return BlockPool(
        free_ids=jnp.asarray(free),
        num_free=jnp.asarray(sizes, jnp.int32),
        holders=jnp.asarray(zeros),
        retained=jnp.asarray(zeros),
        sizes=tuple(sizes),
    )


def peek(pool: BlockPool, which: jax.Array, rank: jax.Array) -> jax.Array:
    """The free block that pool `which` hands out after `rank` others; NULL past the last one."""
    depth = pool.num_free[which] - 1 - rank
    place = jnp.where(depth >= 0, jnp.asarray(pool.offsets)[which] + depth, NULL_BLOCK)
    return indices.take(pool.free_ids, place, NULL_BLOCK)


def pop(pool: BlockPool, taken: jax.Array) -> BlockPool:
    """Takes the first `taken` i32[P] blocks off each free stack, after `hold` of what `peek` saw."""
    return dataclasses.replace(pool, num_free=pool.num_free - taken)


def take_one_each(pool: BlockPool, pool_of: tuple[int, ...], wanted: jax.Array):
    """Takes a free block for each group and row where `wanted` bool[G, R].

    Returns:
      (pool, ids i32[G, R], NULL where not wanted).  The caller has made sure that there are enough.
    """
    pools = np.asarray(pool_of, np.int32)
    by_pool = np.argsort(pools, kind="stable")
    flat = wanted[by_pool].astype(jnp.int32).reshape(-1)
    before = (jnp.cumsum(flat, dtype=jnp.int32) - flat).reshape(wanted.shape)
    first = np.searchsorted(pools[by_pool], pools[by_pool])  # place of the pool's first group
    rank = (before - before[first, :1])[np.argsort(by_pool)]
    which = jnp.broadcast_to(jnp.asarray(pools)[:, None], wanted.shape)
    ids = jnp.where(wanted, peek(pool, which, rank), NULL_BLOCK)
    counts = jnp.zeros(len(pool.sizes), jnp.int32).at[pools].add(jnp.sum(wanted, 1, jnp.int32))
    return pop(hold(pool, which, ids), counts), ids


def hold(pool: BlockPool, which: jax.Array, ids: jax.Array, where=True) -> BlockPool:
    """One more holder for each block named; absent ids are skipped."""
    places = pool.place(which, ids, where)
    return dataclasses.replace(pool, holders=indices.add(pool.holders, places, 1))


def unhold(pool: BlockPool, which: jax.Array, ids: jax.Array) -> BlockPool:
    """One holder fewer for each block named, K of them; without holders it becomes free.

    `which` i32[K] must not decrease.  Absent ids are skipped.
    """
    places = pool.place(which, ids)
    # The scatter's indices derive from what was read: otherwise XLA copies the whole array.
    before = indices.take(pool.holders, places, 0)
    places = jnp.where(before > 0, places, sum(pool.sizes))
    holders = indices.add(pool.holders, places, -1)
    # Only a block with several holders can be named twice here, and only its last naming frees it.
    last = jax.lax.cond(
        jnp.any(before > 1), _last_naming, lambda places: jnp.ones(places.shape, bool), places
    )
    freed = (before > 0) & last & (indices.take(holders, places, 1) == 0)
    return _push(dataclasses.replace(pool, holders=holders), which, ids, freed)


def retain(pool: BlockPool, which: jax.Array, ids: jax.Array, where=True) -> BlockPool:
    """One more holder for each block named, on record as a retain."""
    places = pool.place(which, ids, where)
    pool = dataclasses.replace(pool, retained=indices.add(pool.retained, places, 1))
    return hold(pool, which, ids, where)


def _last_naming(places: jax.Array) -> jax.Array:
    order = jnp.arange(places.shape[0])
    return ~jnp.any((places[:, None] == places[None]) & (order[None] > order[:, None]), axis=1)


def _push(pool: BlockPool, which: jax.Array, ids: jax.Array, freed: jax.Array) -> BlockPool:
    pools = jnp.arange(len(pool.sizes), dtype=jnp.int32)
    counts = jnp.sum(freed & (which == pools[:, None]), axis=1, dtype=jnp.int32)
    bottom = jnp.asarray(pool.offsets) + pool.num_free - (jnp.cumsum(counts) - counts)
    place = jnp.cumsum(freed, dtype=jnp.int32) - 1 + bottom[which]
    return dataclasses.replace(
        pool,
        free_ids=indices.put(pool.free_ids, place, ids, where=freed),
        num_free=pool.num_free + counts,
    )
