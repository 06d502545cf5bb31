"""paged_gather: out[s, m, e] = values(blocks[block_ids[s, m], offset + e*w :][:w]) or fill."""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import words


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "implementation"))
def paged_gather(
    blocks: jax.Array,
    block_ids: jax.Array,
    keep: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype,
    offset: int | jax.Array = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Reads the entries of one buffer from the blocks named.

    Args:
      blocks: u[N, W].
      block_ids: i32[S, M]; outside 0..N-1 is absent.
      keep: bool[S, M, E], which of a block's E entries to show.
      shape, dtype: of an entry; the dtype at least as wide as the word.
      offset: first word of the block's entries, at which entry 0 lies; an int or i32[].
      implementation: None, "xla" or "mosaic_gpu".

    Returns:
      [S, M, E, *shape] of `dtype`; exactly 0 where the entry is not kept or the block is absent,
      whatever the blocks hold.

    Raises:
      ValueError: for a wrong shape or dtype, naming got and wanted.
      NotImplementedError: for an implementation that does not run here.
    """
    words.check_implementation(implementation)
    _check(blocks, block_ids, keep, shape, dtype)
    return _xla(blocks, block_ids, keep, shape, dtype, offset)


def paged_gather_reference(blocks, block_ids, keep, *, shape, dtype, offset=0):
    """The same by indexing word by word."""
    _check(blocks, block_ids, keep, shape, dtype)
    width = words.num_words(shape, dtype, blocks.dtype)
    columns = offset + jnp.arange(keep.shape[2] * width)
    valid = words.is_valid(block_ids, blocks.shape[0])
    entry = blocks[jnp.where(valid, block_ids, 0)[..., None], columns]
    entry = entry.reshape(*keep.shape, width)
    entry = jnp.where((keep & valid[..., None])[..., None], entry, 0)
    return words.from_words(entry, shape, dtype)


def _check(blocks, block_ids, keep, shape, dtype):
    words.check_blocks(blocks)
    words.check_ids("block_ids", block_ids, "S, M")
    if keep.ndim != 3 or keep.shape[:2] != block_ids.shape or keep.dtype != bool:
        wanted = ", ".join(map(str, block_ids.shape))
        raise ValueError(f"keep: wanted bool[{wanted}, E], got {keep.dtype}{list(keep.shape)}")
    span = keep.shape[2] * words.num_words(shape, dtype, blocks.dtype)
    words.check_span(blocks, span)


def _xla(blocks, block_ids, keep, shape, dtype, offset):
    valid = words.is_valid(block_ids, blocks.shape[0])
    keep = (keep & valid[..., None]).reshape(-1, keep.shape[2])

    def gathered(blocks, ids, keep, offset):
        width = words.num_words(shape, dtype, blocks.dtype)
        entries = spans(blocks, ids, offset, keep.shape[1] * width)
        # Masked as words: a select of bfloat16 or fp8 goes by way of float32 and loses NaN bits.
        entries = jnp.where(keep[..., None], entries.reshape(*keep.shape, width), 0)
        return words.from_words(entries, (math.prod(shape),), dtype)

    def unless_empty(blocks, ids, keep, offset):
        # The branch also ends the fusion: without it XLA computes ids and mask anew for every
        # head of every entry, in one loop over all axes of the result, at twice the time.
        def zeros(_, __, keep, ___):
            return jnp.zeros((*keep.shape, math.prod(shape)), dtype)

        return lax.cond(jnp.any(keep), gathered, zeros, blocks, ids, keep, offset)

    entries = lax.platform_dependent(
        blocks, block_ids.reshape(-1), keep, jnp.int32(offset), cpu=unless_empty, default=gathered
    )
    return entries.reshape(*block_ids.shape, keep.shape[1], *shape)


def spans(blocks: jax.Array, block_ids: jax.Array, offset, width: int) -> jax.Array:
    """u[K, width]: words of each block from `offset` on; ids i32[K], an absent one reads any."""
    first = lax.broadcasted_iota(jnp.int32, (*block_ids.shape, 2), 1) == 0
    at = jnp.where(first, block_ids[:, None], offset)  # a concatenation would be a branch
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    return lax.gather(blocks, at, numbers, (1, width), mode=lax.GatherScatterMode.CLIP)
