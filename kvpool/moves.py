"""Passes of a fixed width over the blocks that move: the loop under every verb.

A verb says for each group and row how many blocks move. `for_each_block` numbers those moves and
hands them to the verb's body, `WIDTH` at a time, so that the cost follows the blocks that move and
the compiled code is one body whatever the number of groups.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
from jax import lax

from kvpool import indices
from kvpool.running import running_sum, stored

WIDTH = 256  # moves of one pass; a pass costs about the same from 1 to 256
BUCKET = 4  # rows counted together: prefix sums run over buckets, a search over the rows of one


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Moves:
    """One pass, K = WIDTH moves; those past the end are not `valid`."""

    group: jax.Array  # i32[K]
    row: jax.Array  # i32[K], index along the R of the counts
    place: jax.Array  # i32[K], 0..count-1: which of the row's blocks in the group
    valid: jax.Array  # bool[K]

    def pick(self, values: jax.Array) -> jax.Array:
        """values[group, row] of each move, from [G, R]."""
        return indices.take(values.reshape(-1), self.group * values.shape[1] + self.row, 0)


def for_each_block(counts: jax.Array, body, carry):
    """Runs carry = body(carry, moves) over all moves.

    Args:
      counts: i32[G, R], blocks that move for each group and row, at least 0.
      body: (carry, Moves) -> carry.
      carry: any pytree.
    """
    chex.assert_rank(counts, 2)
    chex.assert_type(counts, jnp.int32)
    if counts.shape[1] == 0:
        return carry
    counts = jnp.pad(counts, ((0, 0), (0, -counts.shape[1] % BUCKET)))
    buckets = jnp.sum(counts, axis=0, dtype=jnp.int32).reshape(-1, BUCKET)
    totals = jnp.sum(buckets, axis=1, dtype=jnp.int32)
    ends = running_sum(totals)
    starts = ends - totals

    def one_pass(loop):
        begin, carry = loop
        number = begin + jnp.arange(WIDTH, dtype=jnp.int32)
        bucket = _bucket_of(begin, starts)
        place = number - indices.take(starts, bucket, 0)
        members = indices.take(buckets, bucket, 0)
        member, place = _split(place, [members[:, i] for i in range(BUCKET)])
        row, place = stored(bucket * BUCKET + member), stored(place)
        group, place = _split(place, [indices.take(in_group, row, 0) for in_group in counts])
        moves = Moves(stored(group), row, place, valid=number < ends[-1])
        return begin + WIDTH, body(carry, moves)

    return lax.while_loop(lambda loop: loop[0] < ends[-1], one_pass, (jnp.int32(0), carry))[1]


def _bucket_of(begin, starts):
    """The bucket of each move from `begin` on: how many buckets start up to there, less 1."""
    first = jnp.maximum(starts - begin, 0)
    started = jnp.zeros(WIDTH, jnp.int32).at[indices.drop_absent(first, WIDTH)].add(1, mode="drop")
    return running_sum(started) - 1


def _split(place, counts):
    """Which of consecutive `counts`, each i32[K], a place falls into, and its place in there."""
    which, before, seen = (jnp.zeros_like(place) for _ in range(3))
    for count in counts[:-1]:
        seen = seen + count
        which = which + (seen <= place)
        before = jnp.where(seen <= place, seen, before)
    return which, place - before
