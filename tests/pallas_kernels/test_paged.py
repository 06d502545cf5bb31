"""paged_scatter and paged_gather: against their references and against plain numpy, bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import DTYPES, narrower_words, poisoned, random_bits, same_bits, word_of
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
    read = functools.partial(paged_gather, blocks, entries=8, shape=(4,), dtype=np.uint16)
    none = np.zeros(0, np.int32)
    assert read(np.zeros((0, 2), np.int32), none, none).shape == (0, 2, 8, 4)
    zeros = np.zeros(3, np.int32)
    assert read(np.zeros((3, 0), np.int32), zeros, zeros).shape == (3, 0, 8, 4)
    out = read(np.zeros((3, 2), np.int32), zeros, zeros)
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
def test_several_buffers_in_one_call(implementation):
    """Buffers of other sizes and dtypes, one of them not at 16 bytes, and the bytes between."""
    rng, entries = np.random.default_rng(0), 4
    slots = rng.permutation(BLOCKS * entries)[:6].astype(np.int32)
    values = [random_bits(i, name, (6, 5)) for i, name in enumerate(("bfloat16", "float32"))]
    blocks, starts = poisoned(BLOCKS, 96, np.uint16), (3, 40)
    wanted = blocks
    for value, start in zip(values, starts, strict=True):
        wanted = scattered(wanted, slots, value, entries, MARGIN + start)
    options = {"entries": entries, "starts": starts, "offset": MARGIN}
    run = paged_scatter(blocks, slots, values, implementation=implementation, **options)
    assert same_bits(run, wanted)
    assert same_bits(
        jax.jit(functools.partial(paged_scatter_reference, **options))(blocks, slots, values),
        wanted,
    )
