"""On eight devices: what is read is bit for bit what was written, and what moves to read it."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from lockstep import i32
from twins import collectives, mesh_of

import kvpool as kv

LAYERS = [
    kv.FullAttention(4, 4, dtype="bfloat16"),
    kv.SlidingWindow(5, 2, 4, dtype="int8", scales="token"),
    kv.RecurrentState({"ssm": ((4, 2), "float32")}),
]
SPEC = kv.CacheSpec.from_layers(LAYERS, block_size=2)
LIMITS = {"max_seqs": 2, "max_seq_len": 16, "num_blocks": {"full": 16, "window5": 16, "state": 4}}
NUM = i32([5, 3])


def values_of_a_step():
    """Among them zeros below zero, and NaNs of which every bit counts."""
    random = np.random.default_rng(0)
    k = random.integers(0, 2**16, (2, 5, 4, 4), np.uint16)
    k[0, :2] = 0x8000
    w = random.standard_normal((2, 5, 2, 4)).astype("bfloat16")
    return k.view(jax.numpy.bfloat16.dtype), w, random.standard_normal((2, 4, 2)).astype("float32")


def step(storage, state, k, w, s, own=False, cut=lambda x, axis: x):
    """Writes and reads all layers; gives what was read."""
    view = kv.step_view(state, NUM)
    k, w, s = cut(k, 2), cut(w, 2), cut(s, 1)
    storage = kv.write(storage, view, 0, {"k": k, "v": k})
    storage = kv.write(storage, view, 1, {"k": w, "v": -w})
    storage = kv.write_state(storage, view, 2, {"ssm": s})
    full, window = (kv.read(storage, view, layer, own=own) for layer in (0, 1))
    later = kv.step_view(kv.advance(state, NUM), i32([0, 0]))
    return storage, (full, window, kv.read_state(storage, later, 2))


def started(storage, state):
    state, _ = kv.admit(state, i32([0, 1]))
    return storage, kv.reserve(state, NUM)[0]


def on(mesh, bookkeeping):
    """What a test needs on a mesh: (rules, storage, state, *values as they are given)."""
    rules = kv.Rules(bookkeeping=bookkeeping)
    shards, ranks = rules.sizes(mesh)
    plan = kv.plan(kv.per_rank(SPEC, ranks), **LIMITS)
    state, storage = kv.init(SPEC, plan, mesh=mesh, rules=rules)
    storage, state = kv.on_mesh(started, mesh, rules)(storage, state)
    values = values_of_a_step()
    if bookkeeping == "per_shard":
        values = jax.tree.map(lambda x: np.stack([x] * shards), values)
    return rules, storage, state, *values


def everywhere(mesh, rules, own=False):
    """`step` with heads cut; gives what each rank read, with an axis of ranks in front."""
    cut = functools.partial(kv.own_heads, rules=rules)

    def of_rank(*args):
        storage, got = step(*args, own=own, cut=cut)
        return storage, jax.tree.map(lambda x: x[None, None] if own else x[None], got)

    lead = ("data",) if rules.bookkeeping == "per_shard" or own else ()
    specs = rules.storage, PartitionSpec(*lead, "model")
    return kv.on_mesh(of_rank, mesh, rules, out_specs=specs)


def without_a_mesh():
    plan = kv.plan(SPEC, **LIMITS)
    state, storage = kv.init(SPEC, plan)
    return jax.jit(step)(*started(storage, state), *values_of_a_step())[1]


@pytest.mark.parametrize("bookkeeping", ["per_shard", "replicated"])
def test_every_rank_reads_its_heads(bookkeeping):
    mesh = mesh_of(4, 2)
    rules, *args = on(mesh, bookkeeping)
    program = everywhere(mesh, rules).lower(*args).compile()
    moved = {"all-reduce"} if bookkeeping == "replicated" else set()
    assert collectives(program) == moved
    want, (_, got) = without_a_mesh(), program(*args)
    # On the host: jax itself loses the sign of a zero where it indexes what is divided.
    want, got = jax.tree.map(np.asarray, (want, got))
    for whole, read in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        axis = whole.ndim - 2  # of heads
        for rank in range(2):
            own = whole
            if whole.dtype != bool:
                own = np.split(whole, 2, axis=axis)[rank]
            parts = [read[rank]] if bookkeeping == "replicated" else list(read[:, rank])
            assert all(part.tobytes() == own.tobytes() for part in parts)
    k = want[0][0]["k"]
    assert k[0, :5].tobytes() == values_of_a_step()[0][0].tobytes()


def test_own_blocks_are_read_without_a_collective():
    mesh = mesh_of(4, 2)
    rules, *args = on(mesh, "replicated")
    program = everywhere(mesh, rules, own=True).lower(*args).compile()
    # Of the reads; a state is a row's, on one shard.
    assert program.as_text().count(" all-reduce(") == 1
    want = without_a_mesh()
    _, got = program(*args)
    for layer in range(2):
        values, mask = jax.tree.map(np.asarray, got[layer])
        assert mask.shape[:2] == (4, 2)
        assert np.array_equal(mask[:, 0].sum(axis=0), want[layer][1])  # each place on one shard
        for name, whole in want[layer][0].items():
            assert not values[name][~mask].any()
            words = values[name].view(np.uint16).astype(np.int64).sum(axis=0)  # [M, S, Lk, H, D]
            heads = np.concatenate(list(words), axis=2)
            assert np.array_equal(heads, np.asarray(whole).view(np.uint16))
    shards = [set(np.flatnonzero(m.any(axis=(0, 1)))) for m in np.asarray(got[0][1])]
    assert sum(map(bool, shards)) > 1  # the rows did spread


def test_what_an_absent_block_is_copied_to_stays():
    mesh = mesh_of(4, 2)
    rules, storage, state, *values = on(mesh, "replicated")
    storage, _ = everywhere(mesh, rules)(storage, state, *values)
    before = jax.tree.map(np.asarray, storage.blocks)
    copies = {"full": (i32([-1, 16, 3, 2**31 - 1]), i32([0, 1, 16, 2]))}
    copy = kv.on_mesh(kv.copy_blocks, mesh, rules)
    after = copy(storage, copies)
    assert all(np.array_equal(a, b) for a, b in zip(before, after.blocks, strict=True))
    after = copy(storage, {"full": (i32([0, 15, 5, 1]), i32([13, 6, 9, -1]))}).blocks[0]
    flat = before[0].transpose(1, 0, 2, 3).reshape(2, 16, -1)
    want = flat.copy()
    want[:, [13, 6, 9]] = flat[:, [0, 15, 5]]
    assert np.array_equal(np.asarray(after).transpose(1, 0, 2, 3).reshape(2, 16, -1), want)
    assert want.any(axis=-1).sum() > 8
