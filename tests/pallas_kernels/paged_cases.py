"""Writes at random places and reads through a table with holes, against bytes and loops."""

import contextlib
import functools

import jax
import numpy as np
from kernel_cases import OUTSIDE, ROW, dtype_of, poisoned, random_bits, same_bits

from pallas_kernels import (
    paged_gather,
    paged_gather_reference,
    paged_scatter,
    paged_scatter_reference,
)

BLOCKS, ROWS, COLUMNS, MARGIN = 5, 7, 2, 16


def scattered(blocks, slots, values, entries, offset):
    """The same with bytes and a loop."""
    out = blocks.copy()
    width = values[0].nbytes // blocks.itemsize if len(values) else 0
    for slot, value in zip(slots.tolist(), values, strict=True):
        if 0 <= slot < len(blocks) * entries:
            start = offset + slot % entries * width
            words = np.frombuffer(value.tobytes(), blocks.dtype)
            out[slot // entries, start : start + width] = words
    return out


def gathered(blocks, ids, starts, stops, entries, shape, dtype, offset):
    """The same with bytes and loops."""
    out = np.zeros((*ids.shape, entries, *shape), dtype)
    size = out[0, 0, 0].nbytes // blocks.itemsize
    for s, m, e in np.ndindex(*ids.shape, entries):
        if starts[s] <= m * entries + e < stops[s] and 0 <= ids[s, m] < len(blocks):
            start = offset + e * size
            words = blocks[ids[s, m], start : start + size]
            out[s, m, e] = np.frombuffer(words.tobytes(), dtype).reshape(shape)
    return out


@functools.partial(jax.jit, static_argnames=("entries", "implementation", "slab"))
def scatter_both(blocks, slots, values, entries, implementation, slab):
    options = {"entries": entries, "offset": MARGIN, "slab": slab}
    run = paged_scatter(blocks, slots, values, implementation=implementation, **options)
    return run, paged_scatter_reference(blocks, slots, values, **options)


@functools.partial(jax.jit, static_argnames=("entries", "shape", "dtype", "implementation", "slab"))
def gather_both(blocks, ids, starts, stops, entries, shape, dtype, implementation, slab):
    given = (blocks, ids, starts, stops)
    options = {"entries": entries, "shape": shape, "dtype": dtype, "offset": MARGIN, "slab": slab}
    run = paged_gather(*given, implementation=implementation, **options)
    return run, paged_gather_reference(*given, **options)


def windows(entries):
    """Of each row what it shows: all, a middle, one entry, none, and more than there can be."""
    end = COLUMNS * entries
    most, least = 2**31 - 1, -(2**31)
    bounds = [
        (0, end),
        (end // 3, end - 1),
        (1, 2),
        (2, 1),
        (-9, end + 9),
        (least, most),
        (0, least),
    ]
    starts, stops = zip(*bounds, strict=True)
    return np.asarray(starts, np.int32), np.asarray(stops, np.int32)


def check(
    name,
    entries,
    shape,
    word,
    implementation=None,
    tokens=4,
    layout=ROW,
    context=contextlib.nullcontext,
):
    """Writes at random places, and reads through a table with holes; everything else is poison."""
    size = int(np.prod(shape)) * dtype_of(name).itemsize // word.itemsize
    width, count = layout.width(entries * size + 2 * MARGIN, word), BLOCKS * layout.per_row
    options = {"implementation": implementation, "slab": layout.slab(width)}
    rng = np.random.default_rng(entries + int(np.prod(shape)))

    blocks = poisoned(count, width, word)
    slots = rng.permutation(count * entries)[:tokens]
    slots = np.asarray([*slots, count * entries, *OUTSIDE], np.int32)
    values = random_bits(entries, name, (len(slots), *shape))
    with context():
        got = scatter_both(layout.laid(blocks), slots, values, entries, **options)
        got = jax.tree.map(np.asarray, got)
    wanted = layout.laid(scattered(blocks, slots, values, entries, MARGIN))
    assert all(same_bits(array, wanted) for array in got)

    ids = rng.integers(0, count, (ROWS, COLUMNS)).astype(np.int32)
    ids[0, :2] = OUTSIDE[:2]
    ids[1, 1] = count
    ids[4:6] = [[count - 1, ids[2, 0]], [ids[2, 0], count - 1]]
    named = ids[(ids >= 0) & (ids < count)]
    blocks[named] = random_bits(entries, word.name, (*named.shape, width))
    given = (*windows(entries), entries, shape, dtype_of(name))
    with context():
        got = gather_both(layout.laid(blocks), ids, *given, **options)
        got = jax.tree.map(np.asarray, got)
    wanted = gathered(blocks, ids, *given, MARGIN)
    assert all(same_bits(array, wanted) for array in got)
