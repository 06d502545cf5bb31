"""Storage: the bytes of a block, bits that come back, layers that are traced, and refusals."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from lockstep import i32, leaves_equal
from storage_cases import DTYPES, numpy_dtype, random_bits, world

import kvpool as kv
from kvpool import entries


def block_bytes(storage, group):
    array = storage.blocks[storage.plan.spec.group_index(group)]
    data = kv.export_blocks(storage, group, i32(range(array.shape[0])))
    assert isinstance(data, jax.Array)
    assert data.nbytes == array.shape[0] * storage.plan.spec.group(group).bytes_per_block
    return np.asarray(data).view(np.uint8).reshape(array.shape[0], -1)


def laid_out(state, group, written):
    """The bytes of all blocks by the layout alone; written {(layer, buffer): [S, T, *entry]}."""
    table = np.asarray(kv.block_table(state, group.name))
    count = state.plan.num_blocks[group.name]
    out = np.full((count, group.bytes_per_block), 255, np.uint8)
    at = 0
    for layer in range(len(group.layers)):
        for buffer in group.region.buffers:
            values = written[layer, buffer.name]
            for row, position in np.ndindex(values.shape[:2]):
                entry = values[row, position].tobytes()
                block = table[row, position // group.block_size]
                start = at + position % group.block_size * len(entry)
                out[block, start : start + len(entry)] = np.frombuffer(entry, np.uint8)
            at += -(-group.block_size * buffer.entry_bytes // 16) * 16
    assert at == group.bytes_per_block
    return out


PAYLOADS = {
    "one dtype": {"k": ((2, 3), "bfloat16"), "v": ((5,), "bfloat16")},
    "codes and scales": {"k": ((2, 8), "float8_e4m3fn"), "scale": ((2,), "float32")},
    "wide and narrow": {"a": ((3,), "float32"), "b": ((), "float16"), "c": ((1, 2), "int8")},
}


@pytest.mark.parametrize("payload", PAYLOADS)
@pytest.mark.parametrize("flat", [False, True])
def test_bytes_of_every_block(payload, flat):
    region = kv.Region("all", PAYLOADS[payload])
    state, storage = world([region] * 3)
    group = storage.plan.spec.groups[0]
    written = {}
    for layer in range(3):
        values = {
            name: random_bits(layer, dtype, (2, 6, *shape))
            for name, (shape, dtype) in PAYLOADS[payload].items()
        }
        written |= {(layer, name): array for name, array in values.items()}
        view = kv.step_view(state, i32([6, 6]))
        if flat:  # row 1 first, each row backwards
            rows, positions = i32([1] * 6 + [0] * 6), i32([*range(5, -1, -1)] * 2)
            values = {name: array[rows, positions] for name, array in values.items()}
            view = kv.ragged_view(state, rows, positions)
        storage = kv.write(storage, view, layer, values)
    assert (block_bytes(storage, "full") == laid_out(state, group, written)).all()


def test_every_bit_pattern_comes_back():
    layers = [{dtype: kv.Region("all", {"x": ((512,), dtype)}) for dtype in DTYPES}] * 2
    state, storage = world(layers)
    view = kv.step_view(state, i32([6, 6]))
    for layer, dtype in np.ndindex(2, len(DTYPES)):
        values = random_bits(layer, DTYPES[dtype], (2, 6, 512))
        storage = kv.write(storage, view, layer, {"x": values}, DTYPES[dtype])
    for layer, dtype in np.ndindex(2, len(DTYPES)):
        values = random_bits(layer, DTYPES[dtype], (2, 6, 512))
        read, mask = kv.read(storage, view, layer, DTYPES[dtype])
        assert np.asarray(mask).tolist() == [[True] * 6 + [False] * 6] * 2
        assert read["x"].dtype == values.dtype
        assert np.asarray(read["x"])[:, :6].tobytes() == values.tobytes()
        assert not np.asarray(read["x"])[:, 6:].tobytes().strip(b"\0")


def test_bits_under_a_scan_over_layers():
    """Values go in as an argument and come out as words: XLA's constants and its stacking of a
    scan's results lose the payloads of NaNs by themselves."""
    region = {dtype: kv.Region("all", {"x": ((64,), dtype)}) for dtype in DTYPES}
    state, storage = world([region] * 3)
    view = kv.step_view(state, i32([6, 3]))
    values = {dtype: random_bits(0, dtype, (2, 6, 64)) for dtype in DTYPES}

    @jax.jit
    def put(storage, values):
        def body(storage, layer):
            for dtype in DTYPES:
                storage = kv.write(storage, view, layer, {"x": values[dtype]}, dtype)
            return storage, None

        return jax.lax.scan(body, storage, jnp.arange(3))[0]

    @jax.jit
    def get(storage):
        def body(_, layer):
            bits = {}
            for dtype in DTYPES:
                read, mask = kv.read(storage, view, layer, dtype)
                word = f"uint{8 * numpy_dtype(dtype).itemsize}"
                bits[dtype] = jax.lax.bitcast_convert_type(read["x"], word)
            return None, (bits, mask)

        return jax.lax.scan(body, None, jnp.arange(3))[1]

    scanned = put(storage, values)
    bits, mask = jax.tree.map(np.asarray, get(scanned))
    for layer, place in np.ndindex(3, len(DTYPES)):
        dtype = DTYPES[place]
        storage = kv.write(storage, view, layer, {"x": values[dtype]}, dtype)
        assert bits[dtype][layer, 0, :6].tobytes() == values[dtype][0].tobytes()
        assert bits[dtype][layer, 1, :3].tobytes() == values[dtype][1, :3].tobytes()
        assert not bits[dtype][layer][~mask[layer]].any()
    assert leaves_equal(storage, scanned)


