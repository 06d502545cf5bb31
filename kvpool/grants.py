"""Who is served: the rule that every allocating verb applies to the blocks its rows ask for."""

import chex
import jax
import jax.numpy as jnp

from kvpool import block_pool
from kvpool.plan import Plan
from kvpool.slabs import slabs_for
from kvpool.state import State, by_pool, per_group
from kvpool.status import Result, Status


def serve(state: State, needs: jax.Array, status: jax.Array, each: bool = True) -> Result:
    """Grants rows their blocks.

    Args:
      needs: i32[G, R], new blocks that each row wants.
      status: i32[R]; rows at OK are well-formed, SKIPPED ones were not asked, others are at fault.
      each: True serves rows in order: a row is granted when the blocks asked by it and by all
        well-formed rows before it are free in all pools together, or when it needs none. False
        grants all rows or none.

    Returns:
      A Result without copies and blocks.
    """
    chex.assert_shape(needs, (len(state.plan.pool_of), *status.shape))
    chex.assert_type([needs, status], jnp.int32)
    well_formed = status == Status.OK
    asked = by_pool(state.plan, jnp.where(well_formed, needs, 0))  # i32[P, R]
    total = jnp.sum(asked, axis=1, dtype=jnp.int32)
    all_fit = block_pool.fit(state.pool, total)
    if each:
        granted = well_formed & jax.lax.cond(
            all_fit, _everyone, lambda asked: _in_order(asked, state.pool), asked
        )
        refused = jnp.int32(Status.OUT_OF_BLOCKS)
    else:
        at_fault = jnp.any(~well_formed & (status != Status.SKIPPED))
        granted = well_formed & all_fit & ~at_fault
        refused = jnp.where(all_fit, jnp.int32(Status.HELD_BACK), jnp.int32(Status.OUT_OF_BLOCKS))
    return Result(
        granted=granted,
        status=jnp.where(well_formed & ~granted, refused, status).astype(jnp.int32),
        ok=jnp.all(granted | (status == Status.SKIPPED)),
        shortfall=per_group(state.plan, block_pool.shortfall(state.pool, total)),
        cached=per_group(state.plan, state.pool.num_cached),
        copies={},
        blocks={},
    )


def _everyone(asked):
    return jnp.ones(asked.shape[1], bool)


def _in_order(asked, pool):
    fits = block_pool.fit(pool, jnp.cumsum(asked, axis=1, dtype=jnp.int32))
    return fits | ~jnp.any(asked > 0, axis=0)


def outgrows(plan: Plan, blocks: jax.Array) -> jax.Array:
    """bool[R]: a row with `blocks` i32[G, R] in all holds more than the pools have."""
    if plan.row_fits:
        return jnp.zeros(blocks.shape[1], bool)
    sizes = jnp.asarray(plan.pool_sizes, jnp.int32)[:, None]
    blocks = by_pool(plan, blocks)
    filled = jnp.sum(slabs_for(plan.pool_per_slab, blocks), axis=0, dtype=jnp.int32)
    return jnp.any(blocks > sizes, axis=0) | (filled > plan.slabs)


def first_fault(asked: jax.Array, *faults: tuple[jax.Array, Status]) -> jax.Array:
    """i32[R]: SKIPPED where not asked, else the status of the first fault that holds, else OK."""
    status = jnp.full(asked.shape, int(Status.OK), jnp.int32)
    for holds, fault in reversed(faults):
        status = jnp.where(holds, jnp.int32(fault), status)
    return jnp.where(asked, status, jnp.int32(Status.SKIPPED))
