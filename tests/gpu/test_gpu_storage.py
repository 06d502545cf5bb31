"""The verbs of storage give on the GPU what they give on the CPU, bit for bit unless quantised."""

import jax
import numpy as np
import pytest
from lockstep import i32
from storage_cases import numpy_dtype, random_bits
from where import running

import kvpool as kv

pytestmark = pytest.mark.gpu
ROWS, LENGTH, STEP = 4, 48, 12
LAYERS = {
    "heads of 64": kv.FullAttention(2, 64),
    "heads of 80 in fp8": kv.FullAttention(3, 80, dtype="float8_e4m3fn"),
    "window, k wider than v": kv.SlidingWindow(12, 2, 192, 128),
    "chunk": kv.ChunkedLocal(16, 1, 96, dtype="float16"),
    "latent": kv.LatentAttention(512, 64),
    "entries of 584 bytes": kv.Compressed(4, 584, dtype="uint8"),
    "entries of 132 bytes": kv.Compressed(4, 132, dtype="uint8"),
}
STATE = kv.RecurrentState({"conv": ((40, 3), "bfloat16"), "ssm": ((2, 16, 128), "float32")})
QUANTISED = ("int8", "float8_e4m3fn")


def start(layers):
    """(state, storage) of empty rows in a pool with room for all of them and their forks."""
    spec = kv.CacheSpec.from_layers(layers, block_size=8)
    sizes = {group.name: 60 for group in spec.groups}
    plan = kv.plan(spec, num_blocks=sizes, max_seqs=ROWS, max_seq_len=LENGTH, max_step_tokens=STEP)
    state, storage = kv.init(spec, plan)
    for group, blocks in zip(spec.groups, storage.blocks, strict=True):
        poison = np.full(blocks.shape, np.iinfo(blocks.dtype).max, blocks.dtype)
        storage = kv.import_blocks(storage, group.name, i32(range(60)), poison)
    return kv.admit(state, i32([0, 1]))[0], storage


def values_of(region, seed, lead):
    """Random values of a write, by buffer: every bit pattern where they are not quantised."""
    if region.compute_dtype is None:
        buffers = enumerate(region.payload)
        return {b.name: random_bits(seed + i, b.dtype, (*lead, *b.shape)) for i, b in buffers}
    normal = np.random.default_rng(seed).normal
    return {
        b.name: normal(size=(*lead, *b.shape)).astype(numpy_dtype(b.dtype)) for b in region.values
    }


def write_and_read(storage, view, layers, lead, seed):
    """(storage, what the step reads): every layer writes its tokens or state and reads."""
    seen = []
    for layer, region in enumerate(layers):
        if region.kind == "state":
            seen.append(kv.read_state(storage, view, layer))
            values = values_of(region, seed + layer, (ROWS,))
            storage = kv.write_state(storage, view, layer, values)
            seen.append(kv.read_state(storage, view, layer))
        else:
            storage = kv.write(storage, view, layer, values_of(region, seed + layer, lead))
            seen.append(kv.read(storage, view, layer))
    return storage, seen


def mixed_step(state):
    """A flat view of the next tokens, the last first, of rows of which one has none."""
    counts = i32([2, 0, 1, 3])
    state, _ = kv.reserve(state, counts, each=True)
    tokens = [(row, at) for row in range(ROWS) for at in range(int(counts[row]))][::-1]
    lengths = np.asarray(state.seq_lens)
    rows = i32([row for row, _ in tokens] + [-1])
    return state, kv.ragged_view(state, rows, i32([lengths[row] + at for row, at in tokens] + [0]))


def a_life(layers):
    """What every verb gives in the life of two rows, their forks and copies: a list of arrays."""
    state, storage = start(layers)
    seen = []
    for number, counts in enumerate(([STEP, 5, 0, 0], [1, 1, 0, 0], [3, STEP, 0, 0])):
        counts = i32(counts)
        state, result = kv.reserve(state, counts)
        assert bool(result.ok)
        view = kv.step_view(state, counts)
        storage, read = write_and_read(storage, view, layers, (ROWS, STEP), 100 * number)
        state = kv.advance(state, counts)
        seen.append(read)
    for verb, *arguments in (
        (kv.fork, i32([0, 1]), i32([2, 3])),
        (kv.truncate, i32([-1, -1, -1, 18])),
        (kv.snapshot, i32([0])),
    ):
        state, result = verb(state, *arguments)
        storage = kv.copy_blocks(storage, result.copies)
        seen.append(result)
    state, view = mixed_step(state)
    storage, read = write_and_read(storage, view, layers, view.rows.shape, 900)
    seen.append(read)
    for group in storage.plan.spec.groups:
        data = kv.export_blocks(storage, group.name, i32([3, -1, 0, 59, 7]))
        storage = kv.import_blocks(storage, group.name, i32([50, 51, -1, 52, 10**6]), data)
        seen.extend([data, kv.export_blocks(storage, group.name, i32(range(60)))])
    kv.check(state)
    return jax.device_get(jax.tree.leaves((seen, state)))


def here_and_on_the_cpu(layers):
    """`a_life` on the device under test, and by the XLA implementation on the CPU."""
    with running():
        here = a_life(layers)
    with jax.default_device(jax.devices("cpu")[0]):
        return here, a_life(layers)


@pytest.mark.parametrize("name", LAYERS)
def test_every_verb_gives_the_bits_of_the_cpu(name):
    here, there = here_and_on_the_cpu([LAYERS[name], STATE, LAYERS[name]])
    assert len(here) == len(there) > 30
    for got, wanted in zip(here, there, strict=True):
        assert got.dtype == wanted.dtype
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("scales", ["token", "block"])
@pytest.mark.parametrize("dtype", QUANTISED)
def test_quantised_values_are_those_of_the_cpu_to_a_step_of_the_code(dtype, scales):
    """Devices may round a scale differently, and with it a value that lies between two codes."""
    layers = [kv.FullAttention(2, 64, dtype=dtype, scales=scales, compute_dtype="float32")]
    here, there = here_and_on_the_cpu(layers)
    compared = 0
    for got, wanted in zip(here, there, strict=True):
        if got.dtype != np.float32:
            continue
        compared += np.count_nonzero(wanted)
        largest = np.abs(wanted).max()
        assert largest < 6
        step = 2 * largest / 127 if dtype == "int8" else np.maximum(np.abs(wanted), 1e-3) / 8
        assert (np.abs(got - wanted) <= step * 1.01).all()
    assert compared > 10_000
