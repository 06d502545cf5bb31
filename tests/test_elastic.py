"""Groups that draw from the same slabs: what is granted, what is answered, and what comes back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lockstep import JIT, Lockstep, Setup, i32, leaves_equal

import kvpool as kv

# Bytes of a block: 64 and 128, so 3 and 1 in a slab of 192.
TWO = Setup(
    ("all", ("window", 4)), (None, None), block=2, max_len=18, step=6, memory=6 * 192, slab=192,
    heads=(1, 2), pooling="elastic",
)  # fmt: skip
# 128, 64 and 32: 3, 6 and 12.
THREE = Setup(
    ("all", ("window", 5), "state"), (None,) * 3, block=2, rows=16, max_len=40, step=6,
    memory=60 * 384, slab=384, heads=(2, 1, 4), pooling="elastic",
)  # fmt: skip


def counts(values):
    return {name: int(count) for name, count in values.items()}


def test_memory_goes_to_whoever_needs_it():
    both = Lockstep(TWO)
    both.admit(0, 1, 2)
    assert counts(kv.free_blocks(both.state)) == {"full": 18, "window4": 6}
    both.reserve([6, 0, 0])  # 3 full blocks in one slab, 3 of the window in three
    assert counts(kv.free_blocks(both.state)) == {"full": 6, "window4": 2}
    both.advance([6, 0, 0])  # one of the window's is dead, and its slab free
    assert counts(kv.free_blocks(both.state)) == {"full": 9, "window4": 3}
    both.release(0)
    assert counts(kv.free_blocks(both.state)) == {"full": 18, "window4": 6}


def test_rows_are_granted_when_the_needs_of_all_groups_fit_together():
    both = Lockstep(TWO)
    both.admit(0, 1, 2)
    result = both.reserve([2, 4, 4], each=True)  # slabs: 1 + 1, then 0 + 2 and again 1 + 2
    assert result.granted.tolist() == [True, True, False]
    assert counts(result.shortfall) == {"full": 2, "window4": 1}
    result = both.reserve([0, 0, 4])
    # Alone each has enough; the one slab that lacks would be a slab of either.
    assert counts(kv.free_blocks(both.state)) == {"full": 6, "window4": 2}
    assert result.status.tolist() == [kv.Status.SKIPPED] * 2 + [kv.Status.OUT_OF_BLOCKS]
    assert counts(result.shortfall) == {"full": 2, "window4": 1}


def test_what_only_a_cache_keeps_is_named():
    both = Lockstep(TWO)
    both.admit(0, 1, 2)
    both.reserve([6, 0, 0])
    both.advance([6, 0, 0])
    full, window = both.table(0, 0), both.table(0, 1)
    both.retain({"full": full[:3]})
    assert counts(both.reserve([1, 0, 0]).cached) == {"full": 0, "window4": 0}  # a row has them too
    both.retain({"window4": window[2:3]})
    both.release(0)
    result = both.reserve([0, 6, 6])
    assert not result.ok
    assert counts(result.cached) == {"full": 3, "window4": 1}
    both.drop({"full": full[:3], "window4": window[2:3]})
    result = both.reserve([0, 6, 0])
    assert result.ok
    assert counts(result.cached) == {"full": 0, "window4": 0}


def test_never_and_later():
    both = Lockstep(dataclasses.replace(TWO, max_len=40))
    both.admit(0, 1)
    # A row of 8 tokens may hold 4 + 4 blocks, one of 24 tokens 12 and, at rest, no less than 2.
    assert both.fits([8, 10, 24]) == ["OK", "LATER", "LATER"]
    assert both.fits([26, 24, 8], keep_free=1) == ["NEVER", "LATER", "LATER"]
    both.reserve([6, 0, 0])
    assert both.fits([2, 2, 1]) == ["OK", "OK", "OK"]
    assert both.fits([2, 2, 1], keep_free=1) == ["OK", "LATER", "LATER"]  # row 0 has that room


def random_step(random, state, retained):
    """One verb with random arguments, as a server might call it; returns the state."""
    rows, groups = THREE.rows, ("full", "window5")
    live = np.flatnonzero(np.asarray(state.live))
    pick = lambda: i32(random.choice(live, 2) if len(live) else [-1, -1])  # noqa: E731
    what = random.integers(10)
    if what <= 4:
        num = i32(random.integers(0, 4, rows))
        state, result = JIT.reserve(state, num, each=True, tail_only=bool(random.integers(2)))
        return JIT.advance(state, jnp.where(result.granted, num, 0))
    if what == 5:
        return JIT.admit(state, i32(random.integers(0, rows, 2)))[0]
    if what == 6:
        return JIT.fork(state, pick(), i32(random.integers(0, rows, 2)))[0]
    if what == 7:
        lengths = np.where(random.random(rows) < 0.1, np.asarray(state.seq_lens) - 1, -1)
        return JIT.truncate(state, i32(lengths))[0]
    if what == 8:
        return JIT.release(state, pick())
    return some_retains(random, state, retained, groups, pick)


def some_retains(random, state, retained, groups, pick):
    if retained and random.random() < 0.5:
        return JIT.drop(state, retained.pop(random.integers(len(retained))))
    state, result = JIT.snapshot(state, pick())
    row = int(random.integers(THREE.rows))
    ids = {g: kv.block_table(state, g)[row] for g in groups}
    retained.append({**ids, "state": result.blocks["state"]})
    return JIT.retain(state, {**ids, "state": jnp.full(2, kv.NULL_BLOCK, jnp.int32)})


def churn(steps, seed):
    """The state after so many random steps, and after all was given back."""
    random, retained = np.random.default_rng(seed), []
    state = kv.init_state(THREE.spec, THREE.plan)
    fewest = THREE.plan.slabs
    for number in range(steps):
        state = random_step(random, state, retained)
        state = kv.clear_faults(state)  # rows named twice, blocks dropped that had none to keep
        if number % 50 == 0:
            kv.check(state)
            fewest = min(fewest, int(state.pool.slabs.num_free))
    for ids in retained:
        state = JIT.drop(state, ids)
    state = kv.clear_faults(JIT.release(state, np.arange(THREE.rows, dtype=np.int32)))
    return state, fewest


def all_is_back(state):
    kv.check(state)
    slabs = jax.tree.map(np.asarray, state.pool.slabs)
    assert slabs.num_free == THREE.plan.slabs
    assert sorted(slabs.stacks[: slabs.count].tolist()) == list(range(slabs.count))
    assert not slabs.used.any()
    assert not slabs.spare.any()


def test_when_all_is_freed_all_slabs_are_back():
    state, _ = churn(300, seed=0)
    all_is_back(state)


@pytest.mark.slow
def test_when_all_is_freed_after_10_000_steps_all_slabs_are_back():
    state, fewest = churn(10_000, seed=1)
    assert fewest == 0  # memory was short on the way
    all_is_back(state)


def used_slabs():
    both = Lockstep(TWO)
    both.admit(0, 1)
    both.reserve([3, 0, 0])  # slabs: two of three full blocks in 0, one of the window in 1 and 2
    return both.state


def broken(change):
    state = jax.tree.map(np.array, used_slabs())
    slabs = state.pool.slabs
    changed = dataclasses.replace(slabs, **change(slabs))
    return dataclasses.replace(state, pool=dataclasses.replace(state.pool, slabs=changed))


def put(array, place, value):
    array[place] = value
    return array


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: {"used": put(s.used, 0, 1)}, "slab 0: place 1 is marked unused, but"),
        (lambda s: {"used": put(s.used, 0, 7)}, "slab 0: place 2 is marked used, but"),
        (lambda s: {"spare": put(s.spare, 0, 2)}, "pool 0: counts 2 unused blocks, but has 1"),
        (lambda s: {"num_free": s.num_free - 1}, "slab 3: wanted 1 times on the free stack, is"),
        (lambda s: {"stacks": put(s.stacks, 0, 4)}, "slab 4: wanted 1 .* free stack, is there 2"),
        (lambda s: {"num_open": put(s.num_open, 0, 0)}, "slab 0: .* open stack of pool 0, is th"),
        (lambda s: {"height": s.height + 1}, "slab 0: at 0 on its stack, but not by its own co"),
    ],
)
def test_check_names_the_slab(change, message):
    with pytest.raises(kv.InvariantError, match=message):
        kv.check(broken(change))


def test_check_names_a_slab_of_two_pools():
    state = jax.tree.map(np.array, used_slabs())
    start = state.pool.offsets[1]
    state.pool.holders[start] = state.pool.retained[start] = state.pool.num_cached[1] = 1
    with pytest.raises(kv.InvariantError, match="slab 0: blocks of 2 pools lie in it"):
        kv.check(state)


@functools.cache
def short():
    """A state in which one slab is left, and a row that needs two."""
    both = Lockstep(TWO)
    both.admit(0, 1)
    both.reserve([6, 1, 0])
    return both.state


@pytest.mark.parametrize("each", [True, False])
def test_a_refusal_is_bit_identical(each):
    state = short()
    same, result = kv.reserve(state, i32([0, 6, 0]), each=each)
    assert result.status.tolist() == [1, kv.Status.OUT_OF_BLOCKS, 1]
    assert leaves_equal(state, same)
    for verb in (kv.advance, kv.reserve):
        same = verb(state, i32([0, 0, 0]))
        assert leaves_equal(state, same if verb is kv.advance else same[0])
