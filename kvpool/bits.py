"""Bits: sets of small numbers as rows of words, u32[R, W]; number n is bit n % 32 of word n // 32.

What is added to and taken from a row in one pass adds up in whatever order, which an unordered
scatter needs.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvpool import indices
from kvpool.indices import NULL_BLOCK
from kvpool.running import running_sum

WIDTH = 32  # bits of a word


def count(used: jax.Array) -> jax.Array:
    """Bits that are set in each row of words u32[K, W], i32[K]."""
    return jnp.sum(lax.population_count(used), axis=1, dtype=jnp.uint32).astype(jnp.int32)


def is_lowest(bits: jax.Array, place: jax.Array) -> jax.Array:
    """bool[K]: no bit of the row of words u32[K, W] below that of the place is set."""
    words = jnp.arange(bits.shape[1], dtype=jnp.int32)
    word = lax.div(place, np.int32(WIDTH))[:, None]
    below = (_bit(place) - np.uint32(1))[:, None]
    below = jnp.where(words < word, ~np.uint32(0), jnp.where(words == word, below, 0))
    return count(bits & below) == 0


def nth_unset(used: jax.Array, depth: jax.Array) -> jax.Array:
    """The place of the depth-th bit that is not set in each row of words u32[K, W]."""
    unused = ~used
    bits, place = unused[:, 0], jnp.zeros_like(depth)
    if unused.shape[1] > 1:
        counts = lax.population_count(unused).astype(jnp.int32)
        ends = running_sum(counts)
        word = jnp.sum(ends <= depth[:, None], axis=1, dtype=jnp.int32)
        here = jnp.arange(unused.shape[1], dtype=jnp.int32) == word[:, None]
        bits = jnp.sum(jnp.where(here, unused, 0), axis=1, dtype=jnp.uint32)
        depth = depth - jnp.sum(jnp.where(here, ends - counts, 0), axis=1, dtype=jnp.int32)
        place = word * WIDTH
    for width in (16, 8, 4, 2, 1):
        low = lax.population_count(bits & np.uint32((1 << width) - 1)).astype(jnp.int32)
        beyond = depth >= low
        bits = jnp.where(beyond, bits >> np.uint32(width), bits)
        depth = jnp.where(beyond, depth - low, depth)
        place = jnp.where(beyond, place + width, place)
    return place


def _bit(place: jax.Array) -> jax.Array:
    return np.uint32(1) << lax.rem(place, np.int32(WIDTH)).astype(jnp.uint32)


def add(used: jax.Array, slab: jax.Array, place: jax.Array, sign: int) -> jax.Array:
    """The words with the bit of each place added (1) or taken away (-1); absent slabs are not."""
    words = used.shape[1]
    word = jnp.where(slab < 0, NULL_BLOCK, slab * words + lax.div(place, np.int32(WIDTH)))
    bit = _bit(place) if sign > 0 else -_bit(place)
    return indices.add(used.reshape(-1), word, bit).reshape(used.shape)


def packed(chosen: jax.Array, words: int) -> jax.Array:
    """Rows of bool[R, n] as rows of `words` words."""
    chosen = jnp.pad(chosen, ((0, 0), (0, words * WIDTH - chosen.shape[1])))
    bits = chosen.reshape(-1, words, WIDTH) * (np.uint32(1) << np.arange(WIDTH, dtype=np.uint32))
    return jnp.sum(bits, axis=2, dtype=jnp.uint32)
