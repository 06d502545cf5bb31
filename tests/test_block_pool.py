"""Blocks go round: taken from the top of a free stack, held, freed by the last holder."""

import chex
import jax.numpy as jnp
import numpy as np

from kvpool import block_pool

POOLS = jnp.array([0, 0, 1, 1, 1], jnp.int32)


def ids_of(*ids):
    return jnp.array(ids, jnp.int32)


def test_pools_hand_out_their_own_ids_from_zero():
    pool = block_pool.init((3, 4))
    pool, ids = block_pool.allocate(pool, POOLS, jnp.array([True, False, True, True, False]))
    chex.assert_trees_all_equal(ids, ids_of(0, -1, 0, 1, -1))
    chex.assert_trees_all_equal(pool.num_free, ids_of(2, 2))
    chex.assert_trees_all_equal(pool.holders, ids_of(1, 0, 0, 1, 1, 0, 0))


def test_the_last_holder_frees_a_block_once():
    pool = block_pool.init((2, 2))
    pool, _ids = block_pool.allocate(pool, ids_of(1, 1), jnp.array([True, True]))
    pool = block_pool.hold(pool, ids_of(1, 1, 1), ids_of(0, 0, -1))
    chex.assert_trees_all_equal(pool.holders, ids_of(0, 0, 3, 1))
    pool = block_pool.unhold(pool, ids_of(1, 1, 0), ids_of(0, 0, -1))
    chex.assert_trees_all_equal(pool.holders, ids_of(0, 0, 1, 1))
    chex.assert_trees_all_equal(pool.num_free, ids_of(2, 0))
    pool = block_pool.hold(pool, ids_of(1), ids_of(1))
    pool = block_pool.unhold(pool, ids_of(1, 1, 1), ids_of(1, 0, 1))
    chex.assert_trees_all_equal(pool.holders, ids_of(0, 0, 0, 0))
    chex.assert_trees_all_equal(pool.num_free, ids_of(2, 2))
    assert sorted(np.asarray(pool.free_ids)[2:].tolist()) == [0, 1]


def test_a_block_that_nobody_holds_is_not_freed_again():
    pool = block_pool.init((2,))
    again = block_pool.unhold(pool, ids_of(0, 0, 0), ids_of(0, 1, 2))
    chex.assert_trees_all_equal(again, pool)


def test_absent_ids_touch_nothing():
    pool = block_pool.init((2, 3))
    far = np.iinfo(np.int32)
    for verb in (block_pool.hold, block_pool.retain, block_pool.unhold):
        same = verb(pool, ids_of(0, 0, 1, 1, 0, 1), ids_of(-1, 2, 3, -9, far.max, far.min))
        chex.assert_trees_all_equal(same, pool)
