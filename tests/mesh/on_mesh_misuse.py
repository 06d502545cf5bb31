"""On eight devices: what cannot be is refused by name, with what to do about it."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from lockstep import i32
from twins import mesh_of

import kvpool as kv

SPEC = kv.CacheSpec.from_layers(
    [kv.FullAttention(2, 4), kv.RecurrentState({"ssm": ((4, 2), "float32")})], block_size=2
)


def plan_for(spec, full=8, state=2):
    return kv.plan(spec, num_blocks={"full": full, "state": state}, max_seqs=2, max_seq_len=8)


HALF = plan_for(kv.per_rank(SPEC, 2))


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"blocks": "dp"}, "blocks='dp' is no axis of the mesh, which has 'data', 'model'; name"),
        ({"heads": "tp"}, "heads='tp' is no axis of the mesh, which has 'data', 'model'; name one"),
        ({"blocks": "model"}, "wanted two axes for blocks and heads, got 'model' twice"),
        ({"bookkeeping": "both"}, "bookkeeping 'per_shard' or 'replicated', got 'both'"),
    ],
)
def test_rules(rules, told):
    rules, mesh = kv.Rules(**rules), mesh_of(2, 2)
    with pytest.raises(kv.SpecError, match=told):
        kv.init(SPEC, HALF, mesh=mesh, rules=rules)
    with pytest.raises(kv.SpecError, match=told):
        kv.on_mesh(kv.reserve, mesh, rules)


@pytest.mark.parametrize(
    ("plan", "ranks", "told"),
    [
        (plan_for(SPEC), 2, r"made for the whole spec.*one of 2 ranks.*kvpool.per_rank\(spec, 2\)"),
        (HALF, 4, r"plan: made for the spec \w{12}, wanted it for what one of 4 ranks keeps"),
        (
            HALF,
            3,
            "axis 'model' has 3 devices, but buffer 'k': 2 heads cannot.*3 ranks; give",
        ),
    ],
)
def test_plans(plan, ranks, told):
    with pytest.raises(kv.SpecError, match=told):
        kv.init(SPEC, plan, mesh=mesh_of(2, ranks))


def test_blocks_that_the_shards_cannot_divide():
    rules = kv.Rules(bookkeeping="replicated")
    plan = plan_for(kv.per_rank(SPEC, 2), full=10, state=4)
    told = "full has 10 blocks, which 4 shards on axis 'data' cannot.* plan with num_blocks of 12"
    with pytest.raises(kv.SpecError, match=told):
        kv.init(SPEC, plan, mesh=mesh_of(4, 2), rules=rules)
    kv.init(SPEC, plan, mesh=mesh_of(2, 2), rules=rules)
    kv.init(SPEC, plan, mesh=mesh_of(4, 2))  # each shard has 10


def test_slabs_that_the_shards_cannot_divide():
    rules = kv.Rules(bookkeeping="replicated")
    spec = kv.per_rank(kv.with_pooling(SPEC, "elastic"), 2)
    plan = kv.plan(spec, budget_bytes=700, max_seqs=2, max_seq_len=8)
    assert plan.slabs % 4
    with pytest.raises(
        kv.SpecError, match=rf"has {plan.slabs} slabs, which 4 shards on axis.*budget_bytes of"
    ):
        kv.init(kv.with_pooling(SPEC, "elastic"), plan, mesh=mesh_of(4, 2), rules=rules)


def test_arguments_of_init():
    mesh = mesh_of(2, 2)
    with pytest.raises(ValueError, match="rules: they are for a mesh, got none"):
        kv.init(SPEC, plan_for(SPEC), rules=kv.Rules())
    with pytest.raises(ValueError, match="device: wanted a device or a mesh, got both"):
        kv.init(SPEC, HALF, device=jax.devices()[0], mesh=mesh)


ROWS = np.tile(i32([0, 1]), (2, 1))


@pytest.mark.parametrize(
    "verb",
    [
        lambda state: kv.admit(state, ROWS[0]),
        lambda state: kv.admit(state, ROWS[0], kv.Prefix(2, {})),
        lambda state: kv.reserve(state, ROWS),
        lambda state: kv.advance(state, ROWS),
        lambda state: kv.truncate(state, ROWS),
        lambda state: kv.fork(state, ROWS[0], ROWS[1]),
        lambda state: kv.snapshot(state, ROWS[0]),
        lambda state: kv.release(state, ROWS[0]),
        lambda state: kv.retain(state, {"full": ROWS[0]}),
        lambda state: kv.drop(state, {"full": ROWS[0]}),
        lambda state: kv.fits(state, ROWS),
        lambda state: kv.step_view(state, ROWS[0]),
        lambda state: kv.ragged_view(state, ROWS[0], ROWS[0]),
        lambda state: kv.free_blocks(state),
    ],
)
def test_a_verb_outside_of_on_mesh(verb):
    state, _ = kv.init(SPEC, HALF, mesh=mesh_of(2, 2))
    with pytest.raises(kv.SpecError, match=r"one shard's, got one of 2 shards.* through `on_mesh`"):
        verb(state)


def test_a_storage_outside_of_on_mesh():
    mesh = mesh_of(2, 2)
    _, storage = kv.init(SPEC, HALF, mesh=mesh)
    with pytest.raises(kv.SpecError, match=r"wanted one device's u\[N, W\], got 4 axes.*`on_mesh`"):
        kv.export_blocks(storage, "full", ROWS[0])
    _, storage = kv.init(SPEC, HALF, mesh=mesh, rules=kv.Rules(bookkeeping="replicated"))
    with pytest.raises(kv.SpecError, match="divided over the mesh axis 'data'; call its verbs in"):
        kv.export_blocks(storage, "full", ROWS[0])


def test_heads_that_the_ranks_cannot_divide():
    mesh = mesh_of(2, 3)
    values = np.zeros((2, 5, 4, 4), np.float32)
    with pytest.raises(kv.SpecError, match="values: 4 heads cannot be divided among 3 ranks on"):
        kv.on_mesh(lambda x: kv.own_heads(x, 1), mesh)(values)


def test_axes_that_there_are_not():
    """None for both: one device's cache, in the shapes of a mesh."""
    rules = kv.Rules(blocks=None, heads=None)
    mesh = mesh_of(2, 2)
    state, storage = kv.init(SPEC, plan_for(SPEC), mesh=mesh, rules=rules)
    assert storage.blocks[0].shape[:3] == (1, 1, 8)
    state, result = kv.on_mesh(kv.admit, mesh, rules)(state, ROWS[:1])
    assert np.asarray(result.granted).tolist() == [[True, True]]
    kv.check(state)


