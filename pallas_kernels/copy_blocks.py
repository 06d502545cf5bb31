"""copy_blocks: blocks[dst[i]] = blocks[src[i]], the whole block, in place."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import target, words

PIECE_BYTES = 1 << 19  # what is copied at once, and the temporary memory


def copy_blocks(
    blocks: jax.Array,
    src: jax.Array,
    dst: jax.Array,
    *,
    slab: tuple[int, int] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Copies blocks, in place where `blocks` is donated.

    Args:
      blocks: u[N, W].
      src, dst: i32[K]; a pair of which either lies outside 0..N-1 is skipped. No target may be
        named twice or be the source of another pair: what it then holds is not defined.
      slab: (blocks of a row, words of a block) where a row of `blocks` has several blocks, one
        after the other; their ids count on from row to row. None: a row is a block.
      implementation: None, "xla" or "mosaic_gpu".

    Returns:
      u[N, W].  Time grows with the blocks copied, not with K or N.

    Raises:
      ValueError: for a wrong shape or dtype, naming got and wanted.
      NotImplementedError: for an implementation that does not run here.
    """
    _check(blocks, src, dst, slab)
    return _run(blocks, src, dst, slab, implementation)


def copy_blocks_reference(blocks, src, dst, *, slab=None):
    """The same in one indexed assignment, which holds all the sources at once."""
    _check(blocks, src, dst, slab)
    size, columns = words.count_of(blocks, slab), jnp.arange(words.width_of(blocks, slab))
    valid = words.is_valid(src, size) & words.is_valid(dst, size)
    source, begin = words.located(jnp.where(valid, src, 0), slab)
    read = blocks[source[:, None], jnp.reshape(begin, (-1, 1)) + columns]
    target, begin = words.located(jnp.where(valid, dst, size), slab)
    return blocks.at[target[:, None], jnp.reshape(begin, (-1, 1)) + columns].set(read, mode="drop")


def _check(blocks, src, dst, slab):
    words.check_blocks(blocks, slab)
    words.check_ids("src", src, "K")
    words.check_ids("dst", dst, "K")
    if src.shape != dst.shape:
        raise ValueError(f"dst: wanted i32{list(src.shape)} as src, got i32{list(dst.shape)}")


@functools.partial(jax.jit, static_argnames=("slab", "implementation"))
def _run(blocks, src, dst, slab, implementation):
    def mosaic_gpu(*arrays):
        from pallas_kernels.mosaic_gpu.copy import copy

        return copy(*arrays, slab=slab)

    if not src.shape[0]:
        return blocks
    xla = functools.partial(_xla, slab=slab)
    return target.run(implementation, xla, mosaic_gpu, blocks, src, dst)


def _xla(blocks, src, dst, slab):
    size, width = words.count_of(blocks, slab), words.width_of(blocks, slab)
    order, count = words.compacted(words.is_valid(src, size) & words.is_valid(dst, size))
    piece = min(width, PIECE_BYTES // blocks.dtype.itemsize)
    pieces = -(-width // piece)

    def copy_piece(step, blocks):
        pair = order[step // pieces]
        # The last piece overlaps the one before it, so that all are of one size.
        start = jnp.minimum(step % pieces * piece, width - piece)
        (source, begin), (target, end) = (words.located(ids[pair], slab) for ids in (src, dst))
        words_of_piece = lax.dynamic_slice(blocks, (source, begin + start), (1, piece))
        return lax.dynamic_update_slice(blocks, words_of_piece, (target, end + start))

    return lax.fori_loop(0, count * pieces, copy_piece, blocks)