@pytest.mark.parametrize("shape", [(3,), (64, 96)])
def test_states_of_every_dtype(shape):
    def region(dtype):
        return kv.RecurrentState({"ssm": (shape, dtype), "conv": ((5, 3), "bfloat16")})

    def values_of(layer, dtype):
        conv = random_bits(layer, "bfloat16", (4, 5, 3))
        return {"ssm": random_bits(layer, dtype, (4, *shape)), "conv": conv}

    layers = [{dtype: region(dtype) for dtype in DTYPES}] * 2
    state, storage = world(layers, rows=4)
    view = kv.step_view(state, i32([1, 0, 2, 1]))  # row 1 has no token
    pairs = [(layer, dtype) for layer in range(2) for dtype in DTYPES]
    for layer, dtype in pairs:
        fresh = kv.read_state(storage, view, layer, dtype)
        assert not any(np.asarray(x).any() for x in fresh.values())
        storage = kv.write_state(storage, view, layer, values_of(layer, dtype), dtype)
    state = kv.advance(state, i32([1, 1, 2, 0]))
    view = kv.step_view(state, i32([0] * 4))
    for layer, dtype in pairs:
        read = kv.read_state(storage, view, layer, dtype)
        for name, array in values_of(layer, dtype).items():
            got = np.asarray(read[name])
            assert got[[0, 2]].tobytes() == array[[0, 2]].tobytes()
            assert not got[3].tobytes().strip(b"\0")  # nothing settled: zero by definition
            assert not got[1].tobytes().strip(b"\xff")  # settled, but never written
        assert leaves_equal(kv.write_state(storage, view, layer, read, dtype), storage)


def test_a_flat_step_writes_the_states_of_its_rows():
    state, storage = world([kv.RecurrentState({"sum": ((2,), "float32")})], rows=3)
    view = kv.ragged_view(state, i32([2, -1, 0, 2]), i32([0, 3, 7, 1]))  # row 0: beyond its room
    storage = kv.write_state(storage, view, 0, {"sum": np.full((3, 2), 5, np.float32)})
    state = kv.advance(state, i32([1, 1, 1]))
    sums = kv.read_state(storage, kv.step_view(state, i32([0] * 3)), 0)["sum"]
    assert np.asarray(sums)[2].tolist() == [5, 5]
    assert np.isnan(np.asarray(sums)[:2]).all()


