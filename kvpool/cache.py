"""The life of a row once it is admitted: reserve, advance, release.

Every verb is a pure function of the state, jitted inside, that takes numpy or jax inputs. What
does not fit or is misused comes back as a status with the state as it was.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from kvpool import arguments, block_pool, indices, tables
from kvpool.grants import first_fault, outgrows, serve
from kvpool.held import held_columns, lengths_after
from kvpool.moves import for_each_block
from kvpool.room import Missing, missing_columns
from kvpool.state import State, one_shard, pool_of, put_lengths, state_held
from kvpool.status import Fault, Status


def reserve(state: State, num_tokens, each: bool = False, tail_only: bool = False):
    """Makes room for the next num_tokens positions of rows, in every group or in none.

    Args:
      num_tokens: i32[S], counted from the settled length; rows at 0 or less are not asked.
      each: False grants all rows or none; True serves rows in order and grants each on its own.
      tail_only: window and chunk groups get room only for those of the new positions that a query
        at the new length can still read. For steps that attend to their own keys directly, and
        then advance by all of it: short of that the past is not held.

    Returns:
      (state, Result with R = S). Nothing is settled. Without a grant the state is as it was.

    Raises:
      ValueError: for num_tokens of another shape or kind.
    """
    num_tokens = arguments.int32("num_tokens", num_tokens, one_shard(state).seq_lens.shape)
    return _reserve(state, num_tokens, bool(each), bool(tail_only))


@functools.partial(jax.jit, static_argnames=("each", "tail_only"))
def _reserve(state, num_tokens, each, tail_only):
    plan = state.plan
    asked = num_tokens > 0
    too_long = num_tokens > plan.max_seq_len - state.seq_lens
    target = state.seq_lens + jnp.where(asked & ~too_long, num_tokens, 0)
    lengths = lengths_after(plan.spec.groups, state.lengths, target, tail_only)
    wanted = held_columns(plan.spec.groups, lengths)
    missing = missing_columns(state_held(state), wanted)
    status = first_fault(
        asked,
        (~state.live, Status.FREE_ROW),
        (too_long, Status.TOO_LONG),
        (num_tokens > plan.max_step_tokens, Status.STEP_TOO_LONG),
        (outgrows(plan, wanted.count), Status.NEVER),
    )
    result = serve(state, missing.count, status, each)
    state = _fill(state, missing, jnp.where(result.granted, missing.count, 0))
    _, room, solid, tail = (
        jnp.where(result.granted, new, old) for new, old in zip(lengths, state.lengths, strict=True)
    )
    return dataclasses.replace(state, room=room, solid=solid, tail=tail), result


def _fill(state: State, missing: Missing, counts: jax.Array) -> State:
    """Hands free blocks to the first `counts` i32[G, S] missing columns of each row."""

    def one_pass(carry, moves):
        table, pool = carry
        pool, ids = block_pool.allocate(pool, pool_of(state.plan, moves.group), moves.valid)
        column = missing.column(moves)
        table = tables.put(table, moves.group, moves.row, column, ids, moves.valid)
        return table, pool

    table, pool = for_each_block(counts, one_pass, (state.table, state.pool))
    return dataclasses.replace(state, table=table, pool=pool)


def advance(state: State, num_tokens) -> State:
    """Settles tokens, moves the windows on, and frees the blocks that no query can read any more.

    Args:
      num_tokens: i32[S], at most the room a row has; rows at 0 or less are not asked.

    Returns:
      The state. A row that is not live, or would pass its room or stop inside the gap of a
      tail_only reserve, is skipped, and `faults` says so.

    Raises:
      ValueError: for num_tokens of another shape or kind.
    """
    num_tokens = arguments.int32("num_tokens", num_tokens, one_shard(state).seq_lens.shape)
    return _advance(state, num_tokens)


@jax.jit
def _advance(state, num_tokens):
    asked = num_tokens > 0
    has_room = num_tokens <= state.room - state.seq_lens
    seq_lens = state.seq_lens + jnp.where(asked & has_room & state.live, num_tokens, 0)
    held = state_held(state)
    lengths = state.lengths._replace(settled=seq_lens)
    start = held_columns(state.plan.spec.groups, lengths).start
    into_gap = (seq_lens > state.solid) & jnp.any(
        (held.gap < held.resume) & (start < held.resume), axis=0
    )
    settled = asked & has_room & state.live & ~into_gap
    state = give_back(state, None, held.start, jnp.where(settled, start, held.start))
    past_gap = settled & (seq_lens > state.solid)
    return dataclasses.replace(
        state,
        seq_lens=jnp.where(settled, seq_lens, state.seq_lens),
        solid=jnp.where(past_gap, state.room, state.solid),
        tail=jnp.where(past_gap, state.room, state.tail),
        faults=with_faults(
            state.faults,
            (asked & ~state.live, Fault.ADVANCE_FREE_ROW),
            (asked & state.live & ~has_room, Fault.ADVANCE_BEYOND_ROOM),
            (into_gap, Fault.ADVANCE_INTO_GAP),
        ),
    )


def give_back(state: State, rows: jax.Array | None, start: jax.Array, stop: jax.Array) -> State:
    """Clears columns [start, stop) i32[G, R] of rows i32[R] (None: all) and drops their holder."""

    def one_pass(carry, moves):
        table, pool = carry
        row = moves.row if rows is None else indices.take(rows, moves.row, -1)
        column = moves.pick(start) + moves.place
        ids = tables.take(table, moves.group, row, column, moves.valid)
        # Only where a block was: the scatter must derive from what was read, or XLA copies.
        held = ids != indices.NULL_BLOCK
        table = tables.put(
            table, moves.group, row, column, jnp.full_like(ids, indices.NULL_BLOCK), held
        )
        return table, block_pool.unhold(pool, pool_of(state.plan, moves.group), ids)

    counts = jnp.maximum(stop - start, 0)
    table, pool = for_each_block(counts, one_pass, (state.table, state.pool))
    return dataclasses.replace(state, table=table, pool=pool)


def release(state: State, rows) -> State:
    """Ends rows i32[R] (-1 pads): their blocks lose a holder and the rows are free.

    A row that is free, does not exist or was named before in the call is skipped, and `faults`
    says so.

    Raises:
      ValueError: for rows of another shape or kind.
    """
    return _release(one_shard(state), arguments.rows_and_pads("rows", rows))


@jax.jit
def _release(state, rows):
    num_rows = state.seq_lens.shape[0]
    exists = indices.is_valid(rows, num_rows)
    ends = indices.first_naming(rows, num_rows, where=indices.take(state.live, rows, False))
    rows_ending = jnp.where(ends, rows, -1)
    held = state_held(state, rows_ending)
    state = give_back(state, rows_ending, held.start, held.stop)
    return dataclasses.replace(
        put_lengths(state, rows_ending, 0),
        live=indices.put(state.live, rows_ending, False),
        faults=with_faults(
            state.faults,
            (exists & ~ends, Fault.RELEASE_FREE_ROW),
            (~exists & (rows != -1), Fault.RELEASE_BAD_ROW),
        ),
    )


def with_faults(faults: jax.Array, *found: tuple[jax.Array, Fault]) -> jax.Array:
    """`faults` i32[] with the bit of every fault that holds for some row or id."""
    bits = sum(jnp.where(holds, jnp.int32(fault), 0) for holds, fault in found)
    return faults | jax.lax.reduce_or(bits, axes=(0,))


def clear_faults(state: State) -> State:
    """The state with its sticky faults cleared, e.g. after `check` has named them."""
    return dataclasses.replace(state, faults=jnp.zeros_like(state.faults))
