"""paged_gather: out[s, m, e] = values(blocks[block_ids[s, m], offset + e*w :][:w]) or fill."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels import target, words


def paged_gather(
    blocks: jax.Array,
    block_ids: jax.Array,
    starts: jax.Array,
    stops: jax.Array,
    *,
    entries: int,
    shape: tuple[int, ...],
    dtype,
    offset: int | jax.Array = 0,
    slab: tuple[int, int] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Reads the entries of one buffer that each row shows, from the blocks that it names.

    Args:
      blocks: u[N, W].
      block_ids: i32[S, M]; outside 0..N-1 is absent.
      starts, stops: i32[S]; of its M * E entries a row shows those from `starts` to before
        `stops`. A block that shows none is not read.
      entries: E, entries of the buffer in a block.
      shape, dtype: of an entry; the dtype at least as wide as the word.
      offset: the word of a block at which entry 0 lies; an int or i32[], a multiple of 16 bytes.
      slab: (blocks of a row, words of a block) where a row of `blocks` has several blocks, one
        after the other; their ids count on from row to row. None: a row is a block.
      implementation: None, "xla" or "mosaic_gpu".

    Returns:
      [S, M, E, *shape] of `dtype`; exactly 0 where the entry is not shown or the block is absent,
      whatever the blocks hold.

    Raises:
      ValueError: for a wrong shape, dtype or offset, naming got and wanted.
      NotImplementedError: for an implementation that does not run here.
    """
    _check(blocks, block_ids, starts, stops, entries, shape, dtype, offset, slab)
    options = {"entries": entries, "shape": tuple(shape), "dtype": np.dtype(dtype), "slab": slab}
    return _run(blocks, block_ids, starts, stops, offset, implementation, **options)


def paged_gather_reference(
    blocks, block_ids, starts, stops, *, entries, shape, dtype, offset=0, slab=None
):
    """The same by indexing word by word."""
    _check(blocks, block_ids, starts, stops, entries, shape, dtype, offset, slab)
    width = words.num_words(shape, dtype, blocks.dtype)
    valid = words.is_valid(block_ids, words.count_of(blocks, slab))
    row, base = words.located(jnp.where(valid, block_ids, 0), slab)
    first = jnp.broadcast_to(base + offset, row.shape)[..., None]
    entry = blocks[row[..., None], first + jnp.arange(entries * width)]
    keep = _shown(block_ids, starts, stops, entries) & valid[..., None]
    entry = jnp.where(keep[..., None], entry.reshape(*keep.shape, width), 0)
    return words.from_words(entry, shape, dtype)


def _check(blocks, block_ids, starts, stops, entries, shape, dtype, offset, slab):
    words.check_blocks(blocks, slab)
    words.check_ids("block_ids", block_ids, "S, M")
    words.check_offset("offset", offset, blocks.dtype)
    for name, bound in (("starts", starts), ("stops", stops)):
        if bound.shape != block_ids.shape[:1] or bound.dtype != jnp.int32:
            raise ValueError(
                f"{name}: wanted i32[{block_ids.shape[0]}], got {bound.dtype}{list(bound.shape)}"
            )
    span = entries * words.num_words(shape, dtype, blocks.dtype)
    words.check_span(blocks, span, offset, slab)


def _shown(block_ids, starts, stops, entries):
    """bool[S, M, E]: which entries lie within their row's bounds."""
    index = np.arange(block_ids.shape[1] * entries, dtype=np.int32).reshape(-1, entries)
    return (index >= starts[:, None, None]) & (index < stops[:, None, None])


@functools.partial(jax.jit, static_argnames=("entries", "shape", "dtype", "slab", "implementation"))
def _run(blocks, block_ids, starts, stops, offset, implementation, **options):
    def mosaic_gpu(blocks, block_ids, starts, stops, offset):
        from pallas_kernels.mosaic_gpu.gather import gather

        return gather(blocks, block_ids, (starts, stops), offset, **options)

    if not block_ids.size or not options["entries"] * math.prod(options["shape"]):
        return jnp.zeros(
            (*block_ids.shape, options["entries"], *options["shape"]), options["dtype"]
        )
    xla = functools.partial(_xla, **options)
    return target.run(implementation, xla, mosaic_gpu, blocks, block_ids, starts, stops, offset)


def _xla(blocks, block_ids, starts, stops, offset, entries, shape, dtype, slab):
    valid = words.is_valid(block_ids, words.count_of(blocks, slab))
    keep = _shown(block_ids, starts, stops, entries) & valid[..., None]
    keep = keep.reshape(-1, entries)

    def gathered(blocks, ids, keep, offset):
        width = words.num_words(shape, dtype, blocks.dtype)
        read = spans(blocks, ids, offset, entries * width, slab)
        # Masked as words: a select of bfloat16 or fp8 goes by way of float32 and loses NaN bits.
        read = jnp.where(keep[..., None], read.reshape(*keep.shape, width), 0)
        return words.from_words(read, (math.prod(shape),), dtype)

    def unless_empty(blocks, ids, keep, offset):
        # The branch also ends the fusion: without it XLA computes ids and mask anew for every
        # head of every entry, in one loop over all axes of the result, at twice the time.
        def zeros(blocks, ids, keep, offset):
            # Both branches have to vary over the same axes of a shard_map.
            read = jax.eval_shape(gathered, blocks, ids, keep, offset)
            return jnp.zeros_like(read, dtype)

        return lax.cond(jnp.any(keep), gathered, zeros, blocks, ids, keep, offset)

    read = lax.platform_dependent(
        blocks, block_ids.reshape(-1), keep, jnp.int32(offset), cpu=unless_empty, default=gathered
    )
    return read.reshape(*block_ids.shape, entries, *shape)


def spans(blocks: jax.Array, block_ids: jax.Array, offset, width: int, slab=None) -> jax.Array:
    """u[K, width]: words of each block from `offset` on; ids i32[K], an absent one reads any."""
    row, base = words.located(block_ids, slab)
    begin = jnp.broadcast_to(base + offset, row.shape)
    first = lax.broadcasted_iota(jnp.int32, (*row.shape, 2), 1) == 0
    at = jnp.where(first, row[:, None], begin[:, None])  # a concatenation would be a branch
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0, 1)
    )
    return lax.gather(blocks, at, numbers, (1, width), mode=lax.GatherScatterMode.CLIP)
