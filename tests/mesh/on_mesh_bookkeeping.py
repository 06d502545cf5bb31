"""On eight devices: the bookkeeping of every shard is that of a cache without a mesh."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from lockstep import i32, leaves_equal
from twins import Twins, collectives, mesh_of

import kvpool as kv

LAYERS = [
    kv.FullAttention(2, 4, dtype="float32"),
    kv.SlidingWindow(4, 2, 4, dtype="float32"),
    kv.RecurrentState({"sum": ((2, 4), "float32")}),
]
BLOCKS = {"full": 12, "window4": 9, "state": 6}
LIMITS = {"max_seqs": 3, "max_seq_len": 18, "max_step_tokens": 5}


def twins(shards, ranks, bookkeeping="per_shard", pooling="independent", kind=AxisType.Auto):
    spec = kv.CacheSpec.from_layers(LAYERS, block_size=2, pooling=pooling)
    limits = {**LIMITS, "num_blocks": BLOCKS}
    if pooling != "independent":
        limits = {**LIMITS, "budget_bytes": 1600, "snapshots": 2}
    rules = kv.Rules(bookkeeping=bookkeeping)
    return Twins(spec, mesh_of(shards, ranks, kind), rules, **limits)


verbs = {
    "admit": kv.admit,
    "reserve": kv.reserve,
    "reserve_each": functools.partial(kv.reserve, each=True, tail_only=True),
    "advance": kv.advance,
    "truncate": kv.truncate,
    "fork": kv.fork,
    "snapshot": kv.snapshot,
    "release": kv.release,
    "retain": kv.retain,
    "drop": kv.drop,
}


def arguments_of(name: str, random) -> tuple:
    """Mostly sensible ones, in all of the verbs' own shapes."""
    rows = random.permutation(4).astype(np.int32) - 1
    if name in ("retain", "drop"):
        return ({"full": random.integers(-1, 13, 4).astype(np.int32)},)
    if name == "fork":
        return rows[:2], random.permutation(4).astype(np.int32)[:2] - 1
    if name in ("admit", "snapshot", "release"):
        return (rows[:2],)
    return (random.integers(-1, 6, 3).astype(np.int32),)


def walk(pair: Twins, steps: int, seed: int) -> None:
    """Verbs at random, the same one for all books but with arguments of their own."""
    random = np.random.default_rng(seed)
    names = [*verbs, "admit", "reserve", "reserve", "advance", "advance"]
    pair.ask(kv.admit, [(i32([0, 1]),) for _ in range(pair.books)])
    for _ in range(steps):
        name = random.choice(names)
        pair.ask(verbs[name], [arguments_of(name, random) for _ in range(pair.books)])


@pytest.mark.parametrize(
    ("shards", "ranks", "bookkeeping", "pooling", "kind"),
    [
        (4, 2, "per_shard", "independent", AxisType.Explicit),
        pytest.param(2, 2, "per_shard", "elastic", AxisType.Auto, marks=pytest.mark.slow),
        pytest.param(2, 2, "per_shard", "shared", AxisType.Auto, marks=pytest.mark.slow),
        pytest.param(3, 2, "replicated", "independent", AxisType.Auto, marks=pytest.mark.slow),
    ],
)
def test_any_order_of_verbs(shards, ranks, bookkeeping, pooling, kind):
    pair = twins(shards, ranks, bookkeeping, pooling, kind)
    walk(pair, steps=60, seed=shards)
    copying = {kv.copy_blocks} if bookkeeping == "replicated" else set()
    for (verb, _), program in pair.compiled.items():
        assert collectives(program) == ({"all-reduce"} if verb in copying else set())


def test_a_replicated_state_needs_no_shard_map():
    pair = twins(3, 2, "replicated")

    def session(state, rows, num):
        state, _ = kv.admit(state, rows)
        state, result = kv.reserve(state, num, each=True)
        state = kv.advance(state, jnp.where(result.granted, num, 0))
        return kv.release(state, rows[:1]), result

    given = i32([0, 2, -1]), i32([3, 2, 5])
    everywhere = NamedSharding(pair.mesh, PartitionSpec())
    jitted = jax.jit(session, in_shardings=everywhere, out_shardings=everywhere)
    program = jitted.lower(pair.state, *given).compile()
    assert collectives(program) == set()
    got, want = program(pair.state, *given), jax.jit(session)(pair.plain[0][0], *given)
    assert np.asarray(want[0].seq_lens).tolist() == [0, 0, 5]
    assert leaves_equal(jax.tree.leaves(got), jax.tree.leaves(want))
    kv.check(got[0])


@pytest.mark.slow
def test_a_shard_map_of_the_users_own_that_checks_what_varies():
    pair = twins(3, 2)

    def steps(state, rows):
        state = jax.tree.map(lambda x: x[0], state)
        state, _ = kv.admit(state, rows[0])
        state, result = kv.reserve(state, rows[0] + 2, each=True)
        state = kv.advance(state, jnp.where(result.granted, rows[0], 0))
        state = kv.release(kv.fork(state, rows[0, 1:2], rows[0, :1])[0], rows[0, 1:])
        return jax.tree.map(lambda x: x[None], state)

    over_shards = PartitionSpec("data")
    mapped = jax.shard_map(steps, mesh=pair.mesh, in_specs=over_shards, out_specs=over_shards)
    state = jax.jit(mapped)(pair.state, i32([[0, 1, 2], [-1, 1, 2], [0, -1, 2]]))
    assert np.asarray(state.seq_lens).tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 0]]
    assert np.asarray(state.live).tolist() == [[1, 0, 0], [0, 0, 0], [1, 0, 0]]
    kv.check(state)


def changed(array: jax.Array, device: int) -> jax.Array:
    """The array with another first element on one of its devices."""
    parts = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device.id == device:
            data.flat[0] += 1
        parts.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def test_check_names_the_shard():
    state = twins(3, 2).state
    for devices, told in [
        ((4, 5), r"^shard 2: group full, row 0: column 0 is live at settled length 1"),
        ((3,), r"^shard 1: state\.seq_lens is not the same on .*2.* and on .*3"),
    ]:
        seq_lens = functools.reduce(changed, devices, state.seq_lens)
        with pytest.raises(kv.InvariantError, match=told):
            kv.check(dataclasses.replace(state, seq_lens=seq_lens))


def test_check_compares_the_copies_of_a_replicated_state():
    state = twins(3, 2, "replicated").state
    with pytest.raises(
        kv.InvariantError, match=r"^state\.live is not the same on .*0.* and on .*5"
    ):
        kv.check(dataclasses.replace(state, live=changed(state.live, 5)))


def test_a_donated_state_is_changed_in_place():
    pair = twins(3, 2)
    admit = jax.jit(kv.on_mesh(kv.admit, pair.mesh, pair.rules), donate_argnums=0)
    state, _ = admit(pair.state, np.tile(i32([0, 2]), (3, 1)))
    assert pair.state.table.block_ids.is_deleted()
    assert np.asarray(state.live).tolist() == [[True, False, True]] * 3
    kv.check(state)
