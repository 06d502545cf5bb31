"""The GPU kernels compiled to machine code, for cards that are not there."""

import functools
import itertools
import os
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import CARD, Compiled, compiled
from kernel_cases import dtype_of

from pallas_kernels import copy_blocks, paged_gather, paged_scatter, state_gather, state_scatter
from pallas_kernels.mosaic_gpu import ring

IN, OUT = "cp.async.bulk.shared::cta.global", "cp.async.bulk.global.shared::cta"
ROWS, TOKENS = 32, 8192
CORE_BYTES = 228 << 10  # shared memory of a core, Hopper and Blackwell alike
NUMBERS = itertools.count()

# Entries of one buffer in real caches: entries of a block, shape, dtype.
ENTRIES = {
    "8 heads of 64": (16, (8, 64), "bfloat16"),
    "1 head of 80": (16, (1, 80), "bfloat16"),
    "4 heads of 96": (16, (4, 96), "float16"),
    "8 heads of 128": (16, (8, 128), "bfloat16"),
    "4 heads of 192": (16, (4, 192), "bfloat16"),
    "2 heads of 256": (16, (2, 256), "float8_e4m3fn"),
    "1 head of 512": (16, (1, 512), "bfloat16"),
    "latent of 576": (64, (576,), "bfloat16"),
    "scales of 8 heads": (16, (8,), "float32"),
    "64 KB each": (4, (128, 128), "float32"),
}
# What a bulk copy can take in blocks only, not entry by entry.
ODD_ENTRIES = {
    "entry of 584 bytes": (64, (584,), "uint8"),
    "indexer entry of 132 bytes": (64, (132,), "uint8"),
    "scale of 1 head": (16, (1,), "float32"),
    "7 scales of 8 bits": (16, (7,), "uint8"),
}


