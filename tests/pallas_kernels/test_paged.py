"""paged_scatter and paged_gather: against their references and against plain numpy, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    DTYPES,
    IN_SLABS,
    ROW,
    SLABS,
    narrower_words,
    poisoned,
    random_bits,
    same_bits,
    word_of,
)
from paged_cases import BLOCKS, MARGIN, check, scattered

from pallas_kernels import paged_gather, paged_scatter, paged_scatter_reference

SIZES = [(entries, head) for entries in (1, 3, 12, 16, 24, 528) for head in (64, 80, 96, 576)]
DIAGONAL = [(1, 576), (3, 64), (16, 96), (24, 80)]
IMPLEMENTATIONS = (None, "xla")


@pytest.mark.parametrize(("entries", "head"), SIZES)
def test_every_size(entries, head):
    check("bfloat16", entries, (3, head), word_of("bfloat16"))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("entries", "head"), DIAGONAL)
def test_every_dtype(name, entries, head):
    check(name, entries, (3, head), word_of(name))


@pytest.mark.parametrize(("name", "layout"), IN_SLABS, ids=str)
def test_every_dtype_in_slabs(name, layout):
    check(name, 3, (3, 5), word_of(name), tokens=20, layout=layout)


@pytest.mark.slow
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("entries", "head"), SIZES)
def test_every_size_of_every_dtype(name, entries, head):
    check(name, entries, (3, head), word_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("layout", SLABS, ids=str)
@pytest.mark.parametrize(("entries", "head"), DIAGONAL)
def test_every_dtype_in_all_slabs(name, layout, entries, head):
    check(name, entries, (3, head), word_of(name), tokens=20, layout=layout)


@pytest.mark.parametrize(
    ("name", "word"),
    [(name, word) for name in ("float32", "bfloat16", "int32") for word in narrower_words(name)],
    ids=str,
)
def test_words_narrower_than_the_dtype(name, word):
    for layout in (ROW, SLABS[-1]):
        check(name, 3, (3, 8), word, layout=layout)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_entries_of_any_rank(shape, implementation):
    check("bfloat16", 4, shape, word_of("bfloat16"), implementation)


def test_nothing_to_move():
    blocks = poisoned(3, 32, np.uint16)
    none = np.zeros((0, 4), np.uint16)
    assert same_bits(paged_scatter(blocks, np.zeros(0, np.int32), none, entries=8), blocks)
    read = functools.partial(paged_gather, blocks, entries=8, shape=(4,), dtype=np.uint16)
    none = np.zeros(0, np.int32)
    assert read(np.zeros((0, 2), np.int32), none, none).shape == (0, 2, 8, 4)
    zeros = np.zeros(3, np.int32)
    assert read(np.zeros((3, 0), np.int32), zeros, zeros).shape == (3, 0, 8, 4)
    out = read(np.zeros((3, 2), np.int32), zeros, zeros)
    assert out.shape == (3, 2, 8, 4)
    assert not np.asarray(out).any()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2"])
@pytest.mark.parametrize("layout", [ROW, SLABS[-1]], ids=str)
def test_a_traced_offset_in_a_loop(name, layout):
    """Layers in a scan: the same bits as with offsets that are known."""
    layers, entries, each, count = 3, 4, 16, BLOCKS * layout.per_row
    slots = np.asarray([7, -1, 0, 19, count * entries - 1], np.int32)
    values = random_bits(0, name, (5, each))
    wanted = blocks = poisoned(count, layers * entries * each, word_of(name))
    options = {"entries": entries, "slab": layout.slab(blocks.shape[1])}
    of_values = {"shape": (each,), "dtype": values.dtype}
    bounds = np.zeros(3, np.int32), np.full(3, entries, np.int32)
    ids = (slots[[0, 3, 4]] // entries)[:, None]

    def one_layer(blocks, layer):
        at = {"offset": layer * entries * each, **options}
        blocks = paged_scatter(blocks, slots, values, **at)
        read = paged_gather(blocks, ids, *bounds, **of_values, **at)
        # As words: XLA stacks bfloat16 and fp8 by way of float32, which loses the bits of NaNs.
        return blocks, jax.lax.bitcast_convert_type(read, blocks.dtype)

    scan = jax.jit(lambda blocks: jax.lax.scan(one_layer, blocks, jnp.arange(layers)))
    got, there = scan(layout.laid(blocks))
    for layer in range(layers):
        wanted = scattered(wanted, slots, values, entries, layer * entries * each)
    assert same_bits(got, layout.laid(wanted))
    shown = wanted[ids].reshape(3, layers, 1, entries, each)
    assert same_bits(there, np.moveaxis(shown, 1, 0))


GOOD = {
    "blocks": np.zeros((3, 32), np.uint16),
    "slots": np.zeros(2, np.int32),
    "values": np.zeros((2, 4), np.uint16),
    "ids": np.zeros((2, 3), np.int32),
    "starts": np.zeros(2, np.int32),
    "stops": np.zeros(2, np.int32),
}
SCATTER, GATHER = ("blocks", "slots", "values"), ("blocks", "ids", "starts", "stops")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"blocks": np.zeros((3, 32), np.int16)}, r"blocks: wanted u\[N, W\], got int16"),
        ({"blocks": np.zeros(32, np.uint16)}, r"blocks.*\[32\]"),
        ({"blocks": np.zeros((3, 15), np.uint16)}, "at least 16 words a block, got 15"),
        ({"blocks": np.zeros((3, 32), np.uint32)}, "at most 2 bytes"),
        ({"slots": np.zeros(2, np.int16)}, r"slots: wanted i32\[T\], got int16"),
        ({"slots": np.zeros((2, 1), np.int32)}, r"slots.*\[2, 1\]"),
        ({"values": np.zeros((3, 4), np.uint16)}, r"values: wanted \[2, ...\], got \[3, 4\]"),
        ({"entries": 9}, "at least 36 words a block, got 32"),
        ({"entries": 2**30}, r"2\^31 slots"),
        ({"offset": 4}, r"offset: wanted a multiple of 8 words, which is 16 bytes, got 4"),
        ({"starts": (0, 4)}, "starts: wanted 1, one for each buffer, got 2"),
        ({"slab": (2, 8)}, "at least 16 words a block, got 8"),
        ({"slab": (3, 16)}, "slab: wanted at most 32 words, got 3 blocks of 16"),
        ({"slab": (0, 16)}, "slab: wanted at most 32 words, got 0 blocks of 16"),
        ({"slab": (1, 20)}, r"slab: block of.* a multiple of 8 words, which is 16 bytes, got 20"),
        ({"slab": (2, 16), "entries": 2**29}, r"2\^31 slots, got 6 \* 536870912"),
        ({"implementation": "triton"}, "implementation.*triton"),
    ],
)
def test_scatter_says_what_is_wrong(change, named):
    given = {"entries": 4, **{k: GOOD[k] for k in SCATTER}, **change}
    with pytest.raises(ValueError, match=named):
        paged_scatter(*[given.pop(k) for k in SCATTER], **given)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ids": np.zeros(2, np.int32)}, r"block_ids: wanted i32\[S, M\], got int32\[2\]"),
        ({"starts": np.zeros(2, np.int16)}, r"starts: wanted i32\[2\], got int16"),
        ({"stops": np.zeros(3, np.int32)}, r"stops: wanted i32\[2\], got int32\[3\]"),
        ({"entries": 9}, "at least 36 words a block, got 32"),
        ({"offset": 9}, "offset: wanted a multiple of 8 words"),
        ({"slab": (2, 16), "offset": 8}, "at least 24 words a block, got 16"),
        ({"implementation": "cuda"}, "implementation.*cuda"),
    ],
)
def test_gather_says_what_is_wrong(change, named):
    given = {"entries": 4, "shape": (4,), "dtype": np.uint16}
    given |= {k: GOOD[k] for k in GATHER} | change
    with pytest.raises(ValueError, match=named):
        paged_gather(*[given.pop(k) for k in GATHER], **given)


def test_gpu_kernels_are_refused_where_there_is_no_gpu():
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu: wanted a Hopper GPU.*got cpu"):
        paged_scatter(*map(GOOD.get, SCATTER), entries=4, implementation="mosaic_gpu")
    options = {"entries": 4, "shape": (4,), "dtype": np.uint16}
    with pytest.raises(NotImplementedError, match=r"mosaic_gpu: wanted a Hopper GPU.*got cpu"):
        paged_gather(*map(GOOD.get, GATHER), implementation="mosaic_gpu", **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("layout", [ROW, SLABS[-1]], ids=str)
def test_several_buffers_in_one_call(implementation, layout):
    """Buffers of other sizes and dtypes, one of them not at 16 bytes, and the bytes between."""
    rng, entries, count, width = np.random.default_rng(0), 4, BLOCKS * layout.per_row, 96
    slots = rng.permutation(count * entries)[:6].astype(np.int32)
    values = [random_bits(i, name, (6, 5)) for i, name in enumerate(("bfloat16", "float32"))]
    blocks, starts = poisoned(count, width, np.uint16), (3, 40)
    wanted = blocks
    for value, start in zip(values, starts, strict=True):
        wanted = scattered(wanted, slots, value, entries, MARGIN + start)
    options = {"entries": entries, "starts": starts, "offset": MARGIN, "slab": layout.slab(width)}
    given = (layout.laid(blocks), slots, values)
    run = paged_scatter(*given, implementation=implementation, **options)
    reference = jax.jit(functools.partial(paged_scatter_reference, **options))(*given)
    assert same_bits(run, layout.laid(wanted))
    assert same_bits(reference, layout.laid(wanted))
