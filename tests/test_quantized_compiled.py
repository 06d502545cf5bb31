"""Steps under scales compiled for a GPU that is not there: no pool is copied there either."""

import functools

import jax
import jax.numpy as jnp
import pytest
from compiled import compiled
from test_quantized_memory import VIEWS, by_number, scanned
from test_storage_memory import HEAD, HEADS, LAYERS, abstract, bytes_of

import kvpool as kv


@pytest.mark.parametrize("step", [by_number, scanned])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scales", ["token", "block"])
def test_steps_are_in_place(scales, view, step):
    view_of, lead = VIEWS[view]
    region = kv.FullAttention(HEADS, HEAD, dtype="float8_e4m3fn", scales=scales)
    state, storage = abstract([region] * LAYERS, 4096)
    tokens = jax.ShapeDtypeStruct((LAYERS, *lead, HEADS, HEAD), jnp.bfloat16)
    run = functools.partial(step, view_of=view_of)
    result = compiled(run, storage, state, tokens, donate=0)
    assert result.has_machine_code
    assert result.aliased >= bytes_of(storage)
    assert result.copies(storage.blocks[0].shape) == 0
    assert result.temporary < 0.02 * bytes_of(storage)
    # Of a layer 4 gathers; a scatter of both codes; per block, for each, 2 gathers and 2 scatters.
    layers = LAYERS if step is by_number else 1
    assert result.launches == layers * (5 if scales == "token" else 13)
