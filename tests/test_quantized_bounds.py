"""How far what is read lies from what was written, against float64 arithmetic and stated bounds."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from lockstep import i32
from storage_cases import numpy_dtype

import kvpool as kv
from kvpool import scales as module

CODES = ("int8", "float8_e4m3fn", pytest.param("float8_e5m2", marks=pytest.mark.slow))
COMPUTE = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}  # half a step of 1
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
RELATIVE = {"int8": 0.0, "float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
HALF_STEP = {"int8": 0.5, "float8_e4m3fn": 2.0**-10, "float8_e5m2": 2.0**-17}  # in scales
LEAST = 2.0**-100
HEADS, HEAD = 3, 16


def least_power(magnitude, codes):
    """The scale of a block by its definition, for one magnitude in float64."""
    scale = LEAST
    while magnitude > scale * LARGEST[codes]:
        scale *= 2
    return scale


def error_bound(x, scale, codes, grown):
    """Most abs(x - y) before y is rounded to the compute dtype, with `x` and `scale` float64."""
    relative, absolute = RELATIVE[codes] * np.abs(x), HALF_STEP[codes] * scale
    return relative + 1.5 * absolute if grown else np.maximum(relative, absolute)


def assert_within(x, y, scale, codes, compute, grown=False, arithmetic=0.0):
    """`y` in the compute dtype lies within the bounds that `kvpool.scales` states of `x`."""
    finite = np.isfinite(x)
    assert np.isnan(y[~finite]).all()
    x, y = np.where(finite, x, 0), np.where(finite, y, 0)
    bound = error_bound(x, scale, codes, grown) + arithmetic + 2.0**-126
    bound += np.maximum(COMPUTE[compute] * (np.abs(x) + bound), 2.0**-25 * (compute == "float16"))
    excess = np.abs(x - y.astype(np.float64)) - bound
    assert (excess <= 0).all(), excess.max()


def one_row(region, block_size=16, blocks=3, max_len=32):
    """(state, storage) of one row whose blocks are filled with all-one bits."""
    spec = kv.CacheSpec.from_layers([region], block_size=block_size)
    plan = kv.plan(spec, num_blocks={"full": blocks}, max_seqs=1, max_seq_len=max_len)
    state, storage = kv.init(spec, plan)
    state, _ = kv.admit(state, i32([0]))
    for group, array in zip(spec.groups, storage.blocks, strict=True):
        ones = np.full(array.shape, np.iinfo(array.dtype).max, array.dtype)
        storage = kv.import_blocks(storage, group.name, i32(range(blocks)), ones)
    return state, storage


def written(state, storage, values):
    """Tokens {buffer: [T, ...]} behind what the row has: (state, storage)."""
    width = next(iter(values.values())).shape[0]
    state, result = kv.reserve(state, i32([width]))
    assert bool(result.ok)
    view = kv.step_view(state, i32([width]))
    storage = kv.write(storage, view, 0, {name: x[None] for name, x in values.items()})
    return kv.advance(state, i32([width])), storage


def shown(state, storage, name="k"):
    """The row's tokens in position order."""
    values, mask = kv.read(storage, kv.step_view(state, i32([0])), 0)
    assert not np.asarray(values[name])[~np.asarray(mask)].tobytes().strip(b"\0")
    return np.asarray(values[name])[np.asarray(mask)]


def vectors(seed, shape, compute, spread=12):
    """Values of many magnitudes within a vector and between vectors, in a compute dtype."""
    rng = np.random.default_rng(seed)
    exponent = rng.integers(-spread, 1, shape) + rng.integers(-spread, spread, (*shape[:-1], 1))
    return (rng.normal(size=shape) * np.exp2(exponent)).astype(numpy_dtype(compute))


@pytest.mark.parametrize("scales", ["token", "block"])
@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("codes", CODES)
def test_one_write(codes, compute, scales):
    region = kv.FullAttention(HEADS, HEAD, dtype=codes, scales=scales, compute_dtype=compute)
    state, storage = one_row(region, block_size=4, blocks=5)
    x = vectors(0, (19, HEADS, HEAD), compute, spread=5 if compute == "float16" else 12)
    x[3] = 0
    state, storage = written(state, storage, {"k": x, "v": -x})
    x = x.astype(np.float64)
    magnitude = np.abs(x).max(axis=-1)  # [T, H]
    if scales == "token":
        scale = np.maximum(magnitude / LARGEST[codes], LEAST)
    else:
        of_block = np.pad(magnitude, ((0, 1), (0, 0))).reshape(5, 4, HEADS).max(axis=1)
        powers = np.vectorize(lambda a: least_power(a, codes))(of_block)
        assert (powers < 2 * of_block / LARGEST[codes]).all()
        scale, magnitude = powers.repeat(4, axis=0)[:19], of_block.repeat(4, axis=0)[:19]
    slack = 2.0**-20 * magnitude[..., None] * (scales == "token")
    for name, sign in (("k", 1), ("v", -1)):
        y = shown(state, storage, name)
        assert y.dtype == numpy_dtype(compute)
        assert_within(sign * x, y, scale[..., None], codes, compute, arithmetic=slack)
        assert not y[3].any()


