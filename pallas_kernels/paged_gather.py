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
    _check(blocks, block_ids, keep, shape, dtype, offset)
    keep = keep & words.is_valid(block_ids, blocks.shape[0])[..., None]
    width = words.num_words(shape, dtype, blocks.dtype)
    ids = jnp.broadcast_to(block_ids[..., None], keep.shape).reshape(-1)
    starts = offset + jnp.arange(keep.shape[2], dtype=jnp.int32) * width
    starts = jnp.broadcast_to(starts, keep.shape).reshape(-1)
    # Two axes, one entry a row, until the end: XLA's loop over them is twice as fast as over all.
    entries = jnp.where(keep.reshape(-1, 1), spans(blocks, ids, starts, width), 0)
    return words.from_words(entries, (math.prod(shape),), dtype).reshape(*keep.shape, *shape)


def paged_gather_reference(blocks, block_ids, keep, *, shape, dtype, offset=0):
    """The same by indexing word by word."""
    _check(blocks, block_ids, keep, shape, dtype, offset)
    width = words.num_words(shape, dtype, blocks.dtype)
    columns = offset + jnp.arange(keep.shape[2] * width)
    valid = words.is_valid(block_ids, blocks.shape[0])
    entry = blocks[jnp.where(valid, block_ids, 0)[..., None], columns]
    entry = entry.reshape(*keep.shape, width)
    entry = jnp.where((keep & valid[..., None])[..., None], entry, 0)
    return words.from_words(entry, shape, dtype)


def spans(blocks: jax.Array, block_ids: jax.Array, starts, width: int) -> jax.Array:
    """u[K, width]: `width` words of each block from `starts` on, both i32[K].

    An absent id reads some other block: clipping it and masking the words before they are cast
    back lets XLA make one loop of it all, while a gather of bfloat16 or fp8 goes by way of float32.
    """
    at = jnp.stack([block_ids, jnp.broadcast_to(starts, block_ids.shape)], axis=1)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    return lax.gather(blocks, at, numbers, (1, width), mode=lax.GatherScatterMode.CLIP)


def _check(blocks, block_ids, keep, shape, dtype, offset):
    words.check_blocks(blocks)
    words.check_ids("block_ids", block_ids, "S, M")
    if keep.ndim != 3 or keep.shape[:2] != block_ids.shape or keep.dtype != bool:
        wanted = ", ".join(map(str, block_ids.shape))
        raise ValueError(f"keep: wanted bool[{wanted}, E], got {keep.dtype}{list(keep.shape)}")
    span = keep.shape[2] * words.num_words(shape, dtype, blocks.dtype)
    words.check_span(blocks, offset, span)
