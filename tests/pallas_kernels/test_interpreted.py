"""The GPU kernels in Mosaic's interpreter, with race detection: the same bits as plain numpy.

The interpreter simulates shared memory, barriers and bulk copies, and refuses a read out of
bounds. It runs two programs, so that one takes several items and the ring goes round.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel_cases import (
    DTYPES,
    IN_SLABS,
    ROW,
    Layout,
    dtype_of,
    poisoned,
    random_bits,
    same_bits,
    word_of,
)
from paged_cases import check, scattered

from pallas_kernels import (
    copy_blocks,
    paged_gather,
    paged_scatter,
    state_gather,
    state_gather_reference,
    state_scatter,
    state_scatter_reference,
)
from pallas_kernels.mosaic_gpu import ring
from pallas_kernels.mosaic_gpu.versions import interpreted

check = functools.partial(check, implementation="mosaic_gpu", context=interpreted)
PIECE = ring.PIECE_BYTES


SIZES = [(entries, head) for entries in (1, 3, 12, 16, 24, 528) for head in (64, 80, 96, 576)]
FEW = [(1, 64), (3, 80), (12, 576), (16, 96), (24, 64), (528, 80)]


@pytest.mark.parametrize(("entries", "head"), FEW)
def test_sizes(entries, head):
    check("bfloat16", entries, (3, head), word_of("bfloat16"))


@pytest.mark.slow
@pytest.mark.parametrize(("entries", "head"), [size for size in SIZES if size not in FEW])
def test_more_sizes(entries, head):
    check("bfloat16", entries, (3, head), word_of("bfloat16"))


@pytest.mark.parametrize("head", [128, 192, 256, 512])
def test_heads(head):
    check("bfloat16", 16, (1, head), word_of("bfloat16"))


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(name):
    check(name, 4, (3, 16), word_of(name))


@pytest.mark.parametrize(
    ("name", "entries", "shape", "layout"),
    [
        ("bfloat16", 4, (3, 16), Layout(3, 16)),
        ("uint8", 4, (584,), Layout(11, 16)),
        ("bfloat16", 1, (PIECE // 2 + 8,), Layout(1, 8)),
        ("float32", 3, (33,), Layout(11, 5)),
    ],
    ids=["bulk", "bulk by blocks", "several pieces", "plain"],
)
def test_slabs(name, entries, shape, layout):
    check(name, entries, shape, word_of(name), tokens=6, layout=layout)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), IN_SLABS, ids=str)
def test_every_dtype_in_slabs(name, layout):
    check(name, 3, (3, 16), word_of(name), tokens=20, layout=layout)


ODD = [("uint8", size) for size in (1, 2, 7, 50, 132, 584)]


@pytest.mark.parametrize(("name", "size"), [*ODD, ("bfloat16", 33), ("float32", 33)])
def test_entries_that_are_no_multiple_of_16_bytes(name, size):
    """One word; a few; and in blocks of 16 entries, which together are a multiple."""
    for entries in (3, 16):
        check(name, entries, (size,), word_of(name))


@pytest.mark.parametrize("tokens", [1, 2, 60])
def test_any_number_of_tokens(tokens):
    """As few as need no batch, and as many as send the ring round."""
    check("bfloat16", 16, (2, 64), word_of("bfloat16"), tokens=tokens)
    check("uint8", 16, (5,), word_of("uint8"), tokens=tokens)


@pytest.mark.parametrize("size", [PIECE, PIECE + 16, 3 * PIECE, 2 * PIECE + 4])
def test_entries_of_several_pieces(size):
    """Of so many bytes: whole pieces, a short last one, and what only the plain path can take."""
    check("bfloat16", 1, (size // 2,), word_of("bfloat16"), tokens=3)


def test_words_wider_than_the_dtype():
    check("float32", 3, (3, 8), np.dtype(np.uint8))
    check("float32", 4, (3, 8), np.dtype(np.uint16))


WIDTHS = [(width, ROW) for width in (8, 1001, 3 * PIECE // 2, 5 * PIECE // 2 + 8)]
WIDTHS += [(3 * PIECE // 2, Layout(3, 8)), (40, Layout(11, 3))]


@pytest.mark.parametrize(("width", "layout"), WIDTHS, ids=str)
def test_copies(width, layout):
    end = -(-40 // layout.per_row) * layout.per_row
    blocks = random_bits(width, "uint16", (end, width))
    rng = np.random.default_rng(width)
    ids = rng.permutation(end).astype(np.int32)
    src, dst = (np.concatenate([part, [-1, 3, end, 2**31 - 1]]) for part in (ids[:15], ids[15:30]))
    dst = np.where(src == 3, -(2**31), dst).astype(np.int32)
    wanted = blocks.copy()
    for source, target in zip(src.tolist(), dst.tolist(), strict=True):
        if 0 <= source < end and 0 <= target < end:
            wanted[target] = blocks[source]
    given = layout.laid(blocks), src.astype(np.int32), dst
    with interpreted():
        got = np.asarray(copy_blocks(*given, slab=layout.slab(width)))
    assert same_bits(got, layout.laid(wanted))


STATES = (("bfloat16", (24, 3)), ("float32", (2, 16, 128)), ("int8", (5,)))


@pytest.mark.parametrize("layout", [ROW, Layout(3, 16)], ids=str)
def test_states(layout):
    """A convolution's tail, a large state, and a buffer that no bulk copy takes, in one call."""
    count, width = 6, 20_000
    ids = np.asarray([4, -1, 0, count, 2**31 - 1, 2], np.int32)
    values = tuple(random_bits(i, name, (6, *shape)) for i, (name, shape) in enumerate(STATES))
    starts, offset = (0, 160, 160 + 2 * 16 * 128 * 4), 32
    blocks = layout.laid(poisoned(count, width, np.uint8))
    options = {"starts": starts, "offset": offset, "slab": layout.slab(width)}
    with interpreted():
        got = np.asarray(state_scatter(blocks, ids, values, implementation="mosaic_gpu", **options))
    wanted = jax.jit(functools.partial(state_scatter_reference, **options))(blocks, ids, values)
    assert same_bits(got, wanted)
    for (name, shape), start in zip(STATES, starts, strict=True):
        options |= {"shape": shape, "dtype": dtype_of(name), "offset": offset + start}
        options.pop("starts", None)
        with interpreted():
            there = np.asarray(state_gather(got, ids, implementation="mosaic_gpu", **options))
        wanted = jax.jit(functools.partial(state_gather_reference, **options))(got, ids)
        assert same_bits(there, wanted)
        assert not there[[1, 3, 4]].view(np.uint8).any()