def grown_block(codes, tokens, steps):
    """(x f64 [T, 1, D], y, scale f64) of one block written `steps` tokens at a time."""
    region = kv.FullAttention(1, tokens.shape[-1], dtype=codes, scales="block",
                              compute_dtype="float32")  # fmt: skip
    state, storage = one_row(region)
    for begin in range(0, len(tokens), steps):
        part = tokens[begin : begin + steps, None].astype(np.float32)
        state, storage = written(state, storage, {"k": part, "v": part})
    x = tokens[:, None].astype(np.float64)
    return x, shown(state, storage), least_power(np.abs(x).max(), codes)


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("factor", [1.0, 1.01, 2.0, 3.7, 2.0**9])
@pytest.mark.parametrize("codes", CODES)
def test_a_scale_that_grows_again_and_again(codes, factor, steps):
    seed = np.random.default_rng(int(factor * 100)).uniform(-1, 1, (16, 64))
    tokens = (seed * factor ** np.arange(16)[:, None] * 1e-6).astype(np.float32)
    x, y, scale = grown_block(codes, tokens, steps)
    assert_within(x, y, scale, codes, "float32", grown=True)
    fallen = x[::-1] if factor > 1 else x  # the largest first: the scale never grows
    if factor > 1:
        x, y, scale = grown_block(codes, fallen[:, 0], steps)
        largest = np.abs(x).max(axis=-1).argmax()
        late = slice(largest, None)
        assert_within(x[late], y[late], scale, codes, "float32")


@pytest.mark.parametrize("codes", CODES)
def test_the_bounds_of_growth_are_tight(codes):
    """Values almost halfway between codes, under every three growths and fewer by 2, 4 or 8."""
    step = 2 * HALF_STEP[codes]  # of the finest codes, in scales
    nearly = step * (0.5 - 2.0**-16)
    places = np.arange(-60, 61) * step
    fine = np.concatenate([places - nearly, places + nearly]).astype(np.float32)
    worst = 0.0
    sequences = [itertools.product((1, 2, 3), repeat=length) for length in (1, 2, 3)]
    for powers in itertools.chain(*sequences):
        heights = np.cumsum((0, *powers))
        tokens = np.zeros((len(heights), fine.size + 1), np.float32)
        tokens[0, 1:] = fine
        tokens[:, 0] = LARGEST[codes] * 2.0**heights
        x, y, scale = grown_block(codes, tokens, 1)
        assert scale == 2.0 ** heights[-1]
        assert_within(x, y, scale, codes, "float32", grown=True)
        relative = RELATIVE[codes] * np.abs(x[0])
        worst = max(worst, ((np.abs(x - y)[0] - relative) / (step * scale)).max())
    assert worst > 0.5  # more than a block that never grew
    assert worst <= 0.75
    if codes == "int8":
        assert worst > 0.7499


@pytest.mark.parametrize("compute", COMPUTE)
@pytest.mark.parametrize("scales", ["token", "block"])
@pytest.mark.parametrize("codes", CODES)
def test_the_ends_of_the_range_and_what_is_not_finite(codes, scales, compute):
    limits = ml_dtypes.finfo(numpy_dtype(compute))
    largest, tiny = float(limits.max), float(limits.smallest_subnormal)
    x = np.zeros((7, 1, 4), numpy_dtype(compute))
    x[0, 0] = largest, -largest, largest / 3, 0
    x[1, 0] = tiny, -tiny, 3 * tiny, 0
    x[2, 0] = np.nan, 1, -2, 0
    x[3, 0] = np.inf, 1, -np.inf, 0.5
    x[4, 0] = np.nan, np.nan, np.inf, -np.inf
    x[5, 0] = 1.9 * 2.0**15, 1, 0, -1
    x[6, 0] = -0.0, 0, 0, 0
    region = kv.FullAttention(1, 4, dtype=codes, scales=scales, compute_dtype=compute)
    state, storage = one_row(region, block_size=1, blocks=8)
    state, storage = written(state, storage, {"k": x, "v": x})
    y, x = shown(state, storage), x.astype(np.float64)
    magnitude = np.abs(np.where(np.isfinite(x), x, 0)).max(axis=-1, keepdims=True)
    scale = np.maximum(magnitude / LARGEST[codes], LEAST)
    if scales == "block":
        scale = np.vectorize(lambda a: least_power(a, codes))(magnitude)
    assert_within(x, y, scale, codes, compute, arithmetic=2.0**-20 * magnitude)
    assert np.isfinite(y[np.isfinite(x)]).all()
    assert not y[6].any()


@pytest.mark.parametrize("codes", CODES)
def test_scales_of_blocks_are_the_least_powers_of_two(codes):
    rng = np.random.default_rng(0)
    exact = LARGEST[codes] * np.exp2(np.arange(-99, 100))
    near = np.concatenate([exact, exact * (1 + 2.0**-23), exact * (1 - 2.0**-23)])
    random = rng.integers(0, 0x7F800000, 300).astype(np.int32).view(np.float32)
    magnitude = np.concatenate([near.astype(np.float32), random, np.zeros(1, np.float32)])
    dtype = numpy_dtype(codes)
    got = np.asarray(jax.jit(lambda a: module.block_scale(a, dtype))(magnitude), np.float64)
    assert got.tolist() == [least_power(a, codes) for a in magnitude.astype(np.float64).tolist()]
    inverse = np.asarray(jax.jit(module.inverse)(jnp.asarray(got, jnp.float32)), np.float64)
    assert (inverse * got == 1).all()
