"""Holders outside the block tables: snapshots of recurrent state, retain and drop."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvpool import arguments, block_pool, indices, tables
from kvpool.cache import with_faults
from kvpool.grants import first_fault, serve
from kvpool.indices import NULL_BLOCK
from kvpool.moves import WIDTH
from kvpool.state import State, allocate_one_each
from kvpool.status import Fault, Status


def snapshot(state: State, rows):
    """Copies the recurrent state of rows i32[R] (-1 pads) out into blocks that the caller holds.

    Returns:
      (state, Result) with `blocks` {state group: i32[R]}, NULL where not granted or at length 0.
      The copy is owed in `copies`; give the blocks back with `drop`.

    Raises:
      ValueError: for rows of another shape or kind.
    """
    return _snapshot(state, arguments.rows_and_pads("rows", rows))


@jax.jit
def _snapshot(state, rows):
    plan, num_rows = state.plan, state.seq_lens.shape[0]
    is_state = np.array([group.is_state for group in plan.spec.groups])[:, None]
    wanted = jnp.asarray(is_state) & (indices.take(state.seq_lens, rows, 0) > 0)
    status = first_fault(
        rows != -1,
        (~indices.is_valid(rows, num_rows), Status.BAD_ARGUMENT),
        (~indices.take(state.live, rows, False), Status.FREE_ROW),
        (~indices.first_naming(rows, num_rows), Status.BUSY),
    )
    result = serve(state, wanted.astype(jnp.int32), status)
    wanted &= result.granted
    pool, ids = allocate_one_each(plan, state.pool, wanted)
    pools = jnp.broadcast_to(jnp.asarray(plan.pool_of, jnp.int32)[:, None], ids.shape)
    pool = block_pool.keep(pool, pools.reshape(-1), ids.reshape(-1))
    groups = jnp.arange(len(plan.pool_of), dtype=jnp.int32)[:, None]
    source = tables.take(state.table, groups, rows[None], jnp.zeros_like(ids), wanted)
    states = [(g, group.name) for g, group in enumerate(plan.spec.groups) if group.is_state]
    result = result._replace(
        copies={name: (source[g], ids[g]) for g, name in states},
        blocks={name: ids[g] for g, name in states},
    )
    return dataclasses.replace(state, pool=pool), result


def retain(state: State, blocks) -> State:
    """One more holder for every block in {group: i32[K]}; absent ids are skipped.

    Retain full blocks of tokens only: the row that fills a half-full one goes on writing into it.
    `truncate` to the present length gives such a row a copy of its own.

    A block that nobody holds is skipped, and `faults` says so.

    Raises:
      ValueError, SpecError: for ids of another shape or kind, an unknown group.
    """
    ids, pools = _flatten(state, arguments.ids_of_groups("blocks", blocks, state.plan.spec))
    return _retain(state, ids, pools) if ids.shape[0] else state


@jax.jit
def _retain(state, ids, pools):
    places = state.pool.place(pools, ids)
    held = indices.take(state.pool.holders, places, 0) > 0
    exists = places < state.pool.holders.shape[0]
    return dataclasses.replace(
        state,
        pool=block_pool.retain(state.pool, pools, jnp.where(held, ids, NULL_BLOCK)),
        faults=with_faults(state.faults, (exists & ~held, Fault.RETAIN_FREE_BLOCK)),
    )


def drop(state: State, blocks) -> State:
    """One holder fewer for every block in {group: i32[K]} that was retained or is a snapshot.

    Absent ids are skipped. Dropping a block more often than it was retained is skipped as well,
    and `faults` says so.

    Raises:
      ValueError, SpecError: for ids of another shape or kind, an unknown group.
    """
    ids, pools = _flatten(state, arguments.ids_of_groups("blocks", blocks, state.plan.spec))
    return _drop(state, ids, pools) if ids.shape[0] else state


@jax.jit
def _drop(state, ids, pools):
    size = state.pool.holders.shape[0]
    order = jnp.argsort(state.pool.place(pools, ids), stable=True)
    ids, pools = ids[order], pools[order]
    places = state.pool.place(pools, ids)
    number = jnp.arange(places.shape[0], dtype=jnp.int32)
    earlier = number - jnp.searchsorted(places, places).astype(jnp.int32)
    ours = earlier < indices.take(state.pool.retained, places, 0)
    pool, dropped = block_pool.unretain(
        state.pool, pools, jnp.where(ours, ids, NULL_BLOCK), first=earlier == 0
    )
    pad = (0, -ids.shape[0] % WIDTH)
    dropped = jnp.pad(dropped, pad, constant_values=NULL_BLOCK)
    pools = jnp.pad(pools, pad, mode="edge")
    pool, _ = jax.lax.scan(
        lambda pool, one_pass: (block_pool.unhold(pool, *one_pass), None),
        pool,
        (pools.reshape(-1, WIDTH), dropped.reshape(-1, WIDTH)),
    )
    faults = with_faults(state.faults, ((places < size) & ~ours, Fault.DROP_NOT_RETAINED))
    return dataclasses.replace(state, pool=pool, faults=faults)


def _flatten(state: State, blocks: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """The ids of all groups one after another, and the pool of each."""
    plan = state.plan
    ids, pools = [jnp.zeros(0, jnp.int32)], [np.zeros(0, np.int32)]
    for name, group_ids in blocks.items():
        ids.append(group_ids)
        pool = plan.pool_of[plan.spec.group_index(name)]
        pools.append(np.full(group_ids.shape, pool, np.int32))
    return jnp.concatenate(ids), jnp.asarray(np.concatenate(pools))
