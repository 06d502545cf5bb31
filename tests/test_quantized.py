"""Quantised regions through the storage's verbs: scales go where their codes go, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lockstep import copy_of, i32, leaves_equal
from storage_cases import numpy_dtype, world

import kvpool as kv

CODES = ("int8", "float8_e4m3fn", pytest.param("float8_e5m2", marks=pytest.mark.slow))
SCALES = ("token", "block")


def full(dtype, scales, **options):
    return kv.FullAttention(2, 4, dtype=dtype, scales=scales, **options)


def tokens(seed, *lead, dtype="bfloat16"):
    """{buffer: [*lead, 2, 4]} of many magnitudes."""
    rng = np.random.default_rng(seed)
    shape = (*lead, 2, 4)
    return {
        name: (rng.normal(size=shape) * np.exp2(rng.integers(-9, 9, (*lead, 2, 1)))).astype(
            numpy_dtype(dtype)
        )
        for name in ("k", "v")
    }


def filled(dtype, scales, count=6):
    """(state, storage) of two rows with `count` settled tokens, in 8 blocks of 4."""
    state, storage = world([full(dtype, scales)] * 2)
    view = kv.step_view(state, i32([count, count]))
    for layer in range(2):
        storage = kv.write(storage, view, layer, tokens(layer, 2, count))
    return kv.advance(state, i32([count, count])), storage


def row_of(state, storage, row, layer=1):
    view = kv.step_view(state, i32([0] * state.plan.max_seqs))
    values, mask = kv.read(storage, view, layer)
    shown = np.asarray(mask)[row]
    return {name: np.asarray(x)[row][shown] for name, x in values.items()}


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", CODES)
def test_scales_move_with_their_block(dtype, scales):
    state, storage = filled(dtype, scales)
    before = row_of(state, storage, 0)
    state = kv.release(state, i32([1]))
    state, result = kv.fork(state, i32([0]), i32([1]))
    storage = kv.copy_blocks(storage, result.copies)
    (src, dst) = (int(np.asarray(ids)[0]) for ids in result.copies["full"])
    data = kv.export_blocks(storage, "full", i32([src, dst]))
    assert np.asarray(data)[0].tobytes() == np.asarray(data)[1].tobytes()
    assert leaves_equal(row_of(state, storage, 1), before)

    blocks = i32(np.asarray(kv.block_table(state, "full"))[1, :2])
    sent = np.asarray(kv.export_blocks(storage, "full", blocks))  # through host memory
    lost = kv.import_blocks(storage, "full", blocks, np.full_like(sent, 255))
    assert not leaves_equal(row_of(state, lost, 1), before)
    back = kv.import_blocks(lost, "full", blocks, sent)
    assert leaves_equal(back, storage)

    # The child goes on; the parent's blocks, the shared one among them, stay as they are.
    held = i32(np.asarray(kv.block_table(state, "full"))[0, :2])
    parent = np.asarray(kv.export_blocks(storage, "full", held))
    state, _ = kv.reserve(state, i32([0, 2]))
    loud = {name: 2**10 * x for name, x in tokens(5, 2, 2).items()}
    storage = kv.write(storage, kv.step_view(state, i32([0, 2])), 1, loud)
    assert (np.asarray(kv.export_blocks(storage, "full", held)) == parent).all()
    assert leaves_equal(row_of(state, storage, 0), before)


def test_codes_and_scales_are_those_of_a_region_that_names_its_scales():
    """The bytes of a block: what a user's own attention kernel finds in what is exported."""
    payload = {
        "k": ((2, 4), "int8"),
        "v": ((2, 4), "int8"),
        "k_scale": ((2,), "float32"),
        "v_scale": ((2,), "float32"),
    }
    state, storage = filled("int8", "token")
    plain_state, plain = world([kv.Region("all", payload)] * 2)
    blocks = i32(np.asarray(kv.block_table(state, "full"))[0, :2])
    data = kv.export_blocks(storage, "full", blocks)
    plain = kv.import_blocks(
        plain, "full", i32(np.asarray(kv.block_table(plain_state, "full"))[0, :2]), data
    )
    values, _ = kv.read(plain, kv.step_view(plain_state, i32([6, 0])), 1)
    stored = {name: np.asarray(x)[0, :6] for name, x in values.items()}
    for name, given in tokens(1, 2, 6).items():
        given = given[0].astype(np.float64)
        largest = np.abs(given).max(axis=-1)
        scale = stored[f"{name}_scale"].astype(np.float64)
        assert (np.abs(scale - largest / 127) <= 2.0**-23 * scale).all()
        assert (np.abs(stored[name]).max(axis=-1) == 127).all()
        assert (np.rint(given / scale[..., None]) == stored[name]).all()
        product = (stored[name] * scale[..., None]).astype(np.float32).astype(jnp.bfloat16)
        assert product.tobytes() == row_of(state, storage, 0)[name].tobytes()


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_values_come_back_in_the_compute_dtype_and_masked_places_are_zero(compute, scales):
    state, storage = world([full("float8_e4m3fn", scales, compute_dtype=compute)])
    view = kv.step_view(state, i32([3, 0]))
    given = tokens(0, 2, 3, dtype=compute)
    given["k"][1] = np.nan  # a pad: the row brings no tokens
    storage = kv.write(storage, view, 0, given)
    values, mask = kv.read(storage, view, 0)
    assert np.asarray(mask).sum() == 3
    for name, x in values.items():
        assert x.dtype == numpy_dtype(compute)
        assert np.isfinite(np.asarray(x, np.float32)).all()
        assert not np.asarray(x)[~np.asarray(mask)].tobytes().strip(b"\0")
        assert np.allclose(x[0, :3], given[name][0], rtol=2**-3.9, atol=2**-4)


