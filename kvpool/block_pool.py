"""BlockPool: which blocks are free, and how many holders each of the others has.

The pools of all groups lie side by side in the same arrays, so that one pass moves blocks of
every group and compile time does not grow with their number. Pool p owns the elements
`offsets[p] .. offsets[p] + sizes[p] - 1`; the block ids that everyone else sees start at 0 in each.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np

from kvpool import indices
from kvpool.indices import NULL_BLOCK
from kvpool.running import running_sum


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockPool:
    """Free stack and holder counts of P pools with N blocks in all."""

    free_ids: jax.Array  # i32[N], of pool p the first num_free[p] are its free stack
    num_free: jax.Array  # i32[P]
    holders: jax.Array  # i32[N], table columns and retains that name the block
    retained: jax.Array  # i32[N], the retains among them
    unwritten: jax.Array | None  # i32[N], tokens that a held block lacks at its start; None: 0
    sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def offsets(self) -> tuple[int, ...]:
        """First element of each pool in the arrays over N."""
        return tuple(sum(self.sizes[:pool]) for pool in range(len(self.sizes)))

    def place(self, pool: jax.Array, ids: jax.Array) -> jax.Array:
        """Index of block `ids` of `pool` in the arrays over N; N for an absent id."""
        valid = indices.is_valid(ids, indices.lookup(self.sizes, pool))
        return jnp.where(valid, indices.lookup(self.offsets, pool) + ids, sum(self.sizes))


def init(sizes: tuple[int, ...], may_lack: bool = False) -> BlockPool:
    """Pools of `sizes` blocks, all free; a pool hands out its ids from 0 upwards.

    Args:
      may_lack: a held block may lack tokens at its start, which rows would have to know.
    """
    free = np.concatenate([np.arange(size)[::-1] for size in sizes]).astype(np.int32)
    return BlockPool(
        free_ids=jnp.array(free),
        num_free=jnp.array(sizes, jnp.int32),
        holders=jnp.zeros(free.size, jnp.int32),
        retained=jnp.zeros(free.size, jnp.int32),
        unwritten=jnp.zeros(free.size, jnp.int32) if may_lack else None,
        sizes=tuple(sizes),
    )


def allocate(pool: BlockPool, which: jax.Array, wanted: jax.Array) -> tuple[BlockPool, jax.Array]:
    """Hands out a free block of pool which[k] for every k that is `wanted` bool[K].

    Returns:
      (pool, ids i32[K], NULL where not wanted).  The caller has made sure that there are enough.
    """
    chex.assert_equal_shape([which, wanted])
    if wanted.shape[0] == 0:
        return pool, jnp.zeros(0, jnp.int32)
    rank, counts = _ranks(pool, which, wanted)
    depth = indices.lookup(pool.num_free, which) - 1 - rank
    place = jnp.where(wanted & (depth >= 0), indices.lookup(pool.offsets, which) + depth, -1)
    ids = indices.take(pool.free_ids, place, NULL_BLOCK)
    pool = dataclasses.replace(set_lacking(pool, which, ids, 0), num_free=pool.num_free - counts)
    return hold(pool, which, ids), ids


def hold(pool: BlockPool, which: jax.Array, ids: jax.Array) -> BlockPool:
    """One more holder for each block named; absent ids are skipped."""
    return dataclasses.replace(pool, holders=indices.add(pool.holders, pool.place(which, ids), 1))


def retain(pool: BlockPool, which: jax.Array, ids: jax.Array) -> BlockPool:
    """One more holder for each block named, on record as a retain."""
    retained = indices.add(pool.retained, pool.place(which, ids), 1)
    return hold(dataclasses.replace(pool, retained=retained), which, ids)


def unhold(pool: BlockPool, which: jax.Array, ids: jax.Array) -> BlockPool:
    """One holder fewer for each block named, ids i32[K]; a block without holders becomes free."""
    chex.assert_equal_shape([which, ids])
    places = pool.place(which, ids)
    # The scatter's indices derive from what was read: otherwise XLA copies the whole array.
    before = indices.take(pool.holders, places, 0)
    places = jnp.where(before > 0, places, sum(pool.sizes))
    holders = indices.add(pool.holders, places, -1)
    # Only a block with several holders can be named twice here.
    freed = jax.lax.cond(
        jnp.any(before > 1), _freed_of_shared, lambda places, before: before == 1, places, before
    )
    rank, counts = _ranks(pool, which, freed)
    top = indices.lookup(jnp.asarray(pool.offsets, jnp.int32) + pool.num_free, which) + rank
    return dataclasses.replace(
        pool,
        free_ids=indices.put(pool.free_ids, top, ids, where=freed),
        num_free=pool.num_free + counts,
        holders=holders,
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


def _freed_of_shared(places: jax.Array, before: jax.Array) -> jax.Array:
    """bool[K]: the last naming of a block that is named as often as it had holders."""
    order = jnp.arange(places.shape[0])
    same = places[:, None] == places[None]
    last = ~jnp.any(same & (order[None] > order[:, None]), axis=1)
    return last & (before > 0) & (before == jnp.sum(same, axis=1, dtype=jnp.int32))


def _ranks(pool: BlockPool, which: jax.Array, chosen: jax.Array) -> tuple[jax.Array, jax.Array]:
    """How many of the same pool were chosen before each i32[K], and of each pool in all i32[P].

    The counts of several pools are fields of one word, so that one running sum serves them all.
    """
    bits = chosen.shape[0].bit_length()
    fields = 31 // bits  # of a word
    pools = np.arange(len(pool.sizes))
    word, shift = pools // fields, pools % fields * bits
    words = np.arange(word[-1] + 1)[:, None]
    ones = jnp.where(chosen, indices.lookup(1 << shift, which), 0)
    sums = running_sum(jnp.where(indices.lookup(word, which) == words, ones, 0))
    mine = indices.lookup(sums, indices.lookup(word, which))
    mask = (1 << bits) - 1
    rank = ((mine >> indices.lookup(shift, which)) & mask) - 1
    return rank, (sums[word, -1] >> shift.astype(np.int32)) & mask
