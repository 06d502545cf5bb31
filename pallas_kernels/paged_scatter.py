"""paged_scatter: blocks[slots[t] // E, o + (slots[t] % E) * w + i] = words(values[t])[i]."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import target, words


def paged_scatter(
    blocks: jax.Array,
    slots: jax.Array,
    values: jax.Array | Sequence[jax.Array],
    *,
    entries: int = 1,
    starts: Sequence[int] = (0,),
    offset: int | jax.Array = 0,
    slab: tuple[int, int] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Writes one entry of each buffer at each slot, in place where `blocks` is donated.

    Args:
      blocks: u[N, W].
      slots: i32[T], block * entries + place in the block; outside 0..N*entries-1 is skipped. No
        place may be named twice: what it then holds is not defined.
      values: [T, *entry] of one buffer or of several, any dtype at least as wide as the word.
      entries: E, entries of each buffer in a block.
      starts: for each buffer the word of its entry 0, counted from `offset`.
      offset: a word of the block; an int or i32[], a multiple of 16 bytes.
      slab: (blocks of a row, words of a block) where a row of `blocks` has several blocks, one
        after the other; their ids count on from row to row. None: a row is a block.
      implementation: None, "xla" or "mosaic_gpu".

    Returns:
      u[N, W].

    Raises:
      ValueError: for a wrong shape, dtype or offset, naming got and wanted.
      NotImplementedError: for an implementation that does not run here.
    """
    buffers = _buffers(values)
    _check(blocks, slots, buffers, entries, starts, offset, slab)
    return _run(blocks, slots, buffers, offset, tuple(starts), entries, slab, implementation)


def paged_scatter_reference(blocks, slots, values, *, entries=1, starts=(0,), offset=0, slab=None):
    """The same by indexing word by word."""
    values = _buffers(values)
    _check(blocks, slots, values, entries, starts, offset, slab)
    block, place = _split(blocks, slots, entries, slab)
    block, base = words.located(block, slab)
    for value, start in zip(values, starts, strict=True):
        entry = words.to_words(value, 1, blocks.dtype)
        width = entry.shape[1]
        first = offset + start + base + place * width
        columns = jnp.broadcast_to(first, block.shape)[:, None] + jnp.arange(width)
        blocks = blocks.at[block[:, None], columns].set(entry, mode="drop")
    return blocks


def _buffers(values):
    return (values,) if hasattr(values, "dtype") else tuple(values)


def _check(blocks, slots, values, entries, starts, offset, slab):
    words.check_blocks(blocks, slab)
    words.check_ids("slots", slots, "T")
    words.check_offset("offset", offset, blocks.dtype)
    if not values or len(values) != len(starts):
        raise ValueError(f"starts: wanted {len(values)}, one for each buffer, got {len(starts)}")
    count = words.count_of(blocks, slab)
    if count * entries >= 2**31:
        raise ValueError(f"entries: wanted less than 2^31 slots, got {count} * {entries}")
    for value, start in zip(values, starts, strict=True):
        if value.ndim < 1 or value.shape[0] != slots.shape[0]:
            raise ValueError(f"values: wanted [{slots.shape[0]}, ...], got {list(value.shape)}")
        span = entries * words.num_words(value.shape[1:], value.dtype, blocks.dtype)
        words.check_start(start)
        words.check_span(blocks, start + span, offset, slab)


def _split(blocks, slots, entries, slab):
    """(block, place) of each slot; an absent one gets a block past the last, to be dropped."""
    count = words.count_of(blocks, slab)
    valid = words.is_valid(slots, count * entries)
    if entries == 1:
        return jnp.where(valid, slots, count), jnp.zeros_like(slots)
    block, place = lax.div(slots, jnp.int32(entries)), lax.rem(slots, jnp.int32(entries))
    return jnp.where(valid, block, count), place


@functools.partial(jax.jit, static_argnames=("starts", "entries", "slab", "implementation"))
def _run(blocks, slots, values, offset, starts, entries, slab, implementation):
    def mosaic_gpu(blocks, slots, values, offset):
        from pallas_kernels.mosaic_gpu.scatter import scatter

        options = {"starts": starts, "entries": entries, "slab": slab}
        return scatter(blocks, slots, values, offset, **options)

    if not slots.shape[0] or not entries:
        return blocks
    xla = functools.partial(_xla, starts=starts, entries=entries, slab=slab)
    return target.run(implementation, xla, mosaic_gpu, blocks, slots, values, offset)


def _xla(blocks, slots, values, offset, starts, entries, slab):
    # The array keeps its two axes: one index into all of it would overflow 32 bits.
    block, place = _split(blocks, slots, entries, slab)
    block, base = words.located(block, slab)
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
    )
    for value, start in zip(values, starts, strict=True):
        entry = words.to_words(value, 1, blocks.dtype)
        at = jnp.stack([block, place * entry.shape[1] + base + offset + start], axis=1)
        blocks = lax.scatter(blocks, at, entry, numbers, mode=lax.GatherScatterMode.FILL_OR_DROP)
    return blocks
