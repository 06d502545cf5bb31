"""On eight devices: the prefix cache and transfers, which work on one shard's rows."""

import numpy as np
import pytest
from lockstep import i32
from twins import mesh_of

import kvpool as kv
from kvpool.transfer import Shards, rows

FULL = kv.FullAttention(2, 4)
TOKENS = np.arange(8)


def cached(layers, bookkeeping):
    """(cache, state, storage, spec) with 4 tokens in row 1 of every shard."""
    spec = kv.CacheSpec.from_layers(layers, block_size=2)
    own, mesh = kv.per_rank(spec, 2), mesh_of(2, 2)
    plan = kv.plan(own, num_blocks={g.name: 8 for g in own.groups}, max_seqs=2, max_seq_len=8)
    rules = kv.Rules(bookkeeping=bookkeeping)
    state, storage = kv.init(spec, plan, mesh=mesh, rules=rules)

    def everywhere(verb, state, row):
        row = i32(row) if rules.bookkeeping == "replicated" else np.tile(i32(row), (2, 1))
        return kv.on_mesh(verb, mesh, rules)(state, row)

    state, _ = everywhere(kv.admit, state, [1])
    state, result = everywhere(kv.reserve, state, [0, 4])
    assert np.asarray(result.ok).all()
    return kv.PrefixCache(own, plan), everywhere(kv.advance, state, [0, 4]), storage, spec


def test_states_of_several_shards_are_refused():
    cache, state, storage, spec = cached([FULL], "per_shard")
    for call in (
        lambda: cache.insert(state, storage, TOKENS, 1),
        lambda: cache.evict(state, {"full": 8}),
        lambda: cache.clear(state),
        lambda: cache.check(state),
        lambda: rows.begin(state, 0, 4),
        lambda: rows.offer_of(state, storage, 1, "r", spec, Shards(2)),
    ):
        with pytest.raises(kv.SpecError, match=r"one shard's, got one of 2 shards.* `on_mesh`"):
            call()
    assert cache.match(TOKENS).length == 0


def test_states_on_divided_blocks_are_refused_before_anything_is_published():
    state_layer = kv.RecurrentState({"ssm": ((4, 2), "float32")})
    cache, state, storage, _ = cached([FULL, state_layer], "replicated")
    with pytest.raises(kv.SpecError, match="storage: on a mesh, where the cache has no way to"):
        cache.insert(state, storage, TOKENS, 1)
    cache.check(state)
    assert cache.stats().held == {"full": 0, "state": 0}


def test_one_bookkeeping_of_divided_blocks_has_a_prefix_cache():
    cache, state, storage, _ = cached([FULL], "replicated")
    state, storage = cache.insert(state, storage, TOKENS, 1)
    cache.check(state)
    hit = cache.match(TOKENS)
    assert hit.length == 4
    state = kv.release(state, [1])
    state, result = kv.admit(state, [0], hit.prefix)
    assert bool(result.ok)
    kv.check(state)
    cache.check(state)
