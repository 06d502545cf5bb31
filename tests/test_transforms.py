"""Every verb eager, jitted, on numpy inputs, in a scan, under vmap and on the CPU device."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import parameterized
from lockstep import Setup, i32, leaves_equal

import kvpool as kv

SETUP = Setup(("all", ("window", 4), "state"), (12, 10, 5), block=2, rows=3, max_len=16, step=4)
ELASTIC = Setup(
    ("all", ("window", 4), "state"), (None,) * 3, block=2, rows=3, max_len=16, step=4,
    memory=11 * 192, slab=192, heads=(1, 3, 4), pooling="elastic",
)  # fmt: skip
SETUPS = pytest.mark.parametrize(
    "setup", [SETUP, pytest.param(ELASTIC, marks=pytest.mark.slow)], ids=["independent", "elastic"]
)
IDS = {"full": i32([0, -1]), "state": i32([0, 9])}


def verbs():
    """Name -> the verb as a function of the state and one argument, and that argument."""
    prefix = {g.name: i32([[0, 1, 2, 3, 4, 5, 6, 7], [-1] * 8]) for g in SETUP.spec.groups}
    return {
        "admit": (kv.admit, i32([2, -1])),
        "admit_prefix": (
            lambda s, r: kv.admit(s, r, kv.Prefix(i32([4, 0]), prefix)),
            i32([2, 0]),
        ),
        "reserve": (kv.reserve, i32([3, 1, 0])),
        "reserve_each": (lambda s, k: kv.reserve(s, k, each=True), i32([3, 9, 1])),
        "reserve_tail": (lambda s, k: kv.reserve(s, k, tail_only=True), i32([4, 0, 0])),
        "advance": (kv.advance, i32([1, 0, 5])),
        "truncate": (kv.truncate, i32([5, -1, 1])),
        "fork": (lambda s, d: kv.fork(s, i32([0, 1]), d), i32([2, 2])),
        "snapshot": (kv.snapshot, i32([0, 2])),
        "release": (kv.release, i32([0, -1])),
        "retain": (kv.retain, IDS),
        "drop": (kv.drop, IDS),
        "fits": (kv.fits, i32([9, 30, 1])),
        "clear_faults": (lambda s, _: kv.clear_faults(s), i32([0])),
    }


VERBS = verbs()


def used_state(lengths=(6, 3), setup=SETUP):
    """Rows 0 and 1 settled at these lengths, with room for one token more; row 2 free."""
    state = kv.init_state(setup.spec, setup.plan)
    state, _ = kv.admit(state, i32([0, 1]))
    for step in range(0, max(lengths), 3):
        num = i32([min(3, max(n - step, 0)) for n in (*lengths, 0)])
        state, _ = kv.reserve(state, num)
        state = kv.advance(state, num)
    state, _ = kv.reserve(state, i32([1, 1, 0]))
    kv.check(state)
    return state


class EagerAndJitted(chex.TestCase):
    @chex.variants(with_jit=True, without_jit=True)
    @parameterized.named_parameters((name, name) for name in VERBS)
    def test_same_answer(self, name):
        verb, argument = VERBS[name]
        state = used_state()
        want = jax.tree.map(np.asarray, verb(state, argument))
        assert leaves_equal(want, self.variant(verb)(state, argument))
        on_device = jax.tree.map(jnp.asarray, argument)
        assert leaves_equal(want, self.variant(verb)(state, on_device))


@pytest.mark.parametrize("name", VERBS)
def test_states_of_numpy_arrays(name):
    verb, argument = VERBS[name]
    state = used_state()
    assert leaves_equal(verb(state, argument), verb(jax.tree.map(np.asarray, state), argument))


@pytest.mark.parametrize("name", VERBS)
def test_lists_and_wider_integers_are_taken_as_int32(name):
    verb, argument = VERBS[name]
    wide = jax.tree.map(lambda x: x.astype(np.int64), argument)
    assert leaves_equal(verb(used_state(), argument), verb(used_state(), wide))


@pytest.mark.parametrize("name", VERBS)
@SETUPS
def test_a_batch_of_separate_states(setup, name):
    verb, argument = VERBS[name]
    states = [used_state(lengths, setup) for lengths in ((6, 3), (4, 2), (1, 5))]
    batch = jax.tree.map(lambda *x: jnp.stack(x), *states)
    got = jax.vmap(verb, in_axes=(0, None))(batch, argument)
    for i, state in enumerate(states):
        assert leaves_equal(verb(state, argument), jax.tree.map(lambda x, i=i: x[i], got)), name


def step(state, num):
    """Every verb once."""
    state, _ = kv.admit(state, i32([0, 1, -1]))
    state, granted = kv.reserve(state, num, each=True)
    state = kv.advance(state, jnp.where(granted.granted, num, 0))
    state, _ = kv.reserve(state, num * 2, each=True, tail_only=True)
    state, snap = kv.snapshot(state, i32([0]))
    state = kv.drop(state, {"state": snap.blocks["state"]})
    state, _ = kv.fork(state, i32([0]), i32([2]))
    state, _ = kv.truncate(state, jnp.where(num > 1, state.seq_lens, -1))
    state = kv.retain(state, {"full": kv.block_table(state, "full")[2]})
    state = kv.drop(state, {"full": kv.block_table(state, "full")[2]})
    state = kv.release(state, jnp.where(num[:1] > 0, 2, -1))
    return state, (state.seq_lens, kv.fits(state, num), kv.free_blocks(state))


@SETUPS
def test_a_scan_over_every_verb_equals_the_loop(setup):
    # the rows run into max_seq_len and start anew from 0 now and then
    nums = np.random.default_rng(3).integers(0, 3, (20, 3)).astype(np.int32)
    nums[:, 2] = 0
    state = scanned = used_state(setup=setup)
    scanned, seen = jax.jit(lambda s: jax.lax.scan(step, s, nums))(scanned)
    for i, num in enumerate(nums):
        state, out = step(state, num)
        assert leaves_equal(out, jax.tree.map(lambda x, i=i: x[i], seen)), i
    assert leaves_equal(state, scanned)
    assert int(state.faults) == int(scanned.faults)


def test_storage_in_a_scan_over_steps():
    """A decode loop on the device: allocation, sliding, writing and reading, many steps a call."""
    setup = Setup((("window", 4), "all"), (6, 14), block=2, rows=2, max_len=14, step=1)
    state, storage = kv.init(setup.spec, setup.plan)
    state, _ = kv.admit(state, i32([0, 1]))

    def decode(carry, token):
        state, storage = carry
        num = jnp.where(state.seq_lens < 12, 1, 0)
        state, result = kv.reserve(state, num)
        view = kv.step_view(state, num)
        for layer in range(2):
            data = jnp.broadcast_to(token + state.seq_lens[:, None, None, None], (2, 1, 1, 4))
            data = data.astype(jnp.float32)
            storage = kv.write(storage, view, layer, {"k": data, "v": data})
        sums = [kv.read(storage, view, layer)[0]["k"].sum((1, 2, 3)) for layer in range(2)]
        state = kv.advance(state, jnp.where(result.granted, num, 0))
        return (state, storage), jnp.stack(sums)

    (state, storage), sums = jax.jit(lambda c: jax.lax.scan(decode, c, jnp.arange(12) * 100))(
        (state, storage)
    )
    kv.check(state)
    values = np.arange(12) * 101
    window = [values[max(0, n - 3) : n + 1].sum() * 4 for n in range(12)]
    full = [values[: n + 1].sum() * 4 for n in range(12)]
    assert np.asarray(sums)[:, 0, 1].tolist() == window
    assert np.asarray(sums)[:, 1, 0].tolist() == full


def test_the_state_lives_on_the_device_it_was_given():
    cpu = jax.devices("cpu")[0]
    state = kv.init_state(SETUP.spec, SETUP.plan, cpu)
    storage = kv.init_storage(SETUP.spec, SETUP.plan, cpu)
    state, _ = kv.admit(state, i32([0, 1]))
    state, _ = kv.reserve(state, i32([2, 0, 0]))
    for leaf in jax.tree.leaves((state, storage)):
        assert leaf.devices() == {cpu}


def test_a_state_holds_no_buffer_twice():
    """Otherwise it could not be donated."""
    state, storage = kv.init(SETUP.spec, SETUP.plan)
    run = jax.jit(lambda s, b: (kv.release(s, i32([-1])), b), donate_argnums=(0, 1))
    state, storage = run(state, storage)
    kv.check(state)


def test_shapes_without_arrays():
    """For compiling ahead of time: nothing is allocated, and the shapes are those of `init`."""
    spec = kv.CacheSpec.from_layers(
        [kv.FullAttention(2, 16), kv.RecurrentState({"s": ((4,), "float32")})]
    )
    plan = kv.plan(spec, num_blocks={"full": 8, "state": 2}, max_seqs=2, max_seq_len=64)
    shapes = jax.eval_shape(lambda: kv.init(spec, plan))
    made = kv.init(spec, plan)
    assert jax.tree.structure(shapes) == jax.tree.structure(made)
    chex.assert_trees_all_equal_shapes_and_dtypes(shapes, made)
