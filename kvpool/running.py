"""Running sums, and how passes over blocks count."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from kvpool import indices


def running_sum(values: jax.Array) -> jax.Array:
    """Inclusive sums of i32[..., n] along the last axis."""
    return jax.lax.cumsum(values, axis=values.ndim - 1)


def ranks(which: jax.Array, chosen: jax.Array, pools: int) -> tuple[jax.Array, jax.Array]:
    """How many of the same pool were chosen before each i32[K], and of each pool in all i32[P].

    Args:
      which: i32[K], the pool of each, 0..P-1.
      chosen: bool[K].
    """
    (rank,), counts = tally(which, [chosen], pools)
    return rank, counts[0]


def tally(which: jax.Array, choices: Sequence[jax.Array], pools: int):
    """`ranks` for several choices at once: ([i32[K] of each], counts i32[choices, P]).

    The counts are fields of a few words, so that one running sum serves them all.
    """
    bits = which.shape[0].bit_length()
    fields = 31 // bits  # of a word
    numbers = np.arange(len(choices) * pools).reshape(-1, pools)
    word, shift = numbers // fields, numbers % fields * bits
    words = np.arange(numbers[-1, -1] // fields + 1)[:, None]
    ones = sum(
        jnp.where(chosen & (indices.lookup(word[n], which) == words), _field(shift[n], which), 0)
        for n, chosen in enumerate(choices)
    )
    sums = running_sum(jnp.asarray(ones, jnp.int32))
    mask = (1 << bits) - 1
    of_each = [
        ((indices.lookup(sums, indices.lookup(word[n], which)) >> indices.lookup(shift[n], which))
         & mask) - 1
        for n in range(len(choices))
    ]  # fmt: skip
    return of_each, (sums[word, -1] >> shift.astype(np.int32)) & mask


def _field(shift: np.ndarray, which: jax.Array) -> jax.Array:
    return indices.lookup(1 << shift, which)


def stored(array: jax.Array) -> jax.Array:
    """The array i32[K], computed once.

    On the CPU elementwise operations are fused with everything that uses their result, and done
    again for every use. A scatter is not fused with its users.
    """
    return jnp.zeros_like(array).at[jnp.arange(array.shape[0])].set(array, unique_indices=True)
