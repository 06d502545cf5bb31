"""Arrays of more than 2^31 elements, in place: numbers of elements that 32 bits do not count."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import copy_blocks, paged_gather, paged_scatter, state_gather, state_scatter

BLOCKS, ENTRIES, ENTRY = 131_076, 16, 1024  # 2,147,549,184 elements of one byte
WIDTH = ENTRIES * ENTRY
LAST, EARLIER = BLOCKS - 3, 1  # wrapped by 2^31 or 2^32, LAST would be another block


def donated(operation, **options):
    return jax.jit(functools.partial(operation, **options), donate_argnums=0)


@pytest.mark.parametrize(
    "per_row",
    [None, pytest.param(12, marks=pytest.mark.slow)],
    ids=["a row", "slabs of 12"],
)
def test_an_array_beyond_32_bits(per_row):
    shape = (BLOCKS // per_row, per_row * WIDTH + 16) if per_row else (BLOCKS, WIDTH)
    slab = (per_row, WIDTH) if per_row else None
    blocks = jax.jit(lambda: jnp.zeros(shape, jnp.uint8))()
    assert blocks.size > 2**31
    write = donated(paged_scatter, entries=ENTRIES, slab=slab)
    slots = np.asarray([LAST * ENTRIES + 15, EARLIER * ENTRIES, -1], np.int32)
    values = np.repeat(np.asarray([7, 3, 99], np.uint8)[:, None], ENTRY, 1)
    blocks = write(blocks, slots, values)
    blocks = donated(copy_blocks, slab=slab)(
        blocks, np.asarray([LAST, -1], np.int32), np.asarray([BLOCKS - 1, 0], np.int32)
    )
    states = (np.full((2, WIDTH), 5, np.uint8),)
    ids = np.asarray([BLOCKS - 2, -1], np.int32)
    blocks = donated(state_scatter, starts=(0,), slab=slab)(blocks, ids, states)

    options = {"entries": ENTRIES, "shape": (ENTRY,), "dtype": np.uint8, "slab": slab}
    read = jax.jit(functools.partial(paged_gather, **options))
    ids = np.asarray([[LAST, EARLIER, BLOCKS - 1, BLOCKS - 2, 0, BLOCKS]], np.int32)
    bounds = np.zeros(1, np.int32), np.full(1, 6 * ENTRIES, np.int32)
    got = np.asarray(read(blocks, ids, *bounds))[0]
    wanted = np.zeros((6, ENTRIES, ENTRY), np.uint8)
    wanted[[0, 2], 15], wanted[1, 0], wanted[3] = 7, 3, 5
    assert (got == wanted).all()
    options = {"shape": (WIDTH,), "dtype": np.dtype(np.uint8), "slab": slab}
    whole = state_gather(blocks, ids[0, 2:4], **options)
    assert (np.asarray(whole).reshape(2, ENTRIES, ENTRY) == wanted[2:4]).all()
    counted = jax.jit(lambda blocks: jnp.sum(blocks != 0))
    assert int(counted(blocks)) == 3 * ENTRY + WIDTH