MIXED = [
    {"swa": kv.SlidingWindow(4, 1, 4), "mem": kv.RecurrentState({"s": ((2,), "float32")})},
    {"swa": kv.SlidingWindow(4, 1, 4)},
    None,
    {"swa": kv.FullAttention(1, 4), "one": kv.FullAttention(1, 4)},
]


def test_a_traced_tag_must_mean_one_group():
    state, storage = world(MIXED)
    view = kv.step_view(state, i32([1, 1]))
    read = jax.jit(lambda layer, tag: kv.read(storage, view, layer, tag), static_argnums=1)
    with pytest.raises(kv.SpecError, match=r"'swa' must mean one group, got full, window4"):
        read(0, "swa")
    with pytest.raises(kv.SpecError, match=r"no region .*'nope'.*'swa'"):
        read(0, "nope")
    with pytest.raises(kv.SpecError, match="keeps recurrent state; use read_state"):
        read(0, "mem")
    with pytest.raises(ValueError, match="layer: wanted i32"):
        read(0.0, "one")
    _, mask = read(0, None)  # only layer 1 has a single region
    assert not np.asarray(mask).any()
    assert np.asarray(read(1, None)[1]).any()


def test_a_traced_layer_without_the_region_is_absent():
    state, storage = world(MIXED)
    view = kv.step_view(state, i32([2, 2]))
    token = {name: jnp.ones((2, 2, 1, 4), jnp.bfloat16) for name in ("k", "v")}
    write = jax.jit(lambda layer: kv.write(storage, view, layer, token, tag="one"))
    read = jax.jit(lambda layer, s: kv.read(s, view, layer, tag="one"))
    written = write(3)
    assert not leaves_equal(written, storage)
    assert np.asarray(read(3, written)[1]).sum() == 4
    for layer in (0, 2, -1, 4, 2**31 - 1):
        assert leaves_equal(write(layer), storage)
        values, mask = read(layer, written)
        assert not np.asarray(mask).any()
        assert not any(np.asarray(x).any() for x in values.values())
    remember = jax.jit(lambda x: kv.write_state(storage, view, x, {"s": jnp.ones((2, 2))}, "mem"))
    recall = jax.jit(lambda layer: kv.read_state(storage, view, layer, "mem")["s"])
    assert leaves_equal(remember(1), storage)
    assert not leaves_equal(remember(0), storage)
    assert not np.asarray(recall(1)).any()


def test_eager_verbs_compile_once():
    state, storage = world([kv.FullAttention(1, 4), kv.RecurrentState({"s": ((9000,), "int8")})])
    compiled = (entries.write, entries.read, entries.read_state, entries.write_state)

    def every_verb(count):
        view = kv.step_view(state, i32([count, 1]))
        token = {name: np.full((2, 2, 1, 4), count, ml_dtypes.bfloat16) for name in ("k", "v")}
        written = kv.write(storage, view, 0, token)
        kv.read(written, view, 0)
        written = kv.write_state(written, view, 1, {"s": np.full((2, 9000), count, np.int8)})
        kv.read_state(written, view, 1)
        return [function._cache_size() for function in compiled]

    assert every_verb(0) == every_verb(1) == every_verb(2)


def test_a_storage_lies_where_it_is_asked_to():
    state, storage = world([kv.FullAttention(1, 4)])
    device = jax.devices()[0]
    for place in (device, jax.sharding.SingleDeviceSharding(device)):
        placed = kv.init_storage(storage.plan.spec, storage.plan, place)
        assert placed.blocks[0].committed
        assert placed.blocks[0].devices() == {device}
        assert not np.asarray(placed.blocks[0]).any()
    other = kv.CacheSpec.from_layers([kv.FullAttention(1, 8)], block_size=4)
    with pytest.raises(kv.SpecError, match="plan: made for the spec"):
        kv.init_storage(other, state.plan)