def test_what_differs_between_ranks_is_not_taken_for_the_same():
    mesh = mesh_of(2, 2)
    _, storage = kv.init(SPEC, HALF, mesh=mesh)
    export = kv.on_mesh(lambda storage: kv.export_blocks(storage, "full", ROWS[0]), mesh)
    with pytest.raises(ValueError, match=r"out_specs.*model"):
        export(storage)


def test_no_mesh():
    with pytest.raises(kv.SpecError, match=r"mesh: wanted a jax.sharding.Mesh, got \('data',\)"):
        kv.init(SPEC, HALF, mesh=("data",))


ONE_BOOK = kv.Rules(bookkeeping="replicated")


@pytest.mark.parametrize("given", [np.ones((3, 2), np.int32), np.ones((4, 2), np.int32), 3])
def test_arguments_that_lack_the_axis_of_shards(given):
    mesh = mesh_of(2, 2)
    state, _ = kv.init(SPEC, HALF, mesh=mesh)
    told = f"an axis of 2 shards in front, got one of the shape {list(np.shape(given))}; rules say"
    with pytest.raises(kv.SpecError, match=re.escape(told)):
        kv.on_mesh(kv.reserve, mesh)(state, given)


def test_rules_that_are_not_those_of_the_cache():
    mesh = mesh_of(2, 2)
    per_shard, own = kv.init(SPEC, HALF, mesh=mesh)
    replicated, divided = kv.init(SPEC, HALF, mesh=mesh, rules=ONE_BOOK)
    with pytest.raises(kv.SpecError, match=r"2 shards in front, got .*; rules say.*'per_shard'"):
        kv.on_mesh(kv.reserve, mesh)(replicated, ROWS)
    with pytest.raises(kv.SpecError, match=r"one shard's, got one of 2 shards"):
        kv.on_mesh(kv.reserve, mesh, ONE_BOOK)(per_shard, ROWS[0])
    told = "storage: made for another mesh or other rules than those of `on_mesh`"
    copies = {"full": (ROWS[0], ROWS[1])}
    with pytest.raises(kv.SpecError, match=told):
        kv.on_mesh(lambda storage: kv.copy_blocks(storage, copies), mesh)(divided)
    with pytest.raises(kv.SpecError, match=told):
        kv.on_mesh(lambda storage: kv.copy_blocks(storage, copies), mesh, ONE_BOOK)(own)
    with pytest.raises(kv.SpecError, match=told):
        kv.on_mesh(lambda storage: kv.copy_blocks(storage, copies), mesh_of(4, 2))(own)


def test_own_heads_outside_of_on_mesh():
    with pytest.raises(kv.SpecError, match="values: there is no mesh axis 'model' here; call it"):
        kv.own_heads(np.zeros((2, 4)), 1)


@pytest.mark.parametrize(
    ("segments", "rows"),
    [((), [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
     ((2, (2, 2), (1, 2), 2), [[0, 2, 3, 6, 7, 8], [1, 4, 5, 6, 7, 9]])],
)  # fmt: skip
def test_joined_segments_are_cut_each_for_itself(segments, rows):
    """As per_rank and transfers cut the same buffer."""
    values = np.tile(np.arange(10, dtype=np.int32), (2, 1))
    own = functools.partial(kv.own_heads, axis=0, segments=segments)
    function = kv.on_mesh(own, mesh_of(2, 2), out_specs=PartitionSpec("data", "model"))
    got = np.asarray(function(values)).reshape(2, 2, -1)
    assert got.tolist() == [rows, rows]
    spec = kv.CacheSpec.from_layers([kv.RecurrentState({"c": ((10,), "int32", segments)})])
    plan = kv.transfer.plan(spec, 1, kv.transfer.Shards(1), kv.transfer.Shards(2))
    for rank in range(2):
        (piece,) = plan.pieces(0, rank)
        cuts = piece.lane.cuts
        assert [r for c in cuts for r in range(c.source // 4, (c.source + c.run) // 4)] == rows[
            rank
        ]


def test_segments_that_are_not_the_axis():
    with pytest.raises(kv.SpecError, match="segments: 8 rows in all, wanted the 10 of values"):
        kv.on_mesh(lambda x: kv.own_heads(x, 0, segments=(4, 4)), mesh_of(2, 2))(
            np.zeros((2, 10), np.int32)
        )
