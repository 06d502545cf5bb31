"""Writing under scales per block: which blocks a step touches, and codes that outgrow their scale.

A block is filled in order, so its older entries are those before the first that the step writes.
A block that is begun has none, and what its scale and its codes were in other hands does not
count. So a row has at most one block with codes to rescale, the one that it was in the middle of;
only a flat step that leaves positions out can have more.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

import pallas_kernels
from kvpool import indices, scales
from kvpool.indices import NULL_BLOCK
from kvpool.regions import quotient
from kvpool.spec import Group
from kvpool.step import StepView
from kvpool.words import Words

WIDTH = 32  # blocks that a pass rescales on a CPU


@dataclasses.dataclass(frozen=True)
class Touched:
    """The blocks that the K slots of a step lie in, each once among U places."""

    of_slot: jax.Array  # i32[K], the place of the slot's block; of a skipped slot any
    ids: jax.Array  # i32[U], NULL in a place without a block
    older: jax.Array  # i32[U], the same, but NULL where the block has no older entries
    rows: int  # S
    one_a_row: bool  # whether at most S of `older` are there


def write(
    blocks: jax.Array, view: StepView, words: Words, layer, slots: jax.Array, values, width
) -> jax.Array:
    """Quantises and writes the step's values of one layer.

    Args:
      blocks: u[N, W].
      layer: i32[], index in the group.
      slots: i32[K], NULL where a token is skipped.
      values: for each buffer of `Region.values` [K, *entry].
      width: tokens of a row in a rectangular view, None for a flat one.

    Returns:
      u[N, W]. Only blocks that a slot lies in change.
    """
    if not slots.shape[0]:
        return blocks
    group, slab = words.group, words.slab
    region, base = group.region, layer * words.layer
    touched = _touched(view, group, slots, width)
    starts = {b.name: at for b, at in zip(region.buffers, words.starts, strict=True)}
    codes = []
    # One buffer after the other: XLA would copy all the blocks where it may put off what it reads
    # of the second buffer until the first is written.
    for buffer, value in zip(region.payload, values, strict=True):
        scale_buffer = region.scale_buffers.get(buffer.name)
        if scale_buffer is not None:
            value, dtype = value.astype(jnp.float32), buffer.numpy_dtype
            needed = scales.block_scale(_magnitudes(touched, slots, value), dtype)
            scale_at = base + starts[scale_buffer.name]
            place = {"offset": scale_at, "slab": slab}
            old = pallas_kernels.state_gather(
                blocks, touched.older, shape=scale_buffer.shape, dtype=jnp.float32, **place
            )
            scale = jnp.where(old > needed, old, needed)
            factors = scales.shrinking(old, scale)
            shape = (group.entries_per_block, *buffer.shape)
            codes_at = {"offset": base + starts[buffer.name], "slab": slab}
            blocks = _rescale(blocks, touched, factors, shape, dtype, codes_at)
            blocks = pallas_kernels.paged_scatter(blocks, touched.ids, scale, **place)
            factor = indices.take(scales.inverse(scale), touched.of_slot, 0)
            value = scales.encode(value, factor[..., None], dtype)
        codes.append(value)
    at = tuple(starts[buffer.name] for buffer in region.payload)
    place = {"offset": base, "slab": slab}
    return pallas_kernels.paged_scatter(
        blocks, slots, codes, entries=group.entries_per_block, starts=at, **place
    )


def _touched(view: StepView, group: Group, slots: jax.Array, width: int | None) -> Touched:
    entries, rows = group.entries_per_block, view.seq_lens.shape[0]
    block = jnp.where(slots >= 0, quotient(slots, entries), NULL_BLOCK)
    if width is None:
        of_slot, places = _numbered(block), block.shape[0]
    else:
        most = (width + group.block_size - 2) // group.block_size + 1  # blocks of a row
        place = lax.rem(view.seq_lens, jnp.int32(group.block_size))[:, None]
        column = quotient(place + jnp.arange(width, dtype=jnp.int32), group.block_size)
        of_slot = (column + most * jnp.arange(rows, dtype=jnp.int32)[:, None]).reshape(-1)
        places = rows * most
    ids = jnp.full(places, NULL_BLOCK, jnp.int32).at[of_slot].max(block)
    entry = jnp.where(slots >= 0, slots - block * entries, entries)
    first = jnp.full(places, entries, jnp.int32).at[of_slot].min(entry)
    older = jnp.where(first > 0, ids, NULL_BLOCK)
    return Touched(of_slot, ids, older, rows, width is not None or places <= rows)


def _numbered(block: jax.Array) -> jax.Array:
    """i32[K]: equal blocks get one number, different ones different numbers of 0..K-1."""
    order = jnp.argsort(block)
    ordered = block[order]
    begins = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] != ordered[:-1]])
    return jnp.zeros_like(block).at[order].set(jnp.cumsum(begins, dtype=jnp.int32))


def _magnitudes(touched: Touched, slots: jax.Array, value: jax.Array) -> jax.Array:
    """f32[U, ...]: the largest magnitude of what each block is given, of values f32[K, ..., D]."""
    found = scales.largest_magnitude(value)
    written = (slots >= 0).reshape(-1, *(1,) * (found.ndim - 1))
    most = jnp.zeros((*touched.ids.shape, *found.shape[1:]), jnp.float32)
    return most.at[touched.of_slot].max(jnp.where(written, found, 0))


def _rescale(blocks, touched: Touched, factors, shape, dtype, place: dict):
    """Multiplies the older codes [*shape] of each block by `factors` f32[U, ...] where below 1."""
    shrinks = jnp.any((factors < 1).reshape(factors.shape[0], -1), axis=1)
    ids = jnp.where(shrinks, touched.older, NULL_BLOCK)
    places, rows = ids.shape[0], touched.rows

    def rescaled(blocks, ids, factors):
        codes = pallas_kernels.state_gather(blocks, ids, shape=shape, dtype=dtype, **place)
        codes = scales.encode(scales.numbers(codes), factors[:, None, ..., None], dtype)
        return pallas_kernels.paged_scatter(blocks, ids, codes, **place)

    def in_passes(width, most, blocks, ids, factors):
        order = jnp.flatnonzero(ids >= 0, size=most * width, fill_value=places).astype(jnp.int32)

        def one_pass(number, blocks):
            part = lax.dynamic_slice_in_dim(order, number * width, width)
            factor = indices.take(factors, part, 0)
            return rescaled(blocks, indices.take(ids, part, NULL_BLOCK), factor)

        count = jnp.sum(ids >= 0, dtype=jnp.int32)
        passes = quotient(count + (width - 1), width)
        return one_pass(0, blocks) if most == 1 else lax.fori_loop(0, passes, one_pass, blocks)

    few, most = min(WIDTH, places), 1 if touched.one_a_row else -(-places // rows)
    return lax.platform_dependent(
        blocks,
        ids,
        factors,
        # On a CPU absent blocks cost as much as others; elsewhere a loop costs more than they do.
        cpu=functools.partial(in_passes, few, -(-places // few)),
        default=rescaled if places <= rows else functools.partial(in_passes, rows, most),
    )
