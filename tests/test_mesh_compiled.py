"""A decode step on a mesh of four GPUs that are not there: in place, by our kernels, and no more.

Of bookkeeping nothing moves between them; reads do just where one set of rows lies on all.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from compiled import compiled, gpu_mesh
from jax.sharding import NamedSharding, PartitionSpec

import kvpool as kv

ROWS, HEADS, SIZE = 16, 8, 128
SPEC = kv.CacheSpec.from_layers(
    [
        kv.FullAttention(HEADS, SIZE),
        kv.SlidingWindow(1024, HEADS, SIZE),
        kv.RecurrentState({"ssm": ((HEADS, SIZE, SIZE), "float32")}),
    ]
)


def decode_step(rules, state, storage, num, k):
    """Room, every layer written and read, the tokens settled."""
    state, result = kv.reserve(state, num, each=True)
    num = jnp.where(result.granted, num, 0)
    view = kv.step_view(state, num)
    k = kv.own_heads(k, 2, rules)
    for layer in (0, 1):
        storage = kv.write(storage, view, layer, {"k": k, "v": k})
        past, seen = kv.read(storage, view, layer, max_blocks=8)
        k = k + past["k"].sum(axis=1, keepdims=True) + past["v"].sum(axis=1, keepdims=True)
    ssm = kv.read_state(storage, view, 2)["ssm"]
    storage = kv.write_state(storage, view, 2, {"ssm": ssm + 1})
    settled = jnp.where(seen.any(axis=1), num, 0)  # so reads of the tables come before
    return kv.advance(state, settled), storage, k[None]


def arrays_on(mesh, rules):
    """(state, storage, num, k) as shapes with their shardings."""
    shards, ranks = rules.sizes(mesh)
    blocks = {"full": 200_000, "window1024": 4096, "state": 16}
    plan = kv.plan(kv.per_rank(SPEC, ranks), num_blocks=blocks, max_seqs=ROWS, max_seq_len=8192)
    state, storage = jax.eval_shape(lambda: kv.init(SPEC, plan, mesh=mesh, rules=rules))
    lead = (shards,) if rules.bookkeeping == "per_shard" else ()
    num = jax.ShapeDtypeStruct((*lead, ROWS), jnp.int32)
    k = jax.ShapeDtypeStruct((*lead, ROWS, 1, HEADS, SIZE), jnp.bfloat16)

    def divided(tree, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    return (
        divided(state, rules.state),
        divided(storage, rules.storage),
        *divided((num, k), rules.state),
    )


@pytest.mark.parametrize("bookkeeping", ["per_shard", "replicated"])
def test_a_decode_step(bookkeeping):
    mesh, rules = gpu_mesh(data=2, model=2), kv.Rules(bookkeeping=bookkeeping)
    arrays = arrays_on(mesh, rules)
    lead = ("data",) if bookkeeping == "per_shard" else ()
    specs = rules.state, rules.storage, PartitionSpec(*lead, "model")

    def on_all(*args):
        return decode_step(rules, *args)

    step = jax.jit(kv.on_mesh(on_all, mesh, rules, out_specs=specs), donate_argnums=(0, 1))
    result = compiled(step, *arrays, mesh=mesh)
    storage = arrays[1]
    own = [array.sharding.shard_shape(array.shape)[2:] for array in storage.blocks]
    size = sum(array.size * array.dtype.itemsize for array in storage.blocks) // mesh.size
    assert result.has_machine_code
    assert result.aliased >= size
    assert result.temporary < 0.01 * size
    assert all(result.copies(shape) == 0 for shape in own)
    assert result.launches == 2 * 3 + 2
    moves = re.findall(r"(all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", result.program)
    # One for what is read of a layer; the state goes along with the first.
    assert moves == ([] if bookkeeping == "per_shard" else ["all-reduce"] * 2)