@pytest.mark.parametrize("scales", SCALES)
def test_masked_places_are_zero_under_a_scale_of_nan(scales):
    """A token that was settled and never written: its block holds a NaN as its scale."""
    state, storage = world([full("float8_e4m3fn", scales)])
    state = kv.advance(state, i32([1, 0]))
    values, mask = kv.read(storage, kv.step_view(state, i32([0, 0])), 0)
    assert np.asarray(mask).sum() == 1
    for x in values.values():
        assert not np.asarray(x)[~np.asarray(mask)].tobytes().strip(b"\0")


@pytest.mark.parametrize("scales", SCALES)
def test_a_payload_of_which_only_a_part_is_quantised(scales):
    payload = {"latent": ((8,), "int8"), "rope": ((4,), "bfloat16")}
    state, storage = world([kv.Region("all", payload, scales=scales, compute_dtype="float32")])
    rng = np.random.default_rng(0)
    latent = rng.normal(size=(2, 6, 8)).astype(np.float32)
    rope = rng.integers(0, 2**16, (2, 6, 4)).astype(np.uint16).view(jnp.bfloat16)
    view = kv.step_view(state, i32([6, 6]))
    storage = kv.write(storage, view, 0, {"latent": latent, "rope": rope})
    values, _ = kv.read(storage, view, 0)
    assert np.asarray(values["rope"])[:, :6].tobytes() == rope.tobytes()
    assert values["latent"].dtype == jnp.float32
    assert np.abs(np.asarray(values["latent"])[:, :6] - latent).max() < 4 / 127


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("flat", [False, True])
def test_entries_of_several_tokens(scales, flat):
    region = kv.Compressed(2, 4, dtype="int8", scales=scales, compute_dtype="float32")
    state, storage = world([region], block_size=4)
    given = np.arange(1, 49, dtype=np.float32).reshape(2, 6, 4)
    for begin, end in ((0, 3), (3, 6)):  # the second entry's tokens come in two calls
        view = kv.step_view(state, i32([end, end]))
        part = given.copy()
        rows = np.repeat(i32([0, 1]), 6)
        positions = np.tile(np.arange(6, dtype=np.int32), 2)
        inside = (positions >= begin) & (positions < end)
        if flat:
            view = kv.ragged_view(state, np.where(inside, rows, -1), positions)
            part = part.reshape(12, 4)
        storage = kv.write(storage, view, 0, {"entry": part})
    values, mask = kv.read(storage, kv.step_view(state, i32([6, 6])), 0)
    assert np.asarray(mask)[:, :3].all()
    got = np.asarray(values["entry"])[:, :3]
    assert np.abs(got - given[:, 1::2]).max() <= 48 / 127


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", CODES)
def test_traced_layers_equal_those_by_number(dtype, scales):
    layers = [{"a": full(dtype, scales)}, {"b": full("int8", None)}, {"a": full(dtype, scales)}]
    state, storage = world(layers)
    view = kv.step_view(state, i32([6, 4]))
    values = tokens(0, 3, 2, 6)

    def body(storage, pair):
        layer, token = pair
        storage = kv.write(storage, view, layer, token, tag="a")
        return storage, kv.read(storage, view, layer, tag="a")

    scanned, (read, mask) = jax.jit(
        lambda s, v: jax.lax.scan(body, s, (jnp.arange(3), v))
    )(storage, values)  # fmt: skip
    for layer in (0, 2):
        part = {name: x[layer] for name, x in values.items()}
        storage = kv.write(storage, view, layer, part, tag="a")
        want, shown = kv.read(storage, view, layer, tag="a")
        assert leaves_equal({name: x[layer] for name, x in read.items()}, want)
        assert leaves_equal(mask[layer], shown)
    assert leaves_equal(storage, scanned)
    assert not np.asarray(mask)[1].any()
    assert not any(np.asarray(x)[1].any() for x in read.values())


