"""Several groups on one pool: the state allows it, with one count of what is free."""

import dataclasses

import chex
import numpy as np

import kvpool as kv


def shared_state(blocks=10):
    spec = kv.CacheSpec.from_layers(
        [kv.FullAttention(1, 4), kv.FullAttention(2, 4), kv.SlidingWindow(4, 1, 4)], block_size=2
    )
    names = [group.name for group in spec.groups]
    limits = {"max_seqs": 3, "max_seq_len": 16, "max_step_tokens": 4}
    plan = kv.plan(spec, num_blocks={**dict.fromkeys(names, blocks), "full_2": 5}, **limits)
    plan = dataclasses.replace(plan, pool_of=(0, 1, 0))  # full and window4 on one pool
    state = kv.init_state(spec, plan)
    return kv.admit(state, np.arange(3, dtype=np.int32))[0]


def free(state):
    return {name: int(count) for name, count in kv.free_blocks(state).items()}


def test_groups_draw_from_one_pool_and_give_back_to_it():
    state = shared_state()
    assert free(state) == {"full": 10, "full_2": 5, "window4": 10}
    for _ in range(2):
        state, result = kv.reserve(state, np.array([4, 0, 0], np.int32))
        assert result.ok
        kv.check(state)
        state = kv.advance(state, np.array([4, 0, 0], np.int32))
        kv.check(state)
    assert free(state) == {"full": 4, "full_2": 1, "window4": 4}
    tables = [np.asarray(kv.block_table(state, name))[0] for name in ("full", "window4")]
    ids = np.concatenate(tables)
    assert len(set(ids[ids >= 0].tolist())) == 6
    state = kv.release(state, np.array([0], np.int32))
    kv.check(state)
    assert free(state) == {"full": 10, "full_2": 5, "window4": 10}


def test_the_sum_over_the_groups_of_a_pool_is_what_must_fit():
    state = shared_state(blocks=5)
    state, result = kv.reserve(state, np.array([4, 0, 0], np.int32))
    assert result.ok
    same, result = kv.reserve(state, np.array([0, 2, 0], np.int32))
    assert np.asarray(result.status).tolist() == [1, int(kv.Status.OUT_OF_BLOCKS), 1]
    assert {name: int(n) for name, n in result.shortfall.items()} == {
        "full": 1,
        "full_2": 0,
        "window4": 1,
    }
    chex.assert_trees_all_equal(state, same)
    assert np.asarray(kv.fits(state, np.array([0, 2, 0], np.int32)))[1] == kv.Status.LATER
    assert np.asarray(kv.fits(state, np.array([0, 9, 0], np.int32)))[1] == kv.Status.NEVER


def test_forks_and_prefixes_on_one_pool():
    state = shared_state(blocks=14)
    state = kv.release(state, np.array([1, 2], np.int32))
    state, _ = kv.reserve(state, np.array([3, 0, 0], np.int32))
    state = kv.advance(state, np.array([3, 0, 0], np.int32))
    state, result = kv.fork(state, np.array([0], np.int32), np.array([1], np.int32))
    assert result.ok
    kv.check(state)
    assert free(state) == {"full": 14 - 4 - 2, "full_2": 5 - 3, "window4": 8}
    blocks = {g: np.asarray(kv.block_table(state, g))[0] for g in ("full", "full_2", "window4")}
    state, result = kv.admit(state, np.array([2], np.int32), kv.Prefix(2, blocks))
    assert result.ok
    kv.check(state)
    assert free(state) == {"full": 8, "full_2": 2, "window4": 8}
    state = kv.release(state, np.array([0, 1, 2], np.int32))
    kv.check(state)
    assert free(state) == {"full": 14, "full_2": 5, "window4": 14}
