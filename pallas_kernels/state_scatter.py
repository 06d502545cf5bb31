"""state_scatter: blocks[block_ids[s], offset + starts[b] + i] = words(values[b][s])[i]."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import target, words
from pallas_kernels.paged_scatter import paged_scatter

SMALL_BYTES = 1 << 14  # a row of up to so many bytes is written together with all the others


def state_scatter(
    blocks: jax.Array,
    block_ids: jax.Array,
    values: Sequence[jax.Array],
    *,
    starts: tuple[int, ...],
    offset: int | jax.Array = 0,
    slab: tuple[int, int] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Writes the state of every row that has a block, in place where `blocks` is donated.

    All buffers are written by one operation. Written one after the other, the first write would
    not depend on a caller's read of the second buffer, and XLA would copy all the blocks.

    Args:
      blocks: u[N, W].
      block_ids: i32[S]; outside 0..N-1 is skipped. No block may be named twice.
      values: for each buffer [S, *shape], any dtype at least as wide as the word.
      starts: for each buffer its first word, ascending and without overlap; the words between two
        buffers may be overwritten with 0.
      offset: the word that `starts` count from; an int or i32[], a multiple of 16 bytes.
      slab: (blocks of a row, words of a block) where a row of `blocks` has several blocks, one
        after the other; their ids count on from row to row. None: a row is a block.
      implementation: None, "xla" or "mosaic_gpu".

    Returns:
      u[N, W].

    Raises:
      ValueError: for a wrong shape, dtype or offset, naming got and wanted.
      NotImplementedError: for an implementation that does not run here.
    """
    _check(blocks, block_ids, values, starts, offset, slab)
    return _run(blocks, block_ids, tuple(values), offset, tuple(starts), slab, implementation)


def state_scatter_reference(blocks, block_ids, values, *, starts, offset=0, slab=None):
    """The same by indexing word by word."""
    _check(blocks, block_ids, values, starts, offset, slab)
    size = words.count_of(blocks, slab)
    rows, base = words.located(jnp.where(words.is_valid(block_ids, size), block_ids, size), slab)
    first = jnp.broadcast_to(base + offset, rows.shape)[:, None]
    for value, start in zip(values, starts, strict=True):
        state = words.to_words(value, 1, blocks.dtype)
        columns = first + start + jnp.arange(state.shape[1])
        blocks = blocks.at[rows[:, None], columns].set(state, mode="drop")
    return blocks


def _check(blocks, block_ids, values, starts, offset, slab):
    words.check_blocks(blocks, slab)
    words.check_ids("block_ids", block_ids, "S")
    words.check_offset("offset", offset, blocks.dtype)
    if not values or len(values) != len(starts):
        raise ValueError(f"starts: wanted {len(values)}, one for each buffer, got {len(starts)}")
    end = starts[0]
    for value, start in zip(values, starts, strict=True):
        if value.ndim < 1 or value.shape[0] != block_ids.shape[0]:
            raise ValueError(f"values: wanted [{block_ids.shape[0]}, ...], got {list(value.shape)}")
        if start < end:
            raise ValueError(f"starts: wanted at least {end} for the next buffer, got {start}")
        end = start + words.num_words(value.shape[1:], value.dtype, blocks.dtype)
    words.check_start(starts[0])
    words.check_span(blocks, end, offset, slab)


@functools.partial(jax.jit, static_argnames=("starts", "slab", "implementation"))
def _run(blocks, block_ids, values, offset, starts, slab, implementation):
    def mosaic_gpu(blocks, block_ids, values, offset):
        from pallas_kernels.mosaic_gpu.scatter import scatter

        # A state is the one entry of its block.
        options = {"starts": starts, "entries": 1, "slab": slab}
        return scatter(blocks, block_ids, values, offset, **options)

    if not block_ids.size:
        return blocks
    xla = functools.partial(_xla, starts=starts, slab=slab)
    return target.run(implementation, xla, mosaic_gpu, blocks, block_ids, values, offset)


def _xla(blocks, block_ids, values, offset, starts, slab):
    row_bytes = sum(math.prod(value.shape[1:]) * value.dtype.itemsize for value in values)
    together = functools.partial(_together, starts=starts, slab=slab)
    if row_bytes <= SMALL_BYTES:
        return together(blocks, block_ids, values, offset)
    by_row = functools.partial(_row_by_row, starts=starts, slab=slab)
    return lax.platform_dependent(
        blocks, block_ids, values, jnp.int32(offset), cpu=by_row, default=together
    )


def _together(blocks, block_ids, values, offset, starts, slab):
    """One scatter of u[S, words from the first buffer to the end of the last], 0 in between."""
    parts, at = [], starts[0]
    for value, start in zip(values, starts, strict=True):
        part = words.to_words(value, 1, blocks.dtype)
        parts.append(jnp.pad(part, ((0, 0), (start - at, 0))))
        at = start + part.shape[1]
    row = jnp.concatenate(parts, axis=1)
    options = {"offset": offset + starts[0], "slab": slab}
    return paged_scatter(blocks, block_ids, row, implementation="xla", **options)


def _row_by_row(blocks, block_ids, values, offset, starts, slab):
    """Each row is cast by itself: on a CPU the cast of a whole array is materialised.

    The branch skips rows without a block, and it keeps XLA from moving the widening of a whole
    bfloat16 array out of the loop, which would also lose the payloads of NaNs. XLA widens a slice
    of fp8 all the same: such values are bytes before they are sliced.
    """
    values = [_as_bytes(value) for value in values]

    def write_row(row, blocks):
        for value, start in zip(values, starts, strict=True):
            one = lax.dynamic_slice_in_dim(value, row, 1)
            state = words.to_words(one, 1, blocks.dtype)
            block, base = words.located(block_ids[row], slab)
            at = (block, base + offset + start)
            blocks = lax.dynamic_update_slice(blocks, state, at)
        return blocks

    def one_row(row, blocks):
        present = words.is_valid(block_ids[row], words.count_of(blocks, slab))
        return lax.cond(present, functools.partial(write_row, row), lambda blocks: blocks, blocks)

    return lax.fori_loop(0, block_ids.shape[0], one_row, blocks)


def _as_bytes(value):
    is_fp8 = value.dtype.itemsize == 1 and jnp.issubdtype(value.dtype, jnp.floating)
    return lax.bitcast_convert_type(value, jnp.uint8) if is_fp8 else value
