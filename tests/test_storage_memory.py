"""No verb copies the pool: what compiled programs ask for, with the storage given away."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lockstep import i32
from storage_cases import DTYPES, enlarged, numpy_dtype

import kvpool as kv

ROWS, LAYERS, HEADS, HEAD = 32, 3, 4, 64
ONES = np.ones(ROWS, np.int32)


def abstract(layers, blocks):
    """(state, storage without memory)."""
    spec = kv.CacheSpec.from_layers(layers, block_size=16)
    plan = kv.plan(
        spec,
        num_blocks={group.name: blocks for group in spec.groups},
        max_seqs=ROWS,
        max_seq_len=128,
        max_step_tokens=16,
    )
    storage = jax.eval_shape(functools.partial(kv.init_storage, spec, plan))
    return kv.init_state(spec, plan), storage


def bytes_of(tree) -> int:
    return sum(np.prod(x.shape, dtype=int) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def check(step, storage, *arguments, beside, options=None):
    """Little temporary memory but for `beside` bytes, all of the pool in place, no copy of it."""
    compiled = jax.jit(step, donate_argnums=0).lower(storage, *arguments).compile(options)
    memory, pool = compiled.memory_analysis(), bytes_of(storage)
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < 0.01 * pool + beside
    names = {1: "u8", 2: "u16", 4: "u32"}
    for array in storage.blocks:
        shape = f"{names[array.dtype.itemsize]}[{array.shape[0]},{array.shape[1]}]"
        assert not re.search(re.escape(shape) + r"\S* copy\(", compiled.as_text())


def token_of(dtype, *lead):
    return jax.ShapeDtypeStruct((*lead, ROWS, 1, HEADS, HEAD), numpy_dtype(dtype))


def summed(values):
    """The next layer's token out of what was read, so that it depends on all of it."""
    total = sum(x.astype(jnp.float32).sum(1, keepdims=True) for x in values.values())
    return total.astype(values["k"].dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_by_number_and_in_a_scan(dtype):
    state, storage = abstract([kv.FullAttention(HEADS, HEAD, dtype=dtype)] * LAYERS, 1024)

    def by_number(storage, state, tokens):
        view = kv.step_view(state, ONES)
        for layer in range(LAYERS):
            token = tokens[layer]
            storage = kv.write(storage, view, layer, {"k": token, "v": token})
        return storage

    def scanned(storage, state, tokens):
        view = kv.step_view(state, ONES)

        def body(storage, pair):
            layer, token = pair
            return kv.write(storage, view, layer, {"k": token, "v": token}), None

        return jax.lax.scan(body, storage, (jnp.arange(LAYERS), tokens))[0]

    tokens = token_of(dtype, LAYERS)
    # A scan slices bfloat16 and fp8 by way of float32.
    widened = 4 // numpy_dtype(dtype).itemsize
    check(by_number, storage, state, tokens, beside=2 * bytes_of(tokens))
    check(scanned, storage, state, tokens, beside=(2 + widened) * bytes_of(tokens))


def over_layers(one_layer):
    """The step that runs one_layer(storage, view, layer, token), by number and in a scan."""

    def by_number(storage, state, token):
        view = kv.step_view(state, ONES)
        for layer in range(LAYERS):
            storage, token = one_layer(storage, view, layer, token)
        return storage, token

    def scanned(storage, state, token):
        view = kv.step_view(state, ONES)

        def body(carry, layer):
            return one_layer(carry[0], view, layer, carry[1]), None

        return jax.lax.scan(body, (storage, token), jnp.arange(LAYERS))[0]

    return by_number, scanned


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_layers_that_write_and_read(dtype):
    state, storage = abstract([kv.FullAttention(HEADS, HEAD, dtype=dtype)] * LAYERS, 1024)

    def one_layer(storage, view, layer, token):
        storage = kv.write(storage, view, layer, {"k": token, "v": token})
        values, _ = kv.read(storage, view, layer, max_blocks=1)
        return storage, summed(values)

    token = token_of(dtype)
    read = 16 * bytes_of(token)
    read_in_float32 = 4 // numpy_dtype(dtype).itemsize * read
    for step in over_layers(one_layer):
        check(step, storage, state, token, beside=2 * (read + read_in_float32))


# Of which a state has nearly the bytes of a block of tokens.
STATE = {"bfloat16": (64, 62), "float8_e4m3fn": (64, 30)}
SMALL, LARGE = (8, 16), (8, 64, 64)
BLOCKS = {SMALL: 4096, LARGE: ROWS}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_states_that_are_written(dtype, shape):
    region = kv.RecurrentState({"ssm": (shape, dtype), "conv": ((64, 3), "bfloat16")})
    state, storage = abstract([region] * LAYERS, BLOCKS[shape])
    values = {
        "ssm": jax.ShapeDtypeStruct((ROWS, *shape), numpy_dtype(dtype)),
        "conv": jax.ShapeDtypeStruct((ROWS, 64, 3), numpy_dtype("bfloat16")),
    }

    def by_number(storage, state, values):
        view = kv.step_view(state, ONES)
        for layer in range(LAYERS):
            storage = kv.write_state(storage, view, layer, values)
        return storage

    def scanned(storage, state, values):
        view = kv.step_view(state, ONES)

        def body(storage, layer):
            return kv.write_state(storage, view, layer, values), None

        return jax.lax.scan(body, storage, jnp.arange(LAYERS))[0]

    for step in (by_number, scanned):
        # A large state is cast row by row, in no memory of its own; fp8 at once, as bytes.
        beside = 2 * bytes_of(values) if shape == SMALL or "float8" in dtype else 0
        check(step, storage, state, values, beside=beside)


@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
def test_states_that_are_read_and_written_again(shape):
    region = kv.RecurrentState({"ssm": (shape, "float32"), "conv": ((64, 3), "bfloat16")})
    state, storage = abstract([region] * LAYERS, BLOCKS[shape])

    def one_layer(storage, view, layer, token):
        read = kv.read_state(storage, view, layer)
        conv = read["conv"] + token[..., None]
        ssm = read["ssm"] * 0.5 + conv.astype(jnp.float32).sum()
        storage = kv.write_state(storage, view, layer, {"ssm": ssm, "conv": conv})
        return storage, token + conv.sum(2)

    token = jax.ShapeDtypeStruct((ROWS, 64), numpy_dtype("bfloat16"))
    values = bytes_of(storage) // LAYERS // BLOCKS[shape] * ROWS
    for step in over_layers(one_layer):
        check(step, storage, state, token, beside=2 * values)


def one_array(pooling, dtype="bfloat16"):
    """(state, storage without memory): in each layer keys of two sizes and a state."""
    keys = {"head_dim": HEAD, "dtype": dtype}
    layer = {
        "full": kv.FullAttention(HEADS, **keys),
        "window": kv.SlidingWindow(64, HEADS // 2, **keys),
        # A state of nearly the bytes of a block of tokens.
        "state": kv.RecurrentState(
            {"ssm": (STATE[dtype], "float32"), "conv": ((64, 3), "bfloat16")}
        ),
    }
    spec = kv.CacheSpec.from_layers([layer] * LAYERS, block_size=16, pooling=pooling)
    plan = kv.plan(spec, budget_bytes=2**30, max_seqs=ROWS, max_seq_len=128, max_step_tokens=16)
    plan = enlarged(plan, 100)
    assert set(plan.array_of) == {0}
    return kv.init_state(spec, plan), jax.eval_shape(functools.partial(kv.init_storage, spec, plan))


def one_after_the_other(storage, view, layer, token):
    """Each group is written and then read, and the next depends on what was read."""
    for tag, heads in (("full", HEADS), ("window", HEADS // 2)):
        given = dict.fromkeys("kv", token[..., :heads, :])
        storage = kv.write(storage, view, layer, given, tag)
        values, _ = kv.read(storage, view, layer, tag, max_blocks=1)
        token = jnp.tile(summed(values), (1, 1, HEADS // heads, 1))
    read = kv.read_state(storage, view, layer, "state")
    read["ssm"] = read["ssm"] * 0.5 + token.astype(jnp.float32).sum()
    storage = kv.write_state(storage, view, layer, read, "state")
    return storage, token + read["conv"].sum().astype(token.dtype)


def side_by_side(storage, view, layer, token):
    """What is written depends on nothing that was read of the other groups."""
    read = kv.read_state(storage, view, layer, "state")
    storage = kv.write(storage, view, layer, dict.fromkeys("kv", token), "full")
    values, _ = kv.read(storage, view, layer, "full", max_blocks=1)
    given = dict.fromkeys("kv", token[..., : HEADS // 2, :])
    storage = kv.write(storage, view, layer, given, "window")
    state = {**read, "ssm": read["ssm"] * 0.5 + token.astype(jnp.float32).sum()}
    storage = kv.write_state(storage, view, layer, state, "state")
    return storage, summed(values) + read["conv"].sum().astype(token.dtype)


@pytest.mark.parametrize("pooling", ["shared", "elastic"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_groups_that_share_an_array(pooling, dtype):
    state, storage = one_array(pooling, dtype)
    for step in over_layers(one_after_the_other):
        check(step, storage, state, token_of(dtype), beside=0)


def test_groups_that_share_an_array_in_any_order():
    """On a CPU it takes an option of XLA: it then sees that what is read is read in time."""
    options = {"xla_cpu_copy_insertion_use_region_analysis": True}
    state, storage = one_array("elastic")
    for step in over_layers(side_by_side):
        check(step, storage, state, token_of("bfloat16"), beside=0, options=options)


def test_whole_blocks():
    _, storage = abstract([kv.FullAttention(HEADS, HEAD)] * LAYERS, 4096)
    ids = i32(range(8))
    width = storage.blocks[0].shape[1]
    data = jax.ShapeDtypeStruct((8, width), storage.blocks[0].dtype)

    def copy(storage, src, dst):
        return kv.copy_blocks(storage, {"full": (src, dst)})

    def put(storage, ids, data):
        return kv.import_blocks(storage, "full", ids, data)

    check(copy, storage, ids, ids, beside=0)
    check(put, storage, ids, data, beside=0)


def test_a_donated_storage_is_gone_and_an_undonated_one_unchanged():
    spec = kv.CacheSpec.from_layers([kv.FullAttention(1, 4)], block_size=4)
    plan = kv.plan(spec, num_blocks={"full": 4}, max_seqs=1, max_seq_len=8)
    state, storage = kv.init(spec, plan)
    state, _ = kv.admit(state, i32([0]))
    state, _ = kv.reserve(state, i32([1]))
    view = kv.step_view(state, i32([1]))
    token = {name: jnp.ones((1, 1, 1, 4), jnp.bfloat16) for name in ("k", "v")}
    kv.write(storage, view, 0, token)
    assert not np.asarray(storage.blocks[0]).any()
    written = jax.jit(lambda s: kv.write(s, view, 0, token), donate_argnums=0)(storage)
    assert np.asarray(written.blocks[0]).any()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(storage.blocks[0])
