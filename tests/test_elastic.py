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
    # 8 tokens are 4 + 4 blocks in steps of 6. In such steps 10 tokens are 5 + 5, which is 7 slabs;
    # a token at a time a row holds 3 of the window, so 18 tokens are 3 + 3 slabs and 20 are 4 + 3.
    assert both.fits([8, 10, 18]) == ["OK", "OK", "OK"]
    assert both.fits([19, 24, 26]) == ["NEVER", "NEVER", "NEVER"]
    assert both.fits([20, 18, 8], keep_free=1) == ["NEVER", "LATER", "LATER"]
    assert both.fits([20, 18, 8], keep_free=2**31 - 1) == ["NEVER", "LATER", "LATER"]
    both.reserve([6, 0, 0])
    assert both.fits([2, 2, 1]) == ["OK", "OK", "OK"]
    assert both.fits([2, 2, 1], keep_free=1) == ["OK", "LATER", "LATER"]  # row 0 has that room


def test_in_an_empty_cache_a_request_fits_just_when_a_row_gets_there():
    both = Lockstep(dataclasses.replace(TWO, max_len=40))
    both.admit(0)
    reached = 0
    while both.reserve([1, 0, 0]).ok:
        both.advance([1, 0, 0])
        reached += 1
    both.release(0)
    verdicts = [both.fits([0, 0, tokens])[2] for tokens in range(1, 41)]
    assert verdicts == ["OK"] * reached + ["NEVER"] * (40 - reached)


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
        (lambda s: {"num_free": np.int32(-1)}, "the free stack: counts -1 slabs, but there are 6"),
        (lambda s: {"num_open": put(s.num_open, 1, 7)}, "stack of pool 1: counts 7 slabs, but"),
        (lambda s: {"stacks": put(s.stacks, 1, 6)}, "the free stack: at 1 is slab 6 of 6"),
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


@pytest.mark.parametrize("more", [1, 2, 5, 100])
def test_check_sees_free_slabs_that_are_not_there(more):
    state = kv.init_state(TWO.spec, TWO.plan)
    slabs = dataclasses.replace(state.pool.slabs, num_free=state.pool.slabs.num_free + more)
    state = dataclasses.replace(state, pool=dataclasses.replace(state.pool, slabs=slabs))
    with pytest.raises(kv.InvariantError, match=f"free stack: counts {6 + more} slabs, but .* 6"):
        kv.check(state)


def mixed():
    """A window in slabs as pool 0, and four states with blocks of their own as pool 1."""
    layers = [kv.SlidingWindow(4, 1, 16), kv.RecurrentState({"s": ((16,), "float32")})]
    spec = kv.CacheSpec.from_layers(layers, block_size=4, pooling="elastic")
    limits = {"max_seqs": 4, "max_seq_len": 32, "max_step_tokens": 8}
    counts = {"num_blocks": {"state": 4}, "charge_explicit": False}
    plan = kv.plan(spec, 8 * 1024, slab_bytes=1024, **counts, **limits)
    return jax.tree.map(np.array, kv.init_state(spec, plan))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: put(p.num_free, 0, 3), "pool 0: counts 3 blocks on a free stack, but has slabs"),
        (lambda p: put(p.num_free, 0, -1), "pool 0: counts -1 blocks on a free stack, but has sla"),
        (lambda p: put(p.slabs.spare, 1, 2), "pool 1: counts 2 as spare, but has no slabs"),
        (lambda p: put(p.slabs.num_open, 1, 1), "pool 1: counts 1 as num_open, but has no slabs"),
        (lambda p: put(p.num_free, 1, 5), "group state: counts 5 free blocks, but there are 4"),
        (lambda p: put(p.num_free, 1, -1), "group state: counts -1 free blocks, but there are 4"),
        (lambda p: put(p.free_ids, 1, 4), "group state: at 1 of its free stack is block 4 of 4"),
    ],
)
def test_check_sees_counts_of_the_other_kind_of_pool(change, message):
    state = mixed()
    kv.check(state)
    change(state.pool)
    with pytest.raises(kv.InvariantError, match=message):
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