def shaped(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


def ids(*shape):
    return shaped(shape, jnp.int32)


def blocks_for(entries, shape, dtype, layers=3, per_row=1, spare=0):
    """u[N, W] of blocks of some layers, and behind those of a row so many bytes to spare."""
    count = 50_000 // per_row + next(
        NUMBERS
    )  # another one each time, so that no kernel has been seen before
    size = entries * int(np.prod(shape)) * dtype.itemsize
    word = np.dtype(f"uint{8 * min(dtype.itemsize, 4)}")
    row = per_row * layers * -(-size // 16) * 16 + spare
    return shaped((count, row // word.itemsize), word)


def proven(result: Compiled, blocks, in_place: bool, is_bulk: bool, temporary: int = 0):
    """What holds for every kernel."""
    pool = blocks.size * blocks.dtype.itemsize
    assert result.has_machine_code
    assert result.launches == len(result.kernels) == 1
    assert result.spilled == 0
    assert result.registers <= 64
    # Two programs share a core, of which each also takes 1 KB for the system.
    assert 2 * (result.shared_memory + 1024) <= CORE_BYTES
    assert (result.shared_memory > 0) == is_bulk
    assert result.temporary <= temporary
    assert result.aliased == (pool if in_place else 0)
    assert result.copies(blocks.shape) == 0
    for instruction in (IN, OUT):
        assert (instruction in result.kernels[0]) == is_bulk
    assert "cp.async.bulk.tensor" not in result.kernels[0]
    waits = set(re.findall(r"cp\.async\.bulk\.(wait_group\S*\s+\d+)", result.kernels[0]))
    # The interpreter copies out of shared memory at once and passes over these: the ring waits for
    # the copies out of the stage that it reads into next, and at the end until all have arrived.
    before_reading = f"wait_group.read \t{ring.STAGES - ring.AHEAD}"
    assert waits == ({before_reading, "wait_group \t0"} if is_bulk else set())


def fences(result: Compiled) -> int:
    """Where words that threads have set are made visible to the copies, which go by another way."""
    return result.kernels[0].count("fence.proxy.async")


@pytest.mark.parametrize("name", [*ENTRIES, *ODD_ENTRIES])
def test_scatter(name):
    entries, shape, dtype = {**ENTRIES, **ODD_ENTRIES}[name]
    blocks = blocks_for(entries, shape, dtype_of(dtype))
    values = shaped((TOKENS, *shape), dtype_of(dtype))
    write = functools.partial(paged_scatter, entries=entries)
    result = compiled(write, blocks, ids(TOKENS), values, donate=0)
    proven(result, blocks, in_place=True, is_bulk=name in ENTRIES)


@pytest.mark.parametrize("start", [8, 4])
def test_scatter_to_a_place_that_is_no_multiple_of_16_bytes(start):
    """The interpreter would take a bulk copy to anywhere."""
    blocks = shaped((60_000 + start, 16 * 64 + 16), np.uint16)
    values = shaped((TOKENS, 64), np.uint16)
    write = functools.partial(paged_scatter, entries=16, starts=(start,))
    result = compiled(write, blocks, ids(TOKENS), values, donate=0)
    proven(result, blocks, in_place=True, is_bulk=start == 8)


@pytest.mark.parametrize("name", [*ENTRIES, *ODD_ENTRIES])
def test_gather(name):
    entries, shape, dtype = {**ENTRIES, **ODD_ENTRIES}[name]
    dtype = dtype_of(dtype)
    blocks = blocks_for(entries, shape, dtype)
    read = functools.partial(paged_gather, entries=entries, shape=shape, dtype=dtype)
    result = compiled(read, blocks, ids(ROWS, 48), ids(ROWS), ids(ROWS))
    proven(result, blocks, in_place=False, is_bulk=True)
    # Behind the stage of zeros, and behind the entries of a piece that are hidden, or of two sizes.
    assert fences(result) >= (1 if name == "64 KB each" else 2)


SLABS = [
    ("8 heads of 128", 3, 48),
    ("latent of 576", 11, 16),
    ("64 KB each", 1, 16),
    ("entry of 584 bytes", 11, 0),
    ("8 heads of 64", 3, 6),
]


@pytest.mark.parametrize(("name", "per_row", "spare"), SLABS)
def test_slabs(name, per_row, spare):
    """By bulk copies as in rows, unless the rows themselves are no multiple of 16 bytes."""
    entries, shape, dtype = {**ENTRIES, **ODD_ENTRIES}[name]
    dtype = dtype_of(dtype)
    blocks = blocks_for(entries, shape, dtype, per_row=per_row, spare=spare)
    width = (blocks.shape[1] - spare // blocks.dtype.itemsize) // per_row
    options = {"entries": entries, "slab": (per_row, width)}
    write = functools.partial(paged_scatter, **options)
    values = shaped((TOKENS, *shape), dtype)
    result = compiled(write, blocks, ids(TOKENS), values, donate=0)
    is_bulk = spare % 16 == 0
    proven(result, blocks, in_place=True, is_bulk=is_bulk and name in ENTRIES)
    read = functools.partial(paged_gather, shape=shape, dtype=dtype, **options)
    result = compiled(read, blocks, ids(ROWS, 48), ids(ROWS), ids(ROWS))
    proven(result, blocks, in_place=False, is_bulk=is_bulk)


@pytest.mark.parametrize(("size", "per_row"), [(2 << 10, 1), (33_792, 1), (4 << 20, 1), (48, 11)])
def test_copy(size, per_row):
    """Blocks of all layers, from the smallest to the largest, and in slabs."""
    blocks = shaped((1000, per_row * size // 2 + (per_row > 1) * 8), np.uint16)
    copy = functools.partial(copy_blocks, slab=(per_row, size // 2) if per_row > 1 else None)
    result = compiled(copy, blocks, ids(64), ids(64), donate=0)
    proven(result, blocks, in_place=True, is_bulk=True)


def test_copy_of_blocks_that_are_no_multiple_of_16_bytes():
    blocks = shaped((1000, 1001), np.uint16)
    result = compiled(copy_blocks, blocks, ids(64), ids(64), donate=0)
    proven(result, blocks, in_place=True, is_bulk=False)


# (convolution, recurrence) of one layer.
STATES = {
    "gated delta net": (((8192, 3), "bfloat16"), ((32, 128, 128), "float32")),
    "64 x 128 x 128": (((6144, 3), "bfloat16"), ((64, 128, 128), "float32")),
}


@pytest.mark.parametrize(
    ("name", "per_row"), [*((name, 1) for name in STATES), (next(iter(STATES)), 3)]
)
def test_states(name, per_row):
    shapes = [(shape, dtype_of(dtype)) for shape, dtype in STATES[name]]
    sizes = [int(np.prod(shape)) * dtype.itemsize // 2 for shape, dtype in shapes]
    blocks = shaped((300, per_row * 36 * sum(sizes) + (per_row > 1) * 8), np.uint16)
    slab = (per_row, 36 * sum(sizes)) if per_row > 1 else None
    values = tuple(shaped((ROWS, *shape), dtype) for shape, dtype in shapes)

    def write(blocks, rows, values, layer):
        offset = layer * sum(sizes)
        options = {"starts": (0, sizes[0]), "offset": offset, "slab": slab}
        return state_scatter(blocks, rows, values, **options)

    result = compiled(write, blocks, ids(ROWS), values, ids(), donate=0)
    # Where a layer lies that is not known is a number of 4 bytes, which XLA reckons.
    proven(result, blocks, in_place=True, is_bulk=True, temporary=4)
    for (shape, dtype), start in zip(shapes, (0, sizes[0]), strict=True):
        options = {"shape": shape, "dtype": dtype, "offset": start, "slab": slab}
        read = functools.partial(state_gather, **options)
        result = compiled(read, blocks, ids(ROWS))
        proven(result, blocks, in_place=False, is_bulk=True)


@pytest.mark.parametrize("per_row", [1, 12])
def test_more_than_2_to_the_31_elements(per_row):
    """Addresses are products of 64 bits: the bytes of a row times its number."""
    width = 16 * 3073
    row = per_row * width + (per_row > 1) * 16
    blocks = shaped((1_000_003 // per_row, row), np.uint8)
    assert blocks.size > 2**31 * 4  # also when counted in words of 4 bytes, as the kernels do
    slab = (per_row, width) if per_row > 1 else None
    write = functools.partial(paged_scatter, entries=16, slab=slab)
    values = shaped((TOKENS, 1024), np.uint8)
    options = {"entries": 16, "shape": (1024,), "dtype": np.dtype(np.uint8), "slab": slab}
    read = functools.partial(paged_gather, **options)
    copy = functools.partial(copy_blocks, slab=slab)
    for result in (
        compiled(write, blocks, ids(TOKENS), values, donate=0),
        compiled(read, blocks, ids(ROWS, 40), ids(ROWS), ids(ROWS)),
        compiled(copy, blocks, ids(63), ids(63), donate=0),
    ):
        assert result.temporary == 0
        # A row's words times its number, with all bits of the product, and never with fewer.
        wide = rf"(mul\.wide\.[su]32|m(ul|ad)\.lo\.s64) [^;]*\b{row // 4}\b"
        assert re.search(wide, result.kernels[0])
        assert not re.search(rf"m(ul|ad)\.lo\.[su]32 [^;]*\b{row // 4}\b", result.kernels[0])


@pytest.mark.slow
def test_for_another_card():
    """All of the above for a Blackwell GPU, in a process of its own."""
    if CARD != "h200":
        pytest.skip("this is that process")
    environment = {**os.environ, "KVPOOL_CARD": "b200"}
    command = [sys.executable, "-m", "pytest", "-n", "0", "-rs", __file__]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    if "NOT PROVEN" in run.stdout:
        pytest.skip("NOT PROVEN: no kernel was compiled for b200")
    assert run.returncode == 0, run.stdout
