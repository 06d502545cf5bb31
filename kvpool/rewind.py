"""Truncate: rows go back to a shorter length, or give back the room beyond the present one."""

import dataclasses

import jax
import jax.numpy as jnp

from kvpool import arguments, block_pool, indices, tables
from kvpool.cache import give_back
from kvpool.grants import first_fault, serve
from kvpool.held import Lengths, half_full, held_columns
from kvpool.indices import NULL_BLOCK
from kvpool.state import State, allocate_one_each, one_shard, put_lengths, state_held
from kvpool.status import Status


def truncate(state: State, seq_lens):
    """Takes rows back to seq_lens tokens and gives back blocks and room beyond.

    Args:
      seq_lens: i32[S], at most the settled length; a negative one is not asked. 0 gives back
        everything.

    Returns:
      (state, Result with R = S). A row is UNREACHABLE, and unchanged, when a window, chunk or state
      group no longer holds what a query at the shorter length reads. A cut inside a block that has
      other holders takes a copy of it, owed in `copies`. A cut at the start of a chunk, inside a
      block that is held no more, takes a fresh one, which lacks what comes before.

    Raises:
      ValueError: for seq_lens of another shape or kind.
    """
    return _truncate(state, arguments.int32("seq_lens", seq_lens, one_shard(state).seq_lens.shape))


@jax.jit
def _truncate(state, seq_lens):
    status = first_fault(
        (seq_lens > 0) | ((seq_lens == 0) & state.live),
        (~state.live, Status.FREE_ROW),
        (seq_lens > state.seq_lens, Status.BAD_ARGUMENT),
        (~_reachable(state, seq_lens), Status.UNREACHABLE),
    )
    length = jnp.where(status == Status.OK, seq_lens, 0)
    column, before, tail, wanted = _cut_blocks(state, length)
    result = serve(state, wanted.astype(jnp.int32), status)
    wanted &= result.granted
    pool, ids = allocate_one_each(state.plan, state.pool, wanted)
    start, stop = _given_back(state, length, wanted)
    state = give_back(
        dataclasses.replace(state, pool=pool), None, start, jnp.where(result.granted, stop, start)
    )
    groups = jnp.arange(len(state.plan.pool_of), dtype=jnp.int32)[:, None]
    rows = jnp.arange(state.seq_lens.shape[0], dtype=jnp.int32)[None]
    table = tables.put(state.table, groups, rows, column, ids, ids != NULL_BLOCK)
    own = jnp.where(wanted, ids, jnp.where(result.granted, tail, NULL_BLOCK))
    pool = block_pool.go_on(state.pool, state.plan.pool_of, own, tail, before)
    state = dataclasses.replace(state, table=table, pool=pool)
    copies = {
        group.name: (jnp.where(wanted[g], tail[g], NULL_BLOCK), ids[g])
        for g, group in enumerate(state.plan.spec.groups)
    }
    cut = jnp.where(result.granted, rows[0], -1)
    return put_lengths(state, cut, length), result._replace(copies=copies)


def _reachable(state: State, length: jax.Array) -> jax.Array:
    """bool[S]: every group still holds what a query at `length` <= seq_lens reads."""
    reachable = jnp.ones(length.shape, bool)
    for index, group in enumerate(state.plan.spec.groups):
        if group.is_state:
            reachable &= (length == 0) | (length == state.seq_lens)
        elif group.region.span:
            first = group.region.first_read(length)
            column = group.column_of(first)
            held = column >= group.dead_columns(state.seq_lens)
            if group.short_chunks:
                held &= first - column * group.block_size >= _lacking(state, index, column)
            reachable &= (first >= length) | held
    return reachable


def _lacking(state: State, group: int, column: jax.Array) -> jax.Array:
    """Tokens i32[S] at the start of every row's block in `column` i32[S] that it lacks."""
    rows = jnp.arange(column.shape[0], dtype=jnp.int32)
    ids = tables.take(state.table, group, rows, column)
    return block_pool.lacking(state.pool, jnp.full_like(ids, state.plan.pool_of[group]), ids)


def _cut_blocks(state: State, length: jax.Array):
    """The block that each cut falls into, and whether the row needs one of its own for it.

    Returns:
      (column i32[G, S], tokens before the cut in its block i32[G, S], block id i32[G, S], wanted
      bool[G, S]).  Wanted where the block has other holders, or is held no more: a cut at the start
      of a chunk needs none of the past.
    """
    spec, rows = state.plan.spec, jnp.arange(length.shape[0], dtype=jnp.int32)
    column, before = half_full(spec.groups, length)
    cut = before > 0
    groups = jnp.arange(len(spec.groups), dtype=jnp.int32)[:, None]
    ids = tables.take(state.table, groups, rows[None], column, cut)
    pools = jnp.asarray(state.plan.pool_of, jnp.int32)[:, None]
    holders = indices.take(state.pool.holders, state.pool.place(pools, ids), 0)
    return column, before, ids, cut & (holders != 1)


def _given_back(state: State, length: jax.Array, replaced: jax.Array):
    """Columns [start, stop) i32[G, S] that a row of `length` gives up, the `replaced` ones too."""
    held = state_held(state)
    kept = held_columns(state.plan.spec.groups, Lengths.exactly(length)).stop
    return jnp.maximum(held.start, kept - replaced), held.stop
