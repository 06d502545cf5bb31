"""On eight devices: the content of every payload is that of a cache without a mesh, bit for bit."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec
from lockstep import i32
from twins import EVERY_PAYLOAD, Twins, mesh_of, values_for, written

import kvpool as kv

LIMITS = {"max_seqs": 3, "max_seq_len": 24, "max_step_tokens": 6}


def twins(shards, ranks, bookkeeping, kind=AxisType.Auto, pooling="independent"):
    rules, mesh = kv.Rules(bookkeeping=bookkeeping), mesh_of(shards, ranks, kind)
    if pooling == "elastic":  # all blocks are divided, so that the slabs are alike
        state = kv.RecurrentState({"ssm": ((4, 4, 2), "float32")})
        spec = kv.CacheSpec.from_layers([*EVERY_PAYLOAD[:2], state], 4, pooling)
        return Twins(spec, mesh, rules, budget_bytes=6 * 768, slab_bytes=768, **LIMITS)
    spec = kv.CacheSpec.from_layers(EVERY_PAYLOAD, block_size=4)
    blocks = {g.name: 8 if g.is_state else 24 for g in spec.groups}
    return Twins(spec, mesh, rules, num_blocks=blocks, **LIMITS)


reserve_each = functools.partial(kv.reserve, each=True)


@pytest.mark.parametrize(
    ("shards", "ranks", "bookkeeping", "kind"),
    [
        (2, 4, "replicated", AxisType.Explicit),  # fewer heads than ranks
        pytest.param(2, 2, "per_shard", AxisType.Auto, marks=pytest.mark.slow),
        pytest.param(2, 4, "per_shard", AxisType.Explicit, marks=pytest.mark.slow),
        pytest.param(1, 4, "per_shard", AxisType.Auto, marks=pytest.mark.slow),
        pytest.param(4, 2, "replicated", AxisType.Auto, marks=pytest.mark.slow),
        pytest.param(8, 1, "replicated", AxisType.Auto, marks=pytest.mark.slow),
    ],
)
def test_a_session_of_every_verb(shards, ranks, bookkeeping, kind):
    run_session(twins(shards, ranks, bookkeeping, kind))


@pytest.mark.slow
@pytest.mark.parametrize("bookkeeping", ["per_shard", "replicated"])
def test_a_session_in_slabs(bookkeeping):
    run_session(twins(2, 2, bookkeeping, pooling="elastic"))


def run_session(pair):
    books = range(pair.books)
    pair.ask(kv.admit, [(i32([0, 1]),) for _ in books])
    for turn in range(3):
        num = [i32([6 - book % 3, 3 + turn, 4]) for book in books]
        results = pair.ask(reserve_each, [(n,) for n in num])
        assert all(r.granted.tolist() == [True, True, False] for r in results)
        pair.write(num, [values_for(pair.spec, 3, 6, 10 * turn + book) for book in books])
        pair.ask(
            kv.advance, [(np.where(r.granted, n, 0),) for n, r in zip(num, results, strict=True)]
        )
    pair.compare_blocks()
    results = pair.ask(kv.fork, [(i32([0]), i32([2])) for _ in books])
    assert all(r.ok for r in results)
    pair.compare_blocks()
    pair.ask(kv.snapshot, [(i32([1]),) for _ in books])
    pair.ask(kv.release, [(i32([0]),) for _ in books])
    pair.compare_blocks()


@pytest.mark.slow
@pytest.mark.parametrize("bookkeeping", ["per_shard", "replicated"])
def test_a_shard_map_of_the_users_own_that_checks_what_varies(bookkeeping):
    """It refuses a state that may differ between ranks, a storage between shards."""
    pair = twins(2, 2, bookkeeping)
    rules, num = pair.rules, i32([5, 3, 0])
    values = values_for(pair.of_rank, 3, 6, 0)
    axes = 0 if bookkeeping == "replicated" else 1

    def step(state, storage):
        state = jax.tree.map(lambda x: x.reshape(x.shape[axes:]), state)
        storage = jax.tree.map(lambda x: x[0, 0], storage)
        state, _ = kv.admit(state, i32([0, 1]))
        state, _ = kv.reserve(state, num)
        storage = written(storage, state, num, values)
        seen = kv.read(storage, kv.step_view(state, num), 0)[0]["k"]
        state, result = kv.fork(kv.advance(state, num), i32([0]), i32([2]))
        storage = kv.copy_blocks(storage, result.copies)
        state = jax.tree.map(lambda x: x.reshape((1,) * axes + x.shape), state)
        return state, jax.tree.map(lambda x: x[None, None], storage), seen[None]

    specs = rules.state, rules.storage
    mapped = jax.shard_map(
        step, mesh=pair.mesh, in_specs=specs, out_specs=(*specs, PartitionSpec(("data", "model")))
    )
    state, _, seen = jax.jit(mapped)(pair.state, pair.storage)
    kv.check(state)
    assert np.asarray(seen).shape[0] == 4
    assert np.array_equal(np.asarray(seen)[0, 0, :5], values[0, None]["k"][0, :5])
