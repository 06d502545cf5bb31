"""What the operations share: casts between values and words, ids that may be absent, checks."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ALIGNMENT = 16  # bytes; what the GPU's bulk copies ask of the places they move


def to_words(values: jax.Array, axes: int, word) -> jax.Array:
    """The bits of values [*lead, *entry] as words u[*lead, W], with `axes` leading axes.

    The word is as wide as the dtype or narrower: a wider one would have to be put together from
    several elements, which XLA does in a temporary array.
    """
    lead, entry = values.shape[:axes], values.shape[axes:]
    size = num_words(entry, values.dtype, word)
    return lax.bitcast_convert_type(values, word).reshape(*lead, size)


def from_words(words: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
    """The inverse of `to_words`: u[*lead, W] as [*lead, *shape] of `dtype`."""
    ratio = num_words((), dtype, words.dtype)
    split = (*words.shape[:-1], *shape, *((ratio,) if ratio > 1 else ()))
    return lax.bitcast_convert_type(words.reshape(split), dtype)


def num_words(shape: tuple[int, ...], dtype, word) -> int:
    """Words of an entry; ValueError where the word is wider than the dtype."""
    size, width = np.dtype(dtype).itemsize, np.dtype(word).itemsize
    if size % width:
        raise ValueError(f"blocks: wanted words of at most {size} bytes for {dtype}, got {word}")
    return math.prod(shape) * (size // width)


def is_valid(ids: jax.Array, size: int) -> jax.Array:
    """Whether each id lies in 0..size-1."""
    return (ids >= 0) & (ids < size)


def compacted(keep: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(order i32[K], count i32[]): the places where `keep` bool[K] holds come first in `order`."""
    size = keep.shape[0]
    target = jnp.where(keep, jnp.cumsum(keep, dtype=jnp.int32) - 1, size)
    order = (
        jnp.zeros(size, jnp.int32).at[target].set(jnp.arange(size, dtype=jnp.int32), mode="drop")
    )
    return order, jnp.sum(keep, dtype=jnp.int32)


def width_of(blocks: jax.Array, slab: tuple[int, int] | None) -> int:
    """Words of a block: a whole row of the array, or what the slab says."""
    return slab[1] if slab else blocks.shape[1]


def count_of(blocks: jax.Array, slab: tuple[int, int] | None) -> int:
    """Blocks of the array."""
    return blocks.shape[0] * (slab[0] if slab else 1)


def located(ids: jax.Array, slab: tuple[int, int] | None):
    """(row of the array, first word in it) of each block; of absent ones they are absent, any."""
    if slab is None:
        return ids, 0
    per_row, width = slab
    # A floor division, since the row of an absent -1 has to be absent too.
    row = jnp.where(ids < 0, -1, lax.div(ids, jnp.int32(per_row)))
    return row, lax.rem(ids, jnp.int32(per_row)) * width


def check_blocks(blocks: jax.Array, slab: tuple[int, int] | None = None) -> None:
    """ValueError unless `blocks` is u[N, W], with sides that 32 bits count and slabs that fit."""
    if blocks.ndim != 2 or not jnp.issubdtype(blocks.dtype, jnp.unsignedinteger):
        raise ValueError(f"blocks: wanted u[N, W], got {blocks.dtype}{list(blocks.shape)}")
    if max(blocks.shape) >= 2**31:
        raise ValueError(f"blocks: wanted sides below 2^31, got {list(blocks.shape)}")
    if slab is None:
        return
    per_row, width = slab
    if per_row < 1 or width < 1 or per_row * width > blocks.shape[1]:
        raise ValueError(
            f"slab: wanted at most {blocks.shape[1]} words, got {per_row} blocks of {width}"
        )
    check_offset("slab: block of", width, blocks.dtype)
    if count_of(blocks, slab) >= 2**31:
        raise ValueError(f"slab: wanted less than 2^31 blocks, got {count_of(blocks, slab):,}")


def check_ids(name: str, ids: jax.Array, axes: str) -> None:
    """ValueError unless `ids` is i32 with these axes, e.g. "S, M"."""
    if ids.ndim != len(axes.split(", ")) or ids.dtype != jnp.int32:
        raise ValueError(f"{name}: wanted i32[{axes}], got {ids.dtype}{list(ids.shape)}")


def check_span(blocks: jax.Array, span: int, offset=0, slab: tuple[int, int] | None = None) -> None:
    """ValueError unless a block has `span` words, from `offset` on where that is known."""
    if isinstance(offset, (int, np.integer)):
        if offset < 0:
            raise ValueError(f"offset: wanted at least 0, got {offset}")
        span += int(offset)
    width = width_of(blocks, slab)
    if span > width:
        raise ValueError(f"blocks: wanted at least {span} words a block, got {width}")


def check_start(start: int) -> None:
    """ValueError for a buffer that begins before the block."""
    if start < 0:
        raise ValueError(f"starts: wanted at least 0, got {start}")


def check_offset(name: str, offset, word) -> None:
    """ValueError where a number that is known is not a multiple of 16 bytes."""
    if isinstance(offset, (int, np.integer)) and offset * np.dtype(word).itemsize % ALIGNMENT:
        raise ValueError(
            f"{name}: wanted a multiple of {ALIGNMENT // np.dtype(word).itemsize} words, which is "
            f"{ALIGNMENT} bytes, got {offset}"
        )