@pytest.mark.parametrize("dtype", CODES)
def test_a_block_that_is_begun_ignores_what_it_held(dtype):
    """An earlier owner's scale of 2^60 would turn every value into 0, a NaN all into NaN."""
    region = kv.FullAttention(1, 4, dtype=dtype, scales="block", compute_dtype="float32")
    state, storage = world([region], rows=1, tokens=1, blocks=1)
    loud = {name: np.full((1, 1, 1, 4), 2.0**60, np.float32) for name in ("k", "v")}
    quiet = {name: np.full((1, 1, 1, 4), 2.0**-9, np.float32) for name in ("k", "v")}
    clean = kv.write(storage, kv.step_view(state, i32([1])), 0, quiet)
    storage = kv.write(storage, kv.step_view(state, i32([1])), 0, loud)
    assert not leaves_equal(clean, storage)
    state = kv.release(kv.advance(state, i32([1])), i32([0]))
    state, _ = kv.admit(state, i32([0]))
    state, _ = kv.reserve(state, i32([1]))
    view = kv.step_view(state, i32([1]))
    storage = kv.write(storage, view, 0, quiet)
    values, mask = kv.read(storage, view, 0)
    assert np.asarray(values["k"])[np.asarray(mask)].tolist() == [[[2.0**-9] * 4]]


@pytest.mark.parametrize("scales", SCALES)
def test_what_a_write_refuses(scales):
    state, storage = world([full("int8", scales)])
    before = copy_of(storage)
    view = kv.step_view(state, i32([1, 1]))
    good = tokens(0, 2, 1)
    codes = {name: np.zeros((2, 1, 2, 4), np.int8) for name in ("k", "v")}
    explicit = {**codes, "k_scale": np.ones((2, 1, 2), np.float32)}
    for values, message in (
        (codes, r"'k'.*wanted bfloat16\[2, 1, 2, 4\], got int8\[2, 1, 2, 4\]"),
        (tokens(0, 2, 1, dtype="float32"), r"'k'.*wanted bfloat16.*got float32"),
        (explicit, "wanted the buffers k, v, got k, v, k_scale"),
        ({"k": good["k"]}, "wanted the buffers k, v, got k"),
        ({**good, "v": good["v"][..., :3]}, r"'v'.*\[2, 1, 2, 4\].*\[2, 1, 2, 3\]"),
    ):
        with pytest.raises(ValueError, match=message):
            kv.write(storage, view, 0, values)
    assert leaves_equal(storage, before)
    for width in (0, 1):  # no tokens at all, and tokens of no row
        nothing = kv.step_view(state, i32([0, 0]))
        assert leaves_equal(kv.write(storage, nothing, 0, tokens(0, 2, width)), before)
    empty = kv.ragged_view(state, i32([]), i32([]))
    assert leaves_equal(kv.write(storage, empty, 0, tokens(0, 0)), before)


def test_a_region_without_scales_takes_codes_and_moves_them_exactly():
    state, storage = world([kv.FullAttention(2, 4, dtype="int8")])
    view = kv.step_view(state, i32([6, 6]))
    codes = np.random.default_rng(0).integers(-128, 128, (2, 6, 2, 4)).astype(np.int8)
    with pytest.raises(ValueError, match=r"wanted int8.*got bfloat16"):
        kv.write(storage, view, 0, tokens(0, 2, 6))
    storage = kv.write(storage, view, 0, {"k": codes, "v": codes})
    values, _ = kv.read(storage, view, 0)
    assert np.asarray(values["k"])[:, :6].tobytes() == codes.tobytes()
