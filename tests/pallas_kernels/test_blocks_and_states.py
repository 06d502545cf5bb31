"""copy_blocks, state_gather and state_scatter: against references and plain numpy, bit for bit."""

import functools

import jax
import numpy as np
import pytest
from kernel_cases import (
    DTYPES,
    IN_SLABS,
    OUTSIDE,
    ROW,
    SLABS,
    Layout,
    dtype_of,
    narrower_words,
    poisoned,
    random_bits,
    same_bits,
    word_of,
)

from pallas_kernels import (
    copy_blocks,
    copy_blocks_reference,
    state_gather,
    state_gather_reference,
    state_scatter,
    state_scatter_reference,
)
from pallas_kernels.copy_blocks import PIECE_BYTES
from pallas_kernels.state_scatter import SMALL_BYTES

MARGIN = 16  # words before the first buffer
SMALL, LARGE = (2, 12), (2, SMALL_BYTES // 2 + 6)  # of one byte or more: written together, by row


def copied(blocks, src, dst):
    """The same with a loop."""
    out = blocks.copy()
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        if 0 <= source < len(blocks) and 0 <= target < len(blocks):
            out[target] = blocks[source]
    return out


@pytest.mark.parametrize("word", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize(
    ("pieces", "layout"), [(0.01, ROW), (1, ROW), (2.3, ROW), (2.3, Layout(3, 5))], ids=str
)
def test_copies_of_whole_blocks(word, pieces, layout):
    width = layout.width(int(pieces * PIECE_BYTES) // np.dtype(word).itemsize, word)
    blocks = random_bits(1, np.dtype(word).name, (9, width))
    check_copies(blocks, layout)


@pytest.mark.parametrize("layout", SLABS, ids=str)
def test_copies_in_slabs(layout):
    check_copies(random_bits(1, "uint16", (9 * layout.per_row, 40)), layout)


def check_copies(blocks, layout):
    """From one block, into several; the last ones; and pairs of which either is absent."""
    end = len(blocks)
    src = np.asarray([0, -1, 3, 2**31 - 1, 5, end - 1, end, 3], np.int32)
    dst = np.asarray([6, 2, end - 2, 1, -(2**31), 4, 2, 1], np.int32)
    array, wanted = layout.laid(blocks), layout.laid(copied(blocks, src, dst))
    slab = layout.slab(blocks.shape[1])
    for implementation in (None, "xla"):
        got = copy_blocks(array, src, dst, slab=slab, implementation=implementation)
        assert same_bits(got, wanted)
    reference = functools.partial(copy_blocks_reference, slab=slab)
    assert same_bits(jax.jit(reference)(array, src, dst), wanted)
    none = np.full(8, -1, np.int32)
    assert same_bits(copy_blocks(array, none, dst, slab=slab), array)
    assert same_bits(copy_blocks(array, none[:0], none[:0], slab=slab), array)


def test_copies_say_what_is_wrong():
    blocks, ids = poisoned(3, 8, np.uint8), np.zeros(2, np.int32)
    for arguments, named in (
        ((blocks.astype(np.int8), ids, ids), r"blocks: wanted u\[N, W\], got int8"),
        ((blocks, ids.astype(np.int16), ids), r"src: wanted i32\[K\], got int16"),
        ((blocks, ids, ids[:1]), r"dst: wanted i32\[2\] as src, got i32\[1\]"),
    ):
        with pytest.raises(ValueError, match=named):
            copy_blocks(*arguments)
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        copy_blocks(blocks, ids, ids, implementation="mosaic_gpu")


@functools.partial(jax.jit, static_argnames=("starts", "slab", "implementation"))
def write_both(blocks, ids, values, starts, slab=None, implementation=None):
    options = {"starts": starts, "offset": MARGIN, "slab": slab}
    return (
        state_scatter(blocks, ids, values, implementation=implementation, **options),
        state_scatter_reference(blocks, ids, values, **options),
    )


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "slab"))
def read_both(blocks, ids, shape, dtype, offset, slab=None):
    options = {"shape": shape, "dtype": dtype, "offset": offset, "slab": slab}
    return state_gather(blocks, ids, **options), state_gather_reference(blocks, ids, **options)


def check(names, shape, word, layout=ROW):
    """States of several buffers, side by side, for rows of which some have no block."""
    count = 5 * layout.per_row
    ids = np.asarray([count - 1, -1, 0, count, 2**31 - 1, 2], np.int32)
    values = tuple(random_bits(i, name, (len(ids), *shape)) for i, name in enumerate(names))
    padded = [-(-value[0].nbytes // 16) * 16 // word.itemsize for value in values]
    starts = tuple(np.cumsum([0, *padded[:-1]]).tolist())
    blocks = poisoned(count, layout.width(MARGIN + sum(padded) + 3, word), word)
    array, slab = layout.laid(blocks), layout.slab(blocks.shape[1])
    got = [np.asarray(out) for out in write_both(array, ids, values, starts, slab)]
    for value, start in zip(values, starts, strict=True):
        for row in (0, 2, 5):
            words = np.frombuffer(value[row].tobytes(), word)
            blocks[ids[row], MARGIN + start : MARGIN + start + words.size] = words
    for out in got:
        padding = between(layout, blocks, starts, values)
        assert same_bits(
            np.where(padding, array, out), np.where(padding, array, layout.laid(blocks))
        )
    blocks[[1, 3]] = random_bits(9, word.name, blocks[[1, 3]].shape)
    for name, value, start in zip(names, values, starts, strict=True):
        there = value.copy()
        there[[1, 3, 4]] = np.zeros((), there.dtype)
        for got in read_both(layout.laid(blocks), ids, shape, dtype_of(name), MARGIN + start, slab):
            assert same_bits(got, there)


def between(layout, blocks, starts, values):
    """bool[N, W]: the words between two buffers, which may be overwritten."""
    padding = np.zeros(blocks.shape, bool)
    padding[:, MARGIN : MARGIN + starts[-1]] = True
    for value, start in zip(values, starts, strict=True):
        padding[:, MARGIN + start :][:, : value[0].nbytes // blocks.itemsize] = False
    return layout.laid(padding.astype(blocks.dtype)) == 1


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_states_of_every_dtype(name, shape):
    check([name], shape, word_of(name))


@pytest.mark.parametrize(("name", "layout"), IN_SLABS, ids=str)
def test_states_of_every_dtype_in_slabs(name, layout):
    check([name], SMALL, word_of(name), layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("layout", SLABS, ids=str)
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_states_of_every_dtype_in_all_slabs(name, layout, shape):
    check([name], shape, word_of(name), layout)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("layout", [ROW, SLABS[1]], ids=str)
def test_states_of_several_dtypes(shape, layout):
    check(["bfloat16", "float32", "float8_e5m2", "int8"], shape, np.dtype(np.uint8), layout)
    check(["float32", "bfloat16"], shape, narrower_words("bfloat16")[-1], layout)


@pytest.mark.parametrize("ids", [np.zeros(0, np.int32), np.asarray(OUTSIDE, np.int32)])
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_states_of_no_row(ids, shape):
    blocks = poisoned(2, MARGIN + int(np.prod(shape)), np.uint16)
    values = (random_bits(0, "bfloat16", (len(ids), *shape)),)
    for out in write_both(blocks, ids, values, (0,)):
        assert same_bits(out, blocks)
    for out in read_both(blocks, ids, shape, dtype_of("bfloat16"), MARGIN):
        assert same_bits(out, np.zeros((len(ids), *shape), dtype_of("bfloat16")))


def test_gaps_between_buffers():
    """Buffers padded to a common alignment: the values are whole, whatever the padding holds."""
    ids = np.asarray([1, 0], np.int32)
    values = (random_bits(0, "int8", (2, 3)), random_bits(1, "int8", (2, 5)))
    for out in write_both(poisoned(2, 50, np.uint8), ids, values, (0, 16)):
        for row, block in enumerate(ids):
            got = np.asarray(out)[block]
            assert same_bits(got[16:19], values[0][row].view(np.uint8))
            assert same_bits(got[32:37], values[1][row].view(np.uint8))
            assert (got[[*range(16), *range(37, 50)]] == 255).all()


def test_states_say_what_is_wrong():
    blocks, ids = poisoned(3, 32, np.uint8), np.zeros(2, np.int32)
    value = np.zeros((2, 16), np.int8)
    for values, starts, named in (
        ((value,), (0, 8), "starts: wanted 1, one for each buffer, got 2"),
        ((value, value), (0, 8), "starts: wanted at least 16 for the next buffer, got 8"),
        ((value[:1],), (0,), r"values: wanted \[2, ...\], got \[1, 16\]"),
        ((value, value), (0, 17), "at least 33 words a block, got 32"),
        ((), (), "starts"),
    ):
        with pytest.raises(ValueError, match=named):
            state_scatter(blocks, ids, values, starts=starts)
    with pytest.raises(ValueError, match=r"block_ids: wanted i32\[S\], got int32\[2, 1\]"):
        state_gather(blocks, ids[:, None], shape=(4,), dtype=np.dtype(np.int8))
    with pytest.raises(ValueError, match="at least 32 words a block, got 16"):
        state_scatter(blocks, ids, (value, value), starts=(0, 16), slab=(2, 16))
    with pytest.raises(ValueError, match="slab: wanted at most 32 words, got 3 blocks of 16"):
        state_gather(blocks, ids, shape=(4,), dtype=np.dtype(np.int8), slab=(3, 16))
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        state_scatter(blocks, ids, (value,), starts=(0,), implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        state_gather(blocks, ids, shape=(4,), dtype=np.dtype(np.int8), implementation="mosaic_gpu")
