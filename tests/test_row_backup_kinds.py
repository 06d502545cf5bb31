"""Rows go to the host and back whoever shares their blocks, from every memory, of every payload."""

import jax
import numpy as np
import pytest
from lockstep import i32
from storage_cases import numpy_dtype

import kvpool as kv
from kvpool.tiers import BLOCK_FIRST, LAYER_FIRST, HostTier, backup, discard, restore

STATE = kv.RecurrentState({"sum": ((2,), "float32")})
PLAIN = [kv.FullAttention(2, 4), kv.SlidingWindow(6, 2, 4), STATE]
SCALED = [
    kv.FullAttention(2, 8, dtype="float8_e4m3fn", scales="block"),
    kv.SlidingWindow(6, 2, 8, dtype="int8", scales="token"),
    kv.SlidingWindow(6, 2, 8, dtype="int8", scales="block"),
    STATE,
]
pytestmark = pytest.mark.slow


def step(spec, state, storage, counts, seed):
    """The rows' next tokens, with random values that are the same for every row."""
    random = np.random.default_rng(seed)
    state, result = kv.reserve(state, i32(counts))
    assert bool(result.ok)
    view = kv.step_view(state, i32(counts))
    for layer in range(len(spec.layers)):
        region = spec.group(spec.resolve(layer)[0]).region
        of_state = region.kind == "state"
        lead = (len(counts),) if of_state else (len(counts), 8)
        data = {
            buffer.name: np.broadcast_to(
                random.standard_normal((*lead[1:], *buffer.shape)).astype(
                    numpy_dtype(buffer.dtype)
                ),
                (*lead, *buffer.shape),
            )
            for buffer in region.values
        }
        write = kv.write_state if of_state else kv.write
        storage = write(storage, view, layer, data)
    return kv.advance(state, i32(counts)), storage


def read(spec, state, storage, row):
    view = kv.step_view(state, np.zeros(4, np.int32))
    seen = []
    for layer in range(len(spec.layers)):
        of_state = spec.group(spec.resolve(layer)[0]).region.kind == "state"
        seen.append((kv.read_state if of_state else kv.read)(storage, view, layer))
    return [np.asarray(leaf)[row].tobytes() for leaf in jax.tree.leaves(seen)]


@pytest.mark.parametrize("layout", [BLOCK_FIRST, LAYER_FIRST])
@pytest.mark.parametrize(
    ("layers", "pooling", "ranks"),
    [
        (SCALED, "elastic", 1),
        (SCALED, "independent", 1),
        (PLAIN, "elastic", 1),
        (PLAIN, "shared", 1),
        (PLAIN[:2], "independent", 2),
    ],
)
def test_a_row_whose_blocks_another_shares_comes_back_as_it_was(layers, pooling, ranks, layout):
    spec = kv.per_rank(kv.CacheSpec.from_layers(layers, 4, pooling), ranks)
    plan = kv.plan(spec, budget_bytes=1 << 18, max_seqs=4, max_seq_len=32, max_step_tokens=8)
    state, storage = kv.init(spec, plan)
    state, _ = kv.admit(state, i32([0]))
    for seed, count in enumerate((8, 3)):
        state, storage = step(spec, state, storage, [count, 0, 0, 0], seed)
    state, result = kv.fork(state, i32([0]), i32([2]))
    storage = kv.copy_blocks(storage, result.copies)
    before = read(spec, state, storage, 0)
    tier = HostTier(spec, {g.name: 8 for g in spec.groups}, layout=layout, chunk_bytes=128)
    record = backup(tier, state, storage, 0)
    state = kv.release(state, i32([0]))
    assert read(spec, state, storage, 2) == before
    state, storage, result = restore(tier, state, storage, record, 3, donate=True)
    assert bool(result.ok)
    kv.check(state)
    assert read(spec, state, storage, 3) == read(spec, state, storage, 2) == before
    for seed in (7, 8):  # both go on alike, also in the blocks that are half full
        state, storage = step(spec, state, storage, [0, 0, 3, 3], seed)
        assert read(spec, state, storage, 3) == read(spec, state, storage, 2)
    kv.check(state)
    discard(tier, record)
    assert tier.pools.available() == {g.name: 8 for g in spec.groups}
