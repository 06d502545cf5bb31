"""Passes of a fixed width over the blocks that move: the loop under every verb.

A verb says for each group and row how many blocks move. `for_each_block` numbers those moves and
hands them to the verb's body, `WIDTH` at a time, so that the cost follows the blocks that move and
the compiled code is one body whatever the number of groups.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvpool import indices

WIDTH = 256  # moves of one pass; a pass costs about the same from 1 to 256
BUCKET = 8  # rows counted together: prefix sums run over buckets, a search over the rows of one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moves:
    """One pass, K = WIDTH moves; those past the end are not `valid`.  Pools never decrease."""

    group: jax.Array  # i32[K]
    row: jax.Array  # i32[K], index along the R of the counts
    place: jax.Array  # i32[K], 0..count-1: which of the row's blocks
    pool: jax.Array  # i32[K]
    rank: jax.Array  # i32[K], which move of its pool
    valid: jax.Array  # bool[K]

    def pick(self, values: jax.Array) -> jax.Array:
        """values[group, row] of each move, from [G, R]."""
        return indices.take(values.reshape(-1), self.group * values.shape[1] + self.row, 0)


def for_each_block(counts: jax.Array, pool_of: tuple[int, ...], body, carry):
    """Runs carry = body(carry, moves) over all moves, those of one pool together.

    Args:
      counts: i32[G, R], blocks that move for each group and row, at least 0.
      pool_of: pool of each group.
      body: (carry, Moves) -> carry.
      carry: any pytree.
    """
    by_pool = np.argsort(pool_of, kind="stable").astype(np.int32)
    ordered = counts if (by_pool == np.arange(len(by_pool))).all() else counts[by_pool]
    ordered = jnp.pad(ordered, ((0, 0), (0, -counts.shape[1] % BUCKET)))
    buckets_per_group = ordered.shape[1] // BUCKET
    buckets = ordered.reshape(-1, BUCKET)
    totals = jnp.sum(buckets, axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(totals, dtype=jnp.int32)
    starts = ends - totals
    pools = np.asarray(pool_of, np.int32)
    first_group = np.unique(pools[by_pool], return_index=True)[1]
    pool_starts = starts[first_group * buckets_per_group]

    def one_pass(loop):
        begin, carry = loop
        number = begin + jnp.arange(WIDTH, dtype=jnp.int32)
        bucket = _bucket_of(begin, starts, totals)
        row, place = _row_of(indices.take(buckets, bucket, 0), number - starts[bucket])
        group = jnp.asarray(by_pool)[lax.div(bucket, buckets_per_group)]
        pool = jnp.asarray(pools)[group]
        moves = Moves(
            group=group,
            row=lax.rem(bucket, buckets_per_group) * BUCKET + row,
            place=place,
            pool=pool,
            rank=number - pool_starts[pool],
            valid=number < ends[-1],
        )
        return begin + WIDTH, body(carry, moves)

    return lax.while_loop(lambda loop: loop[0] < ends[-1], one_pass, (jnp.int32(0), carry))[1]


def _bucket_of(begin, starts, totals):
    """i32[K]: the bucket of each move from `begin` on: every bucket marks its first, then a cummax."""
    number = jnp.arange(starts.shape[0], dtype=jnp.int32)
    first = jnp.where(totals > 0, jnp.maximum(starts - begin, 0), indices.NULL_BLOCK)
    marks = jnp.zeros(WIDTH, jnp.int32)
    return lax.cummax(marks.at[indices.drop_absent(first, WIDTH)].max(number, mode="drop"))


def _row_of(counts, place):
    """Row within the bucket, and place within the row, of each move; counts i32[K, BUCKET]."""
    row = jnp.zeros_like(place)
    before = jnp.zeros_like(place)
    seen = jnp.zeros_like(place)
    for column in range(BUCKET):
        seen = seen + counts[:, column]
        row = row + (seen <= place)
        before = jnp.where(seen <= place, seen, before)
    return row, place - before
