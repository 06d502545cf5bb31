"""state_gather: out[s] = values(blocks[block_ids[s], offset :][:w]), or fill."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import target, words
from pallas_kernels.paged_gather import spans


def state_gather(
    blocks: jax.Array,
    block_ids: jax.Array,
    *,
    shape: tuple[int, ...],
    dtype,
    offset: int | jax.Array = 0,
    slab: tuple[int, int] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Reads one buffer of the state of every row.

    Args:
      blocks: u[N, W].
      block_ids: i32[S]; outside 0..N-1 is absent.
      shape, dtype: of the state; the dtype at least as wide as the word.
      offset: first word of the buffer in a block; an int or i32[], a multiple of 16 bytes.
      slab: (blocks of a row, words of a block) where a row of `blocks` has several blocks, one
        after the other; their ids count on from row to row. None: a row is a block.
      implementation: None, "xla" or "mosaic_gpu".

    Returns:
      [S, *shape] of `dtype`, exactly 0 where the block is absent.

    Raises:
      ValueError: for a wrong shape, dtype or offset, naming got and wanted.
      NotImplementedError: for an implementation that does not run here.
    """
    _check(blocks, block_ids, shape, dtype, offset, slab)
    return _run(blocks, block_ids, offset, tuple(shape), np.dtype(dtype), slab, implementation)


def state_gather_reference(blocks, block_ids, *, shape, dtype, offset=0, slab=None):
    """The same by indexing word by word."""
    _check(blocks, block_ids, shape, dtype, offset, slab)
    valid = words.is_valid(block_ids, words.count_of(blocks, slab))
    row, base = words.located(jnp.where(valid, block_ids, 0), slab)
    first = jnp.broadcast_to(base + offset, row.shape)[:, None]
    state = blocks[row[:, None], first + jnp.arange(words.num_words(shape, dtype, blocks.dtype))]
    return words.from_words(jnp.where(valid[:, None], state, 0), shape, dtype)


def _check(blocks, block_ids, shape, dtype, offset, slab):
    words.check_blocks(blocks, slab)
    words.check_ids("block_ids", block_ids, "S")
    words.check_offset("offset", offset, blocks.dtype)
    words.check_span(blocks, words.num_words(shape, dtype, blocks.dtype), offset, slab)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "slab", "implementation"))
def _run(blocks, block_ids, offset, shape, dtype, slab, implementation):
    def mosaic_gpu(blocks, block_ids, offset):
        from pallas_kernels.mosaic_gpu.gather import gather

        # A state is the one entry of its block.
        options = {"entries": 1, "shape": shape, "dtype": dtype, "slab": slab}
        states = gather(blocks, block_ids[:, None], (), offset, **options)
        return states.reshape(*block_ids.shape, *shape)

    if not block_ids.size or not math.prod(shape):
        return jnp.zeros((*block_ids.shape, *shape), dtype)
    xla = functools.partial(_xla, shape=shape, dtype=dtype, slab=slab)
    return target.run(implementation, xla, mosaic_gpu, blocks, block_ids, offset)


def _xla(blocks, block_ids, offset, shape, dtype, slab):
    state = spans(blocks, block_ids, offset, words.num_words(shape, dtype, blocks.dtype), slab)
    valid = words.is_valid(block_ids, words.count_of(blocks, slab))
    return words.from_words(jnp.where(valid[:, None], state, 0), shape, dtype)