@pytest.mark.parametrize("layout", [ROW, Layout(2, 8)], ids=str)
def test_a_block_is_read_as_often_as_it_is_named(layout):
    blocks = random_bits(0, "uint16", (4, 64))
    ids = np.asarray([[2, 2, 2], [2, 1, 2]], np.int32)
    bounds = np.zeros(2, np.int32), np.full(2, 24, np.int32)
    options = {"entries": 8, "shape": (8,), "dtype": np.uint16, "slab": layout.slab(64)}
    with interpreted():
        got = paged_gather(layout.laid(blocks), ids, *bounds, **options)
    assert same_bits(got, blocks[ids].reshape(2, 3, 8, 8))


def test_what_is_not_shown_is_not_read():
    """Of a block without a shown entry no bit is fetched: its id may as well be out of reach."""
    blocks = poisoned(4, 64, np.uint16)
    ids = np.asarray([[1, 3, 2**30]], np.int32)
    bounds = np.asarray([0], np.int32), np.asarray([0], np.int32)
    with interpreted():
        got = paged_gather(blocks, ids, *bounds, entries=8, shape=(8,), dtype=np.uint16)
    assert not np.asarray(got).any()


@pytest.mark.parametrize("layout", [ROW, Layout(3, 8)], ids=str)
def test_a_traced_offset(layout):
    """Layers in a scan, of which each has its words in the blocks."""
    layers, entries, width = 3, 4, 3 * 4 * 8
    blocks = layout.laid(poisoned(6, width, np.uint16))
    slots = np.asarray([7, -1, 0, 19, 23], np.int32)
    values = random_bits(0, "bfloat16", (5, 8))
    options = {"entries": entries, "slab": layout.slab(width)}

    def write(blocks, layer):
        return paged_scatter(blocks, slots, values, offset=layer * entries * 8, **options), None

    scan = jax.jit(lambda blocks: jax.lax.scan(write, blocks, jnp.arange(layers))[0])
    wanted = np.asarray(scan(blocks))
    with interpreted():
        got = np.asarray(scan(blocks))
    assert same_bits(got, wanted)


def test_64_bit_mode():
    blocks, ids = random_bits(0, "uint16", (6, 256)), np.arange(3, dtype=np.int32)
    wanted = np.concatenate([blocks[:3]] * 2)
    with jax.enable_x64(True), interpreted():
        assert same_bits(copy_blocks(blocks, ids, ids + 3), wanted)


def test_a_race_is_found(monkeypatch):
    """Without the wait for a piece to arrive: the proofs above can fail."""
    monkeypatch.setattr(plgpu, "barrier_wait", lambda _: None)
    blocks, ids = poisoned(3, 56, np.uint16), np.asarray([[1]], np.int32)
    bounds = np.asarray([2], np.int32), np.asarray([7], np.int32)
    with pytest.raises(RuntimeError, match="race"), interpreted():
        paged_gather(
            blocks, ids, *bounds, entries=7, shape=(8,), dtype=np.uint16
        ).block_until_ready()
    many = np.arange(40, dtype=np.int32)
    with pytest.raises(RuntimeError, match="race"), interpreted():
        copy_blocks(poisoned(80, 56, np.uint16), many, many + 40).block_until_ready()


SEVERAL = ("bfloat16", "float32", "uint16"), (8, 4, 3), (0, 48, 96)
AT_ODD_PLACES = ("bfloat16", "float32"), (8, 4), (1, 41)


@pytest.mark.parametrize(
    ("names", "sizes", "starts", "layout"),
    [(*SEVERAL, ROW), (*AT_ODD_PLACES, ROW), (*SEVERAL, Layout(3, 8))],
    ids=["one of them plain", "at odd places", "in slabs"],
)
def test_several_buffers_of_several_entries(names, sizes, starts, layout):
    rng, entries, count, margin = np.random.default_rng(0), 4, 6, 16
    slots = np.asarray([*rng.permutation(count * entries)[:9], -1, count * entries], np.int32)
    given = enumerate(zip(names, sizes, strict=True))
    values = [random_bits(seed, name, (11, size)) for seed, (name, size) in given]
    blocks = wanted = poisoned(count, 136, np.uint16)
    for value, start in zip(values, starts, strict=True):
        wanted = scattered(wanted, slots, value, entries, margin + start)
    options = {"entries": entries, "starts": starts, "offset": margin, "slab": layout.slab(136)}
    with interpreted():
        got = paged_scatter(layout.laid(blocks), slots, values, **options)
    assert same_bits(got, layout.laid(wanted))
