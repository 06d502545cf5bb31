"""copy_blocks: blocks[dst[i]] = blocks[src[i]], the whole block, in place."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import target, words

PIECE_BYTES = 1 << 19  # what is copied at once, and the temporary memory


def copy_blocks(
    blocks: jax.Array, src: jax.Array, dst: jax.Array, *, implementation: str | None = None
) -> jax.Array:
    """Copies blocks, in place where `blocks` is donated.

    Args:
      blocks: u[N, W].
      src, dst: i32[K]; a pair of which either lies outside 0..N-1 is skipped. No target may be
        named twice or be the source of another pair: what it then holds is not defined.
      implementation: None, "xla" or "mosaic_gpu".

    Returns:
      u[N, W].  Time grows with the blocks copied, not with K or N.

    Raises:
      ValueError: for a wrong shape or dtype, naming got and wanted.
      NotImplementedError: for an implementation that does not run here.
    """
    _check(blocks, src, dst)
    return _run(blocks, src, dst, implementation)


def copy_blocks_reference(blocks, src, dst):
    """The same in one indexed assignment, which holds all the sources at once."""
    _check(blocks, src, dst)
    size = blocks.shape[0]
    valid = words.is_valid(src, size) & words.is_valid(dst, size)
    return blocks.at[jnp.where(valid, dst, size)].set(blocks[jnp.where(valid, src, 0)], mode="drop")


def _check(blocks, src, dst):
    words.check_blocks(blocks)
    words.check_ids("src", src, "K")
    words.check_ids("dst", dst, "K")
    if src.shape != dst.shape:
        raise ValueError(f"dst: wanted i32{list(src.shape)} as src, got i32{list(dst.shape)}")


@functools.partial(jax.jit, static_argnames=("implementation",))
def _run(blocks, src, dst, implementation):
    def mosaic_gpu(*arrays):
        from pallas_kernels.mosaic_gpu.copy import copy

        return copy(*arrays) if src.shape[0] else blocks

    return target.run(implementation, _xla, mosaic_gpu, blocks, src, dst)


def _xla(blocks, src, dst):
    if not src.shape[0]:
        return blocks
    size, width = blocks.shape
    order, count = words.compacted(words.is_valid(src, size) & words.is_valid(dst, size))
    piece = min(width, PIECE_BYTES // blocks.dtype.itemsize)
    pieces = -(-width // piece)

    def copy_piece(step, blocks):
        pair = order[step // pieces]
        # The last piece overlaps the one before it, so that all are of one size.
        start = jnp.minimum(step % pieces * piece, width - piece)
        words_of_piece = lax.dynamic_slice(blocks, (src[pair], start), (1, piece))
        return lax.dynamic_update_slice(blocks, words_of_piece, (dst[pair], start))

    return lax.fori_loop(0, count * pieces, copy_piece, blocks)
