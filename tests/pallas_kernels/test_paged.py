"""paged_scatter and paged_gather: against their references and against plain numpy, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import (
    DTYPES,
    OUTSIDE,
    dtype_of,
    narrower_words,
    poisoned,
    random_bits,
    same_bits,
    word_of,
)

from pallas_kernels import (
    paged_gather,
    paged_gather_reference,
    paged_scatter,
    paged_scatter_reference,
)

BLOCKS, ROWS, COLUMNS, MARGIN = 5, 5, 2, 16
SIZES = [(entries, head) for entries in (1, 3, 12, 16, 24, 528) for head in (64, 80, 96, 576)]
DIAGONAL = [(1, 576), (3, 64), (16, 96), (24, 80)]
IMPLEMENTATIONS = (None, "xla")


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


def gathered(blocks, ids, keep, shape, dtype, offset):
    """The same with bytes and loops."""
    out = np.zeros((*keep.shape, *shape), dtype)
    size = out[0, 0, 0].nbytes // blocks.itemsize
    for s, m, e in zip(*np.nonzero(keep), strict=True):
        if 0 <= ids[s, m] < len(blocks):
            start = offset + e * size
            words = blocks[ids[s, m], start : start + size]
            out[s, m, e] = np.frombuffer(words.tobytes(), dtype).reshape(shape)
    return out


@functools.partial(jax.jit, static_argnames=("entries", "implementation"))
def scatter_both(blocks, slots, values, entries, implementation):
    options = {"entries": entries, "offset": MARGIN}
    run = paged_scatter(blocks, slots, values, implementation=implementation, **options)
    return run, paged_scatter_reference(blocks, slots, values, **options)


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "implementation"))
def gather_both(blocks, ids, keep, shape, dtype, implementation):
    options = {"shape": shape, "dtype": dtype, "offset": MARGIN}
    run = paged_gather(blocks, ids, keep, implementation=implementation, **options)
    return run, paged_gather_reference(blocks, ids, keep, **options)


def check(name, entries, shape, word, implementation=None):
    """Writes at random places, reads back through a table with holes; everything else is poison."""
    rng = np.random.default_rng(entries + int(np.prod(shape)))
    width = int(np.prod(shape)) * dtype_of(name).itemsize // word.itemsize
    blocks = poisoned(BLOCKS, entries * width + 2 * MARGIN, word)
    slots = rng.permutation(BLOCKS * entries)[:4]
    slots = np.asarray([*slots, BLOCKS * entries, *OUTSIDE], np.int32)
    values = random_bits(entries, name, (len(slots), *shape))
    run, reference = scatter_both(blocks, slots, values, entries, implementation)
    wanted = scattered(blocks, slots, values, entries, MARGIN)
    assert same_bits(run, wanted)
    assert same_bits(reference, wanted)
    ids = rng.integers(0, BLOCKS, (ROWS, COLUMNS)).astype(np.int32)
    ids[0, :2] = OUTSIDE[:2]
    ids[1, 1] = BLOCKS
    keep = rng.random((ROWS, COLUMNS, entries)) < 0.7
    run, reference = gather_both(run, ids, keep, shape, dtype_of(name), implementation)
    wanted = gathered(wanted, ids, keep, shape, dtype_of(name), MARGIN)
    assert same_bits(run, wanted)
    assert same_bits(reference, wanted)


@pytest.mark.parametrize(("entries", "head"), SIZES)
def test_every_size(entries, head):
    check("bfloat16", entries, (3, head), word_of("bfloat16"))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("entries", "head"), DIAGONAL)
def test_every_dtype(name, entries, head):
    check(name, entries, (3, head), word_of(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize(("entries", "head"), SIZES)
def test_every_size_of_every_dtype(name, entries, head):
    check(name, entries, (3, head), word_of(name))


@pytest.mark.parametrize(
    ("name", "word"),
    [(name, word) for name in ("float32", "bfloat16", "int32") for word in narrower_words(name)],
    ids=str,
)
def test_words_narrower_than_the_dtype(name, word):
    check(name, 3, (3, 8), word)


@pytest.mark.parametrize("shape", [(), (1,), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_entries_of_any_rank(shape, implementation):
    check("bfloat16", 4, shape, word_of("bfloat16"), implementation)


def test_nothing_to_move():
    blocks = poisoned(3, 32, np.uint16)
    none = np.zeros((0, 4), np.uint16)
    assert same_bits(paged_scatter(blocks, np.zeros(0, np.int32), none, entries=8), blocks)
    read = functools.partial(paged_gather, blocks, shape=(4,), dtype=np.dtype(np.uint16))
    out = read(np.zeros((0, 2), np.int32), np.ones((0, 2, 8), bool))
    assert out.shape == (0, 2, 8, 4)
    out = read(np.zeros((3, 2), np.int32), np.zeros((3, 2, 8), bool))
    assert out.shape == (3, 2, 8, 4)
    assert not np.asarray(out).any()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e5m2"])
def test_a_traced_offset_in_a_loop(name):
    """Layers in a scan: the same bits as with offsets that are known."""
    layers, entries, word = 3, 4, word_of(name)
    blocks = poisoned(BLOCKS, layers * entries * 8, word)
    slots = np.asarray([7, -1, 0, 19], np.int32)
    values = random_bits(0, name, (4, 8))

    @jax.jit
    def scanned(blocks):
        def body(blocks, layer):
            offset = layer * entries * 8
            return paged_scatter(blocks, slots, values, entries=entries, offset=offset), None

        return jax.lax.scan(body, blocks, jnp.arange(layers))[0]

    wanted = blocks
    for layer in range(layers):
        wanted = scattered(wanted, slots, values, entries, layer * entries * 8)
    assert same_bits(scanned(blocks), wanted)


GOOD = {
    "blocks": np.zeros((3, 32), np.uint16),
    "slots": np.zeros(2, np.int32),
    "values": np.zeros((2, 4), np.uint16),
    "ids": np.zeros((2, 3), np.int32),
    "keep": np.zeros((2, 3, 4), bool),
}


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
        ({"implementation": "triton"}, "implementation.*triton"),
    ],
)
def test_scatter_says_what_is_wrong(change, named):
    given = {"entries": 4, **{k: GOOD[k] for k in ("blocks", "slots", "values")}, **change}
    with pytest.raises(ValueError, match=named):
        paged_scatter(given.pop("blocks"), given.pop("slots"), given.pop("values"), **given)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"ids": np.zeros(2, np.int32)}, r"block_ids: wanted i32\[S, M\], got int32\[2\]"),
        ({"keep": np.zeros((2, 3, 4), np.int8)}, r"keep: wanted bool\[2, 3, E\], got int8"),
        ({"keep": np.zeros((3, 2, 4), bool)}, r"keep.*\[3, 2, 4\]"),
        ({"keep": np.zeros((2, 3, 9), bool)}, "at least 36 words a block, got 32"),
        ({"implementation": "cuda"}, "implementation.*cuda"),
    ],
)
def test_gather_says_what_is_wrong(change, named):
    given = {"shape": (4,), "dtype": np.dtype(np.uint16), **GOOD, **change}
    del given["slots"], given["values"]
    with pytest.raises(ValueError, match=named):
        paged_gather(given.pop("blocks"), given.pop("ids"), given.pop("keep"), **given)


def test_gpu_kernels_are_named_but_do_not_exist_yet():
    blocks, slots, values, ids, keep = GOOD.values()
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        paged_scatter(blocks, slots, values, entries=4, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="mosaic_gpu"):
        paged_gather(
            blocks, ids, keep, shape=(4,), dtype=np.dtype("u2"), implementation="mosaic_gpu"
        )
