"""paged_scatter: blocks[slots[t] // E, offset + (slots[t] % E) * w + i] = words(values[t])[i]."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import words


@functools.partial(jax.jit, static_argnames=("entries", "implementation"))
def paged_scatter(
    blocks: jax.Array,
    slots: jax.Array,
    values: jax.Array,
    *,
    entries: int = 1,
    offset: int | jax.Array = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Writes one entry at each slot, in place where `blocks` is donated.

    Args:
      blocks: u[N, W].
      slots: i32[T], block * entries + place in the block; outside 0..N*entries-1 is skipped. Of
        two equal slots one wins.
      values: [T, *entry], any dtype at least as wide as the word.
      entries: E, entries of a block.
      offset: first word of the block's entries, at which entry 0 lies; an int or i32[].
      implementation: None, "xla" or "mosaic_gpu".

    Returns:
      u[N, W].

    Raises:
      ValueError: for a wrong shape or dtype, naming got and wanted.
      NotImplementedError: for an implementation that does not run here.
    """
    words.check_implementation(implementation)
    _check(blocks, slots, values, entries)
    return _xla(blocks, slots, words.to_words(values, 1, blocks.dtype), entries, offset)


def paged_scatter_reference(blocks, slots, values, *, entries=1, offset=0):
    """The same by indexing word by word."""
    _check(blocks, slots, values, entries)
    entry = words.to_words(values, 1, blocks.dtype)
    block, place = _split(blocks, slots, entries)
    columns = offset + place[:, None] * entry.shape[1] + jnp.arange(entry.shape[1])
    return blocks.at[block[:, None], columns].set(entry, mode="drop")


def _check(blocks, slots, values, entries):
    words.check_blocks(blocks)
    words.check_ids("slots", slots, "T")
    if values.ndim < 1 or values.shape[0] != slots.shape[0]:
        raise ValueError(f"values: wanted [{slots.shape[0]}, ...], got {list(values.shape)}")
    if blocks.shape[0] * entries >= 2**31:
        raise ValueError(f"entries: wanted less than 2^31 slots, got {blocks.shape[0]} * {entries}")
    span = entries * words.num_words(values.shape[1:], values.dtype, blocks.dtype)
    words.check_span(blocks, span)


def _split(blocks, slots, entries):
    """(block, place) of each slot; an absent slot gets block N, which scatters drop."""
    valid = words.is_valid(slots, blocks.shape[0] * entries)
    if entries == 1:
        return jnp.where(valid, slots, blocks.shape[0]), jnp.zeros_like(slots)
    block, place = lax.div(slots, jnp.int32(entries)), lax.rem(slots, jnp.int32(entries))
    return jnp.where(valid, block, blocks.shape[0]), place


def _xla(blocks, slots, entry, entries, offset):
    # The array keeps its two axes: one index into all of it would overflow 32 bits.
    block, place = _split(blocks, slots, entries)
    starts = jnp.stack([block, place * entry.shape[1] + offset], axis=1)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    return lax.scatter(blocks, starts, entry, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)
