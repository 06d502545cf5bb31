"""Bytes: what a write touches, what a read shows, how a block is laid out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lockstep import PLAIN, i32, leaves_equal
from world import World

import kvpool as kv

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8")


def one_group(region, blocks, block_size=4, rows=2, max_len=16, layers=1):
    """(state, storage, group name) of one region, rows 0 and 1 admitted."""
    spec = kv.CacheSpec.from_layers([region] * layers, block_size=block_size)
    name = spec.groups[0].name
    plan = kv.plan(spec, num_blocks={name: blocks}, max_seqs=rows, max_seq_len=max_len)
    state, storage = kv.init(spec, plan)
    state, _ = kv.admit(state, i32(range(rows)))
    return state, storage, name


def reserved(state, num):
    state, result = kv.reserve(state, i32(num))
    assert bool(result.ok)
    return state


def words(storage, group, ids):
    """The bytes of blocks: u8[len(ids), bytes_per_block]."""
    (data,) = jax.tree.leaves(kv.export_blocks(storage, group, i32(ids)))
    data = np.asarray(data)
    return data.reshape(len(ids), -1).view(np.uint8)


def with_words(storage, group, ids, data):
    """Storage whose blocks hold these bytes, u8[len(ids), bytes_per_block] or one value."""
    shape = jax.eval_shape(lambda s: kv.export_blocks(s, group, i32(ids)), storage)
    (leaf,) = jax.tree.leaves(shape)
    size = np.prod(leaf.shape[1:], dtype=int) * leaf.dtype.itemsize
    raw = np.broadcast_to(np.asarray(data, np.uint8), (len(ids), size)).copy()
    put = jax.tree.unflatten(jax.tree.structure(shape), [raw.view(leaf.dtype).reshape(leaf.shape)])
    return kv.import_blocks(storage, group, i32(ids), put)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sk01_positions_outside_never_wrap(dtype):
    state, storage, group = one_group(
        kv.FullAttention(1, 4, dtype=dtype), 4, block_size=2, rows=1, max_len=8
    )
    state = reserved(state, [6])
    (spare,) = set(range(4)) - set(np.asarray(kv.block_table(state, group))[0, :3].tolist())
    storage = with_words(storage, group, [spare], 77)
    rows = i32([0, 0, 0, 0, 0, 0, -1, 1, -9])
    positions = i32([2, -1, 5, -9, 8, 2**31 - 1, 0, 0, 0])
    values = jnp.asarray([10, 99, 20, 88, 88, 88, 88, 88, 88], dtype)[:, None, None]
    values = jnp.broadcast_to(values, (9, 1, 4))
    view = kv.ragged_view(state, rows, positions)
    storage = kv.write(storage, view, 0, {"k": values, "v": values})
    assert (words(storage, group, [spare]) == 77).all()
    read, mask = kv.read(storage, kv.step_view(state, i32([6])), 0)
    keys = np.asarray(read["k"].astype(jnp.float32))[0, :, 0, 0]
    assert keys.tolist() == [0, 0, 10, 0, 0, 20, 0, 0]
    assert np.asarray(mask)[0].tolist() == [True] * 6 + [False] * 2


def test_sk02_more_blocks_than_sixteen_bits_count():
    region = kv.Region("all", {"k": ((16,), "int8")})
    _, storage, group = one_group(region, 65_540, block_size=1, rows=1, max_len=8)
    storage = with_words(storage, group, [65_537], 5)
    storage = with_words(storage, group, [1], 2)
    assert words(storage, group, [65_537, 1, 0, 65_536])[:, 0].tolist() == [5, 2, 0, 0]


@pytest.mark.slow
def test_sk02_an_array_of_more_than_2_31_elements():
    region = kv.Region("all", {"k": ((8, 128), "int8")})
    spec = kv.CacheSpec.from_layers([region], block_size=16)
    plan = kv.plan(spec, num_blocks={"full": 131_076}, max_seqs=1, max_seq_len=32)
    assert plan.total_bytes == 2_147_549_184
    storage = kv.init_storage(spec, plan)
    shape = jax.eval_shape(lambda s: kv.export_blocks(s, "full", i32([0])), storage)
    write = jax.jit(lambda s, ids, data: kv.import_blocks(s, "full", ids, data), donate_argnums=0)
    for block, value in ((131_073, 7), (1, 3)):
        data = jax.tree.map(
            lambda x, v=value: np.full(
                x.shape, int.from_bytes(bytes([v]) * x.dtype.itemsize), x.dtype
            ),
            shape,
        )
        storage = write(storage, i32([block]), data)
    assert words(storage, "full", [131_073, 1, 0])[:, 5].tolist() == [7, 3, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_sk03_pads_and_unheld_blocks_stay_out(dtype):
    state, storage, group = one_group(kv.FullAttention(1, 4, dtype=dtype), 8, rows=4, max_len=12)
    storage = with_words(storage, group, range(8), 255)
    state = reserved(state, [0, 0, 3, 0])
    block = int(np.asarray(kv.block_table(state, group))[2, 0])
    values = np.full((4, 3, 1, 4), -1 if dtype == "int8" else np.nan, np.float32)
    values[2] = np.arange(3)[:, None, None] + 1
    values = jnp.asarray(values).astype(dtype)
    view = kv.step_view(state, i32([0, 0, 3, 0]))
    storage = kv.write(storage, view, 0, {"k": values, "v": values})
    others = [b for b in range(8) if b != block]
    assert (words(storage, group, others) == 255).all()
    state = kv.advance(state, i32([0, 0, 3, 0]))
    read, mask = kv.read(storage, kv.step_view(state, i32([0] * 4)), 0)
    keys = np.asarray(read["k"].astype(jnp.float32))
    assert np.asarray(mask).sum() == 3
    assert keys[2, :, 0, 0].tolist() == [1, 2, 3] + [0] * 9
    assert np.isfinite((keys * keys).sum())
    assert not keys[[0, 1, 3]].any()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_sk05_a_recycled_block_of_nan_codes(dtype):
    state, storage, group = one_group(kv.FullAttention(1, 4, dtype=dtype), 1, max_len=4)
    state = reserved(state, [4, 0])
    state = kv.release(kv.advance(state, i32([4, 0])), i32([0]))
    storage = with_words(storage, group, [0], 255)
    state = reserved(state, [0, 1])
    one = jnp.ones((2, 1, 1, 4), dtype)
    storage = kv.write(storage, kv.step_view(state, i32([0, 1])), 0, {"k": one, "v": one})
    state = kv.advance(state, i32([0, 1]))
    read, mask = kv.read(storage, kv.step_view(state, i32([0, 0])), 0)
    assert np.asarray(mask)[1].tolist() == [True, False, False, False]
    assert np.asarray(read["k"].astype(jnp.float32))[1, :, 0, 0].tolist() == [1, 0, 0, 0]


def test_sk06_scales_travel_with_their_codes():
    fp8, heads = "float8_e4m3fn", 8
    region = kv.Region(
        "all",
        {
            "k": ((heads, 128), fp8),
            "v": ((heads, 128), fp8),
            "k_scale": ((heads,), "float32"),
            "v_scale": ((heads,), "float32"),
        },
    )
    state, storage, group = one_group(region, 4, block_size=16, rows=3, max_len=32)
    assert state.plan.spec.groups[0].bytes_per_block == 2 * (16_384 + 512)
    state = reserved(state, [5, 0, 0])
    code = jnp.full((3, 5, heads, 128), 64, fp8)
    scale = jnp.full((3, 5, heads), 0.5)
    values = {"k": code, "v": code, "k_scale": scale, "v_scale": scale}
    storage = kv.write(storage, kv.step_view(state, i32([5, 0, 0])), 0, values)
    state = kv.release(kv.advance(state, i32([5, 0, 0])), i32([1, 2]))

    def product(storage, state, row):
        read, mask = kv.read(storage, kv.step_view(state, i32([0] * 3)), 0)
        out = read["k"].astype(jnp.float32) * read["k_scale"][..., None]
        return np.asarray(out)[row][np.asarray(mask)[row]]

    state, result = kv.fork(state, i32([0]), i32([1]))
    storage = kv.copy_blocks(storage, result.copies)
    assert product(storage, state, 1).shape[0] == 5
    assert (product(storage, state, 1) == 32).all()
    block = i32(np.asarray(kv.block_table(state, group))[0, :1])
    data = kv.export_blocks(storage, group, block)
    host = jax.tree.map(np.asarray, data)  # the round trip through host memory
    for moved in (data, host):
        lost = with_words(storage, group, block, 255)
        assert not (product(lost, state, 0) == 32).all()
        assert (product(kv.import_blocks(lost, group, block, moved), state, 0) == 32).all()


def test_sk07_pads_do_not_decide_the_result():
    state, storage, group = one_group(kv.FullAttention(1, 4, dtype="float32"), 4, rows=1)
    state = reserved(state, [8])
    view = kv.ragged_view(state, i32([0, -1, -1, -1]), i32([3, -1, -1, -1]))
    write = jax.jit(lambda s, k: kv.write(s, view, 0, {"k": k, "v": k}))
    pads, first = np.random.default_rng(0), None
    for _ in range(100):
        keys = pads.normal(size=(4, 1, 4)).astype(np.float32)
        keys[0] = 1
        out = write(storage, keys)
        first = out if first is None else first
        assert leaves_equal(out, first)
    changed = words(first, group, range(4)) != words(storage, group, range(4))
    assert changed.any(axis=1).sum() == 1
    assert changed.sum() <= 2 * 16


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
@pytest.mark.parametrize("mib", [64, 1024])
def test_sk09_a_write_of_a_token_needs_no_second_array(dtype, mib):
    region = kv.FullAttention(8, 64, dtype=dtype)
    spec = kv.CacheSpec.from_layers([region] * 2, block_size=16)
    blocks = (mib << 20) // spec.groups[0].bytes_per_block
    plan = kv.plan(spec, num_blocks={"full": blocks}, max_seqs=4, max_seq_len=64)
    storage = jax.eval_shape(functools.partial(kv.init_storage, spec, plan))
    state = kv.init_state(spec, plan)

    def write(storage, state, k):
        view = kv.step_view(state, jnp.ones(4, jnp.int32))
        return kv.write(storage, view, 1, {"k": k, "v": k})

    k = jax.ShapeDtypeStruct((4, 1, 8, 64), dtype)
    memory = jax.jit(write, donate_argnums=0).lower(storage, state, k).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 0.01 * plan.total_bytes
    assert memory.alias_size_in_bytes >= plan.total_bytes


def test_sk09_a_donated_array_is_gone():
    world = World(PLAIN)
    world.admit(0)
    old = world.storage
    world.step({0: 2})
    with pytest.raises(RuntimeError):
        jax.tree.map(np.asarray, old)


def test_sk10_bytes_of_a_block():
    state, storage, group = one_group(kv.FullAttention(1, 4), 2, layers=2)
    state = reserved(state, [4, 0])
    for layer in range(2):
        data = {
            name: jnp.full((2, 4, 1, 4), 10 * layer + i + 1, jnp.bfloat16)
            for i, name in enumerate(("k", "v"))
        }
        storage = kv.write(storage, kv.step_view(state, i32([4, 0])), layer, data)
    block = int(np.asarray(kv.block_table(state, group))[0, 0])
    raw = words(storage, group, [block])[0]
    assert raw.nbytes == state.plan.spec.groups[0].bytes_per_block == 128
    bf16 = raw.view(jnp.bfloat16).astype(np.float32).reshape(4, 16)
    assert (bf16 == np.asarray([[1], [2], [11], [12]])).all()


def test_sk11_buffers_start_at_multiples_of_16():
    region = kv.FullAttention(1, 5, v_head_dim=3)
    state, storage, group = one_group(region, 4, block_size=1, rows=1, max_len=4, layers=3)
    state = reserved(state, [2])
    view = kv.step_view(state, i32([2]))
    want = {}
    for layer in range(3):
        k = jnp.arange(10, dtype=jnp.bfloat16).reshape(1, 2, 1, 5) + 20 * layer
        v = jnp.arange(6, dtype=jnp.bfloat16).reshape(1, 2, 1, 3) + 20 * layer + 10
        want[layer] = {"k": k, "v": v}
        storage = kv.write(storage, view, layer, want[layer])
    assert state.plan.spec.groups[0].bytes_per_block == 96
    for layer, values in want.items():
        read, _ = kv.read(storage, view, layer)
        for name, x in values.items():
            assert (np.asarray(read[name])[:, :2] == np.asarray(x)).all()
    block = int(np.asarray(kv.block_table(state, group))[0, 1])
    raw = words(storage, group, [block])[0].reshape(6, 16)
    for layer in range(3):
        for i, (name, size) in enumerate((("k", 10), ("v", 6))):
            exact = np.asarray(want[layer][name])[0, 1].tobytes()
            assert raw[2 * layer + i, :size].tobytes() == exact


@pytest.mark.parametrize("traced", [False, True])
def test_sk12_bits_come_back_as_they_went(traced):
    state, storage, _ = one_group(kv.FullAttention(1, 4), 3, layers=2)
    state = reserved(state, [3, 0])
    bits = np.asarray([0x7FC1, 0x8000, 0x0001], np.uint16)
    tokens = np.broadcast_to(bits.view(jnp.bfloat16)[None, :, None, None], (2, 3, 1, 4))
    view = kv.step_view(state, i32([3, 0]))
    put = {"k": jnp.asarray(tokens), "v": jnp.asarray(tokens)}
    if traced:
        storage, _ = jax.lax.scan(
            lambda s, layer: (kv.write(s, view, layer, put), None), storage, jnp.arange(2)
        )
    else:
        for layer in range(2):
            storage = kv.write(storage, view, layer, put)
    state = kv.release(kv.advance(state, i32([3, 0])), i32([1]))
    state, result = kv.fork(state, i32([0]), i32([1]))
    storage = kv.copy_blocks(storage, result.copies)
    view = kv.step_view(state, i32([0, 0]))

    def bits_of(layer):
        # as words within the read: stacking bfloat16 values on a CPU quiets the NaN's payload
        values, mask = kv.read(storage, view, layer)
        return jax.tree.map(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16), values), mask

    if traced:
        _, (read, mask) = jax.lax.scan(lambda _, layer: (None, bits_of(layer)), None, jnp.arange(2))
    else:
        read, mask = jax.tree.map(lambda *x: jnp.stack(x), *map(bits_of, range(2)))
    for name in ("k", "v"):
        back = np.asarray(read[name])[np.asarray(mask)]
        assert (back.reshape(2, 2, 3, 4) == bits[None, None, :, None]).all()
