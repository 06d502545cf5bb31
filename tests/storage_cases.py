"""Storages for the tests: every block filled with all-one bits, rows that have room."""

import dataclasses

import ml_dtypes
import numpy as np
from lockstep import i32

import kvpool as kv

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def random_bits(seed, name, shape):
    """Values of every bit pattern of a dtype."""
    dtype = numpy_dtype(name)
    raw = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return raw.view(dtype)[..., 0]


def enlarged(plan, times):
    """The plan with so many times the blocks, more than its rows can fill."""
    blocks = tuple(times * count for count in plan.blocks)
    return dataclasses.replace(plan, blocks=blocks, slabs=times * plan.slabs)


def world(layers, rows=2, tokens=6, max_len=12, block_size=4, blocks=8):
    """(state, storage): rows that have room for `tokens`, every block filled with all-one bits."""
    spec = kv.CacheSpec.from_layers(layers, block_size=block_size)
    plan = kv.plan(
        spec,
        num_blocks={group.name: blocks for group in spec.groups},
        max_seqs=rows,
        max_seq_len=max_len,
        max_step_tokens=6,
    )
    state, storage = kv.init(spec, plan)
    state, _ = kv.admit(state, i32(range(rows)))
    state, result = kv.reserve(state, np.full(rows, tokens, np.int32))
    assert bool(result.ok)
    for group, array in zip(spec.groups, storage.blocks, strict=True):
        ones = np.full(array.shape, np.iinfo(array.dtype).max, array.dtype)
        storage = kv.import_blocks(storage, group.name, i32(range(blocks)), ones)
    return state, storage
