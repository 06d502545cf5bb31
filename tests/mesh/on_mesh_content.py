"""On eight devices: the content of every payload is that of a cache without a mesh, bit for bit."""

import functools

import numpy as np
import pytest
from jax.sharding import AxisType
from lockstep import i32
from twins import EVERY_PAYLOAD, Twins, mesh_of, values_for

import kvpool as kv

LIMITS = {"max_seqs": 3, "max_seq_len": 24, "max_step_tokens": 6}


def twins(shards, ranks, bookkeeping, kind=AxisType.Auto):
    spec = kv.CacheSpec.from_layers(EVERY_PAYLOAD, block_size=4)
    blocks = {g.name: 8 if g.is_state else 24 for g in spec.groups}
    rules = kv.Rules(bookkeeping=bookkeeping)
    return Twins(spec, mesh_of(shards, ranks, kind), rules, num_blocks=blocks, **LIMITS)


reserve_each = functools.partial(kv.reserve, each=True)


@pytest.mark.parametrize(
    ("shards", "ranks", "bookkeeping", "kind"),
    [
        (2, 2, "per_shard", AxisType.Auto),
        (2, 4, "replicated", AxisType.Explicit),
        pytest.param(2, 4, "per_shard", AxisType.Explicit, marks=pytest.mark.slow),
        pytest.param(1, 4, "per_shard", AxisType.Auto, marks=pytest.mark.slow),
        pytest.param(4, 2, "replicated", AxisType.Auto, marks=pytest.mark.slow),
        pytest.param(8, 1, "replicated", AxisType.Auto, marks=pytest.mark.slow),
    ],
)
def test_a_session_of_every_verb(shards, ranks, bookkeeping, kind):
    pair = twins(shards, ranks, bookkeeping, kind)
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
