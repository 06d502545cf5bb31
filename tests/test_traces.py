"""What the compiler makes of a step: no hidden copies, one trace, little to compile per group."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lockstep import Setup, i32

import kvpool as kv

# Sizes that no other array of a step shares, so that a shape in the text names the array.
SETUP = Setup(
    ("all", ("window", 8), "state"), (4099, 2503, 257), block=4, rows=64, max_len=4 * 331, step=1
)
ELASTIC = Setup(
    ("all", ("window", 8), "state"), (None,) * 3, block=4, rows=64, max_len=4 * 331, step=1,
    memory=2521 * 1024, slab=1024, heads=(2, 1, 16), pooling="elastic",
)  # fmt: skip
SETUPS = pytest.mark.parametrize("setup", [SETUP, ELASTIC], ids=["independent", "elastic"])


def step(state, num, src, dst, rows):
    state, result = kv.reserve(state, num, each=True)
    state = kv.advance(state, jnp.where(result.granted, num, 0))
    state, _ = kv.fork(state, src, dst)
    return kv.release(state, rows)


def decode(state, num):
    state, result = kv.reserve(state, num, each=True)
    return kv.advance(state, jnp.where(result.granted, num, 0))


def arguments(setup=SETUP):
    state = kv.init_state(setup.spec, setup.plan)
    one = i32([-1])
    return state, np.ones(SETUP.rows, np.int32), one, one, one


def large(state) -> set[str]:
    """HLO shapes of the pool- and table-sized arrays, flat or not."""
    sizes = {x.size for x in jax.tree.leaves(state) if x.size > 8 * SETUP.rows}
    shapes = {x.shape for x in jax.tree.leaves(state) if x.size in sizes}
    shapes |= {(n,) for n in sizes}
    return {f"{word}[{','.join(map(str, s))}]" for s in shapes for word in ("s32", "u32")}


def copies(compiled, state) -> list[str]:
    """The copy instructions of large arrays in a compiled program, fused ones included."""
    shapes = large(state)
    found = []
    for line in compiled.as_text().splitlines():
        match = re.search(r"= (\w+\[[\d,]*\])\S* copy(-start)?\(", line)
        if match and match.group(1) in shapes:
            found.append(line.strip())
    return found


@pytest.mark.parametrize("program", [step, decode], ids=["step", "decode"])
@pytest.mark.parametrize("scanned", [False, True], ids=["jit", "scan"])
@SETUPS
def test_a_donated_step_copies_no_large_array(setup, program, scanned):
    state, *rest = arguments(setup)
    if program is decode:
        rest = rest[:1]

    def many(state, *args):
        return jax.lax.scan(lambda s, _: (program(s, *args), None), state, None, length=8)[0]

    run = jax.jit(many if scanned else program, donate_argnums=0)
    compiled = run.lower(state, *rest).compile()
    assert copies(compiled, state) == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(state)) * 0.99


ONE_VERB = {
    "admit": lambda s: kv.admit(s, i32([0, 1]))[0],
    "reserve": lambda s: kv.reserve(s, np.ones(SETUP.rows, np.int32))[0],
    "advance": lambda s: kv.advance(s, np.ones(SETUP.rows, np.int32)),
    "truncate": lambda s: kv.truncate(s, np.ones(SETUP.rows, np.int32))[0],
    "fork": lambda s: kv.fork(s, i32([0, 1]), i32([2, 3]))[0],
    "snapshot": lambda s: kv.snapshot(s, i32([0, 1]))[0],
    "release": lambda s: kv.release(s, i32([0, 1])),
    "retain": lambda s: kv.retain(s, {"full": i32([0, 1])}),
    "drop": lambda s: kv.drop(s, {"full": i32([0, 1])}),
}


@pytest.mark.parametrize("name", ONE_VERB)
@SETUPS
def test_no_verb_copies_a_large_array(setup, name):
    state = arguments(setup)[0]
    compiled = jax.jit(ONE_VERB[name], donate_argnums=0).lower(state).compile()
    assert copies(compiled, state) == []


@pytest.mark.parametrize("name", ONE_VERB)
def test_an_eager_verb_compiles_once(name):
    state = arguments()[0]
    verb = ONE_VERB[name]
    jax.block_until_ready(verb(state))
    compilations = []

    def count(event, duration, **_):
        if "backend_compile" in event:
            compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        start = time.perf_counter()
        jax.block_until_ready(verb(state))
        wall = time.perf_counter() - start
    finally:
        jax._src.monitoring.unregister_event_duration_listener(count)
    assert compilations == []
    assert wall < 0.5  # a compilation takes longer; a call takes less than a millisecond


def groups_of(count):
    kinds = ("all", *(("window", 4 + i) for i in range(count - 1)))
    return Setup(kinds, (64,) * count, block=4, rows=8, max_len=64, step=8)


def instructions(setup, names=("while", "scatter", "case", "sort")) -> dict:
    """How many of the instructions that cost compile time a step of all verbs lowers to."""
    state = kv.init_state(setup.spec, setup.plan)

    def everything(state, num, rows):
        state, _ = kv.admit(state, rows)
        state = step(state, num, rows, rows, rows)
        state, _ = kv.truncate(state, num)
        return state

    text = jax.jit(everything).lower(state, np.ones(8, np.int32), i32([0])).as_text()
    return {n: len(re.findall(rf"stablehlo\.{n}\b|stablehlo\.\"{n}\"", text)) for n in names}


def test_groups_share_the_code():
    """Compile time follows the loops and scatters, so these may not grow with the groups."""
    one, eight = instructions(groups_of(1)), instructions(groups_of(8))
    assert sum(one.values()) > 0
    for name, count in eight.items():
        assert count <= one[name] + 4, (one, eight)


def test_static_fields_compare_by_identity_or_hash():
    setups = [groups_of(8), groups_of(8)]
    states = [kv.init_state(s.spec, s.plan) for s in setups]
    treedefs = [jax.tree.structure(s) for s in states]
    assert setups[0].plan is not setups[1].plan
    assert treedefs[0] == treedefs[1]
    assert hash(treedefs[0]) == hash(treedefs[1])
    start = time.perf_counter()
    for _ in range(1000):
        assert treedefs[0] == treedefs[1]
        hash(treedefs[0])
    assert (time.perf_counter() - start) / 1000 < 100e-6  # walking the spec takes longer
    other = groups_of(7)
    assert jax.tree.structure(kv.init_state(other.spec, other.plan)) != treedefs[0]


def test_bk11_one_trace_serves_a_run():
    setup = Setup(("all", ("window", 5), "state"), (20, 15, 8), block=4, rows=3, max_len=32, step=4)
    state = kv.init_state(setup.spec, setup.plan)
    traces = []

    @jax.jit
    def mixed(state, rows, num, src, dst, lens, out):
        traces.append(1)
        state, _ = kv.admit(state, rows)
        state, result = kv.reserve(state, num, each=True)
        state = kv.advance(state, jnp.where(result.granted, num, 0))
        state, _ = kv.fork(state, src, dst)
        state, _ = kv.truncate(state, lens)
        return kv.release(state, out)

    shapes = jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state)
    structure, random = jax.tree.structure(state), np.random.default_rng(1)
    for _ in range(100):
        live = [r for r in range(3) if bool(state.live[r])]
        out = [random.choice(live)] if len(live) > 2 else [-1]
        args = ([random.integers(-1, 3)], random.integers(0, 5, 3), [random.integers(-1, 3)],
                [random.integers(-1, 3)], random.integers(-3, 9, 3), out)  # fmt: skip
        state = mixed(state, *map(i32, args))
        assert jax.tree.structure(state) == structure
        assert jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), state) == shapes
    kv.check(kv.clear_faults(state))
    assert len(traces) == 1
