"""Writing and reading under scales copies no pool, by number and in a scan over layers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_storage_memory import HEAD, HEADS, LAYERS, ONES, ROWS, abstract, bytes_of

import kvpool as kv

WIDE = np.full(ROWS, 16, np.int32)
FLAT = np.repeat(np.arange(ROWS, dtype=np.int32), 16), np.tile(np.arange(16, dtype=np.int32), ROWS)
VIEWS = {
    "decode": (lambda state: kv.step_view(state, ONES), (ROWS, 1)),
    "wide": (lambda state: kv.step_view(state, WIDE), (ROWS, 16)),
    "flat": (lambda state: kv.ragged_view(state, *FLAT), (ROWS * 16,)),
}


def one_layer(storage, view, layer, tokens, carried):
    """A layer written, its first blocks read, and a number that depends on all of that."""
    tokens = tokens + carried
    storage = kv.write(storage, view, layer, {"k": tokens, "v": tokens})
    values, _ = kv.read(storage, view, layer, max_blocks=1)
    total = sum(x.astype(jnp.float32).sum() for x in values.values())
    return storage, total.astype(jnp.bfloat16)


def by_number(storage, state, tokens, view_of):
    view, carried = view_of(state), jnp.bfloat16(0)
    for layer in range(LAYERS):
        storage, carried = one_layer(storage, view, layer, tokens[layer], carried)
    return storage, carried


def scanned(storage, state, tokens, view_of):
    view = view_of(state)

    def body(carry, pair):
        storage, carried = carry
        return one_layer(storage, view, *pair, carried), None

    carry = storage, jnp.bfloat16(0)
    return jax.lax.scan(body, carry, (jnp.arange(LAYERS), tokens))[0]


@pytest.mark.parametrize("step", [by_number, scanned])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("scales", ["token", "block"])
@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
def test_temporary_memory_does_not_grow_with_the_pool(dtype, scales, view, step):
    view_of, lead = VIEWS[view]
    tokens = jax.ShapeDtypeStruct((LAYERS, *lead, HEADS, HEAD), jnp.bfloat16)
    temporary = []
    for blocks in (1024, 4096):
        region = kv.FullAttention(HEADS, HEAD, dtype=dtype, scales=scales)
        state, storage = abstract([region] * LAYERS, blocks)
        run = jax.jit(step, donate_argnums=0, static_argnums=3)
        compiled = run.lower(storage, state, tokens, view_of).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= bytes_of(storage)
        pool = re.escape("u8[{},{}]".format(*storage.blocks[0].shape))
        assert not re.search(pool + r"\S* copy\(", compiled.as_text())
        # The free stack and the holder counts of the state are 8 bytes a block.
        temporary.append(memory.temp_size_in_bytes - 8 * blocks)
    assert temporary[1] <= temporary[0]
