"""Blocks go from one plan of a spec to another, whatever words their arrays are made of."""

import jax
import numpy as np
import pytest
from lockstep import i32

import kvpool as kv

SPEC = kv.CacheSpec.from_layers(
    [kv.FullAttention(2, 8), kv.SlidingWindow(8, 4, 8, dtype="int8")], 4, "elastic"
)
LIMITS = {"max_seqs": 2, "max_seq_len": 32, "max_step_tokens": 8}
SHARED = kv.plan(SPEC, 20_000, **LIMITS)  # one array, in bytes
APART = kv.plan(SPEC, 20_000, num_blocks={"full": 6}, charge_explicit=True, **LIMITS)


def filled(plan):
    storage = kv.init_storage(SPEC, plan)
    random = np.random.default_rng(0)

    def full(array):
        high = np.iinfo(array.dtype).max
        return jax.numpy.asarray(random.integers(0, high, array.shape, array.dtype, endpoint=True))

    return kv.Storage(tuple(map(full, storage.blocks)), plan)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize(("source", "target"), [(SHARED, APART), (APART, SHARED)])
def test_they_arrive_bit_by_bit(source, target, on_host):
    data = kv.export_blocks(filled(source), "full", i32([4, 1]))
    data = np.asarray(data) if on_host else data
    assert data.dtype.itemsize == {SHARED: 1, APART: 2}[source]
    storage = kv.import_blocks(kv.init_storage(SPEC, target), "full", i32([0, 2]), data)
    arrived = np.asarray(kv.export_blocks(storage, "full", i32([0, 2])))
    assert arrived.dtype.itemsize == {SHARED: 1, APART: 2}[target]
    assert arrived.tobytes() == np.asarray(data).tobytes()


def test_bytes_that_are_no_block_are_refused():
    storage = kv.init_storage(SPEC, APART)
    for data in (np.zeros((1, 63), np.uint8), np.zeros((1, 128), np.float16)):
        with pytest.raises(ValueError, match=r"data: wanted uint16\[1, 128\], got"):
            kv.import_blocks(storage, "full", i32([0]), data)
