"""Entries: the values of one layer into and out of block arrays, the inside of storage's verbs."""

import functools

import jax
import jax.numpy as jnp

import pallas_kernels
from kvpool import block_scales, scales, step
from kvpool.buffers import BLOCK
from kvpool.indices import NULL_BLOCK
from kvpool.plan import Plan
from kvpool.words import words_of


@functools.partial(jax.jit, static_argnames="group")
def write(blocks, view, layer, values, group: int):
    """u[N, W] with the step's tokens of one layer, for each of `Region.values` an array."""
    words = words_of(view.plan, group)
    spec = words.group
    width = values[0].shape[1] if view.rows is None else None
    slots = jnp.where(layer >= 0, step.slots_of(view, group, width), NULL_BLOCK)
    values = tuple(
        value.reshape(*slots.shape, *buffer.shape)
        for value, buffer in zip(values, spec.region.payload, strict=True)
    )
    if spec.region.scales == BLOCK:
        return block_scales.write(blocks, view, words, layer, slots, values, width)
    return pallas_kernels.paged_scatter(
        blocks,
        slots,
        scales.quantised(spec.region, values),
        entries=spec.entries_per_block,
        starts=words.starts,
        offset=layer * words.layer,
        slab=words.slab,
    )


@functools.partial(jax.jit, static_argnames=("plan", "group"))
def read(blocks, places, layer, plan: Plan, group: int):
    """({buffer: [R, Lk, *entry]}, mask bool[R, Lk]) of one layer at the `step.Places`."""
    words = words_of(plan, group)
    spec = words.group
    mask = places.mask & (layer >= 0)
    each = spec.entries_per_block
    values = {}
    for buffer, offset in words.buffers(layer):
        entries = pallas_kernels.paged_gather(
            blocks,
            places.block_ids,
            # What a block has once is shown where any entry of the block is.
            *places.bounds(layer, each if buffer.per_block else 1),
            entries=1 if buffer.per_block else each,
            shape=buffer.shape,
            dtype=buffer.numpy_dtype,
            offset=offset,
            slab=words.slab,
        )
        entries = jnp.broadcast_to(entries, (*places.block_ids.shape, each, *buffer.shape))
        values[buffer.name] = entries.reshape(*mask.shape, *buffer.shape)
    return scales.dequantised(spec.region, values, mask), mask


@functools.partial(jax.jit, static_argnames="group")
def read_state(blocks, view, layer, group: int):
    """{buffer: [S, *shape]} of one layer, 0 for rows without a state."""
    words = words_of(view.plan, group)
    has_state = (view.seq_lens > 0) & (layer >= 0)
    ids = jnp.where(has_state, step.state_blocks_of(view, group), NULL_BLOCK)
    return {
        buffer.name: pallas_kernels.state_gather(
            blocks,
            ids,
            shape=buffer.shape,
            dtype=buffer.numpy_dtype,
            offset=offset,
            slab=words.slab,
        )
        for buffer, offset in words.buffers(layer)
    }


@functools.partial(jax.jit, static_argnames="group")
def write_state(blocks, view, layer, values, group: int):
    """u[N, W] with the states of one layer, for the rows with tokens."""
    words = words_of(view.plan, group)
    written = view.has_tokens & (layer >= 0)
    ids = jnp.where(written, step.state_blocks_of(view, group), NULL_BLOCK)
    options = {"offset": layer * words.layer, "slab": words.slab}
    return pallas_kernels.state_scatter(blocks, ids, values, starts=words.starts, **options)
