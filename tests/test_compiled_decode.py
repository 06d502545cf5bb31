"""Compiled for a GPU: the demo's whole decode loop, in which no pool is copied, and block moves."""

import pathlib
import sys

import jax
import numpy as np
import pytest
from compiled import compiled
from flax import nnx
from storage_cases import enlarged
from test_storage_memory import (
    LAYERS,
    bytes_of,
    one_after_the_other,
    one_array,
    over_layers,
    side_by_side,
    token_of,
)

import kvpool as kv

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from decode_loop import plan_of  # noqa: E402
from paged_memory import cache_spec, chunk_step, decode_steps  # noqa: E402
from tiny_model import load  # noqa: E402

ROWS, STEPS = 16, 8


@pytest.fixture(
    scope="module",
    params=["independent", pytest.param("shared", marks=pytest.mark.slow), "elastic"],
)
def parts(request):
    """The model, its spec, and what the steps take before the tokens: params, state, storage."""
    graph, params = nnx.split(load())
    config = nnx.merge(graph, params).config
    spec = cache_spec(config)
    plan = plan_of(spec, ROWS, 200_000, config.context)
    if request.param != "independent":
        spec = kv.CacheSpec.from_layers(spec.layers, spec.block_size, request.param)
        plan = with_one_array(spec, config.context)
    state, storage = jax.eval_shape(lambda: kv.init(spec, plan))
    return graph, spec, (params, state, storage)


def with_one_array(spec, max_seq_len):
    """A plan of which groups share an array, a hundred times as large as the rows can fill."""
    plan = kv.plan(spec, budget_bytes=2**30, max_seqs=ROWS, max_seq_len=max_seq_len)
    assert len(plan.array_rows) < len(spec.groups)
    return enlarged(plan, 100)


def per_row(dtype=np.int32):
    return np.zeros(ROWS, dtype)


def in_place(result, spec, storage):
    """Every block array is an output, and none is copied on the way."""
    pools = {array.shape: array.size * array.dtype.itemsize for array in storage.blocks}
    assert result.aliased >= sum(pools.values())
    assert result.temporary < 0.02 * sum(pools.values())
    for shape in pools:
        assert result.copies(shape) == 0
    assert result.has_machine_code
    # Of a layer all buffers are written at once, and each is read by itself.
    assert result.launches == sum(
        len(group.layers) * (1 + len(group.region.buffers)) for group in spec.groups
    )


def test_decode_steps(parts):
    graph, spec, arrays = parts
    given = (*arrays, per_row(), per_row(), (per_row(), np.int32(0), np.float32(0)))
    in_place(compiled(decode_steps, graph, spec, *given, steps=STEPS), spec, arrays[2])


@pytest.mark.slow
def test_a_chunk_of_prompts(parts):
    graph, spec, arrays = parts
    tokens = np.zeros((ROWS, 64), np.int32)
    given = (*arrays, tokens, per_row(), per_row(bool), (per_row(), np.int32(0), np.float32(0)))
    in_place(compiled(chunk_step, graph, spec, *given), spec, arrays[2])


def test_whole_blocks_move_in_one_launch(parts):
    """All layers of a block at once, whatever the verb."""
    _, spec, (_, _, storage) = parts
    ids = np.zeros(40, np.int32)

    def move(storage, source, target):
        storage = kv.copy_blocks(storage, {"full": (source, target)})
        data = kv.export_blocks(storage, "full", target)
        return kv.import_blocks(storage, "full", source, data), data

    result = compiled(move, storage, ids, ids, donate=0)
    full = storage.blocks[storage.plan.array_of[spec.group_index("full")]]
    assert result.launches == 3
    assert result.copies(full.shape) == 0
    assert result.temporary == 0


@pytest.mark.parametrize("one_layer", [one_after_the_other, side_by_side])
def test_groups_that_share_an_array(one_layer):
    """In whatever order they are written and read."""
    state, storage = one_array("elastic")
    for step, layers in zip(over_layers(one_layer), (LAYERS, 1), strict=True):
        result = compiled(step, storage, state, token_of("bfloat16"), donate=0)
        assert result.has_machine_code
        assert result.aliased >= bytes_of(storage)
        assert result.temporary < 0.01 * bytes_of(storage)
        assert result.copies(storage.blocks[0].shape) == 0
        # Three writes, and two buffers read of each group: of the window's only by the first.
        assert result.launches == layers * (9 if one_layer is one_after_the_other else 7)
