"""Rows that begin with what others hold: admit, with or without a prefix, and fork.

A block of tokens with several holders is full and never written again. So whoever joins a sequence
in the middle of a block gets a copy of that block, and of any recurrent state, at once; the copies
are owed by the caller (`Result.copies`) before any write of the step.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kvpool import arguments, block_pool, indices, tables
from kvpool.grants import first_fault, outgrows, serve
from kvpool.held import Held, Lengths, half_full, held_columns
from kvpool.indices import NULL_BLOCK
from kvpool.moves import for_each_block
from kvpool.plan import Plan
from kvpool.state import State, allocate_one_each, one_shard, pool_of, put_lengths
from kvpool.status import Result, Status
from kvpool.tables import BlockTable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
    """A sequence's beginning that others hold: R rows can start from it.

    `blocks` has for every group the ids of columns 0, 1, ... as in a block table, NULL_BLOCK where
    nothing is held and no query at `length` reads; a state group has one column, the snapshot taken
    at `length`.
    """

    length: jax.Array  # i32[] for every row, or i32[R]
    blocks: dict[str, jax.Array]  # i32[P] for every row, or i32[R, P]


def admit(state: State, rows, prefix: Prefix | None = None):
    """Makes free rows live, empty or at the end of a prefix.

    Args:
      rows: i32[R], -1 pads.
      prefix: shares the prefix's full blocks, and copies its half-full last block and its
        recurrent state into blocks of the row's own.

    Returns:
      (state, Result). A row is UNREACHABLE when a column that a query at the prefix's length reads
      is NULL, held by nobody, or a block that lacks such tokens since a `truncate` took it.

    Raises:
      ValueError, SpecError: for arguments of another shape or kind, an unknown group.
    """
    rows = arguments.rows_and_pads("rows", rows)
    if prefix is None:
        return _admit_empty(one_shard(state), rows)
    return _admit_at(one_shard(state), rows, *_as_table(state.plan, prefix, rows.shape[0]))


def _as_table(plan: Plan, prefix: Prefix, num_rows: int) -> tuple[jax.Array, BlockTable]:
    """A prefix as lengths i32[R] and a table of R rows."""
    length = _per_row("prefix.length", prefix.length, num_rows, 0)
    for name in prefix.blocks:
        plan.spec.group_index(name)
    none = np.zeros((num_rows, 0), np.int32)
    columns = [
        _per_row(f"prefix.blocks[{group.name!r}]", prefix.blocks[group.name], num_rows, 1)
        if group.name in prefix.blocks
        else none
        for group in plan.spec.groups
    ]
    widths = tuple(ids.shape[1] for ids in columns)
    return length, BlockTable(jnp.concatenate(columns, axis=1, dtype=jnp.int32), widths)


def _per_row(name, value, num_rows, trailing):
    """An argument given once for all rows or for each as i32[R, ...], with `trailing` more axes."""
    shape = (None,) * trailing
    if np.ndim(value) > trailing:
        shape = (num_rows, *shape)
    value = arguments.int32(name, value, shape)
    return jnp.broadcast_to(value, (num_rows, *value.shape[value.ndim - trailing :]))


@jax.jit
def _admit_empty(state, rows):
    asked = rows != -1
    status = first_fault(asked, *_row_faults(state, rows, asked))
    needs = jnp.zeros((len(state.plan.pool_of), rows.shape[0]), jnp.int32)
    result = serve(state, needs, status)
    live = indices.put(state.live, rows, True, where=result.granted)
    return dataclasses.replace(state, live=live), result


def _row_faults(state, rows, asked):
    """What can be wrong with rows i32[R] that are to become live."""
    num_rows = state.seq_lens.shape[0]
    free = indices.take(~state.live, rows, False) & indices.first_naming(rows, num_rows, asked)
    return (~indices.is_valid(rows, num_rows), Status.BAD_ARGUMENT), (~free, Status.BUSY)


@jax.jit
def _admit_at(state, rows, length, source):
    plan, source = state.plan, _of_held(state, source)
    in_range = (length >= 0) & (length <= plan.max_seq_len)
    safe = jnp.where(in_range, length, 0)
    held = held_columns(plan.spec.groups, Lengths.exactly(safe))
    own = _own_columns(plan, safe)
    asked = (rows != -1) & (length >= 0)
    status = first_fault(
        asked,
        *_row_faults(state, rows, asked),
        (~in_range, Status.TOO_LONG),
        (~_reachable(state, safe, held, source), Status.UNREACHABLE),
        (outgrows(plan, held.count), Status.NEVER),
    )
    result = serve(state, own.wanted.astype(jnp.int32), status)
    source_rows = jnp.arange(rows.shape[0], dtype=jnp.int32)
    return _join(state, result, rows, safe, source_rows, held, own, source)


def _of_held(state: State, source: BlockTable) -> BlockTable:
    """`source` with NULL_BLOCK for every block that nobody holds."""
    pools = jnp.asarray(np.repeat(state.plan.pool_of, source.columns), jnp.int32)
    places = state.pool.place(pools, source.block_ids)
    held = indices.take(state.pool.holders, places, 0) > 0
    return dataclasses.replace(source, block_ids=jnp.where(held, source.block_ids, NULL_BLOCK))


def _reachable(state: State, length: jax.Array, wanted: Held, source: BlockTable) -> jax.Array:
    """bool[R]: the columns `wanted` have all that a query at `length` reads."""
    reachable = jnp.ones(length.shape, bool)
    for index, group in enumerate(state.plan.spec.groups):
        ids, first = tables.of_group(source, index), group.region.first_read(length)
        start, stop = wanted.start[index], wanted.stop[index]
        column = jnp.arange(ids.shape[1], dtype=jnp.int32)
        read = (column >= start[:, None]) & (column < stop[:, None])
        pool = jnp.full_like(ids, state.plan.pool_of[index])
        unread = jnp.maximum(first[:, None] - column * group.block_size, 0)
        found = (ids != NULL_BLOCK) & (block_pool.lacking(state.pool, pool, ids) <= unread)
        found = jnp.all(found | ~read, axis=1) & (stop <= ids.shape[1])
        reachable &= found | (first >= length)
    return reachable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
    """The columns that a joining row may not share: the half-full last block, the state."""

    wanted: jax.Array  # bool[G, R]
    column: jax.Array  # i32[G, R]
    before: jax.Array  # i32[G, R], tokens of the sequence in a half-full block


def _own_columns(plan: Plan, length: jax.Array) -> Own:
    column, before = half_full(plan.spec.groups, length)
    is_state = np.array([group.is_state for group in plan.spec.groups])[:, None]
    return Own((before > 0) | (is_state & (length > 0)), column, before)


def _join(state, result: Result, rows, length, source_rows, held: Held, own: Own, source=None):
    """Gives granted rows [R] what `source_rows` of `source` (None: the table) hold at `length`."""
    full = jnp.where(result.granted, held.stop - held.start - own.wanted, 0)
    table, pool = _share(state, rows, source_rows, held.start, full, source)
    groups = jnp.arange(len(state.plan.pool_of), dtype=jnp.int32)[:, None]
    wanted = own.wanted & result.granted
    original = tables.take(
        table if source is None else source, groups, source_rows[None], own.column, wanted
    )
    pool, ids = allocate_one_each(state.plan, pool, wanted)
    fresh = ids != NULL_BLOCK
    if source is None:  # a fork's source holds it; the scatter must derive from what was read
        fresh &= original != NULL_BLOCK
    table = tables.put(table, groups, rows[None], own.column, ids, fresh)
    pool = block_pool.go_on(pool, state.plan.pool_of, ids, original, own.before)
    joined = jnp.where(result.granted, rows, -1)
    live = indices.put(state.live, joined, True)
    state = dataclasses.replace(state, table=table, pool=pool, live=live)
    names = [group.name for group in state.plan.spec.groups]
    copies = {name: (original[g], ids[g]) for g, name in enumerate(names)}
    return put_lengths(state, joined, length), result._replace(copies=copies)


def _share(state, rows, source_rows, start, counts, source):
    """Rows [R] name `counts` i32[G, R] blocks of the source too, from columns `start` on."""

    def one_pass(carry, moves):
        table, pool = carry
        column = moves.pick(start) + moves.place
        source_row = indices.take(source_rows, moves.row, -1)
        ids = tables.take(
            table if source is None else source, moves.group, source_row, column, moves.valid
        )
        row = indices.take(rows, moves.row, -1)
        table = tables.put(table, moves.group, row, column, ids, ids != NULL_BLOCK)
        return table, block_pool.hold(pool, pool_of(state.plan, moves.group), ids)

    return for_each_block(counts, one_pass, (state.table, state.pool))


def fork(state: State, src, dst):
    """Starts row dst[i] as a copy of row src[i]: full blocks shared, the rest owed in `copies`.

    Args:
      src: i32[R], live rows; dst: i32[R], free rows; -1 in either pads.

    Returns:
      (state, Result). The new row has the source's settled tokens, and room exactly for them.

    Raises:
      ValueError: for rows of another shape or kind.
    """
    src, dst = arguments.rows_and_pads("src", src), arguments.rows_and_pads("dst", dst)
    if src.shape != dst.shape:
        raise ValueError(f"dst: wanted i32[{src.shape[0]}] like src, got i32[{dst.shape[0]}]")
    return _fork(one_shard(state), src, dst)


@jax.jit
def _fork(state, src, dst):
    num_rows = state.seq_lens.shape[0]
    length = indices.take(state.seq_lens, src, 0)
    held = held_columns(state.plan.spec.groups, Lengths.exactly(length))
    own = _own_columns(state.plan, length)
    asked = (src != -1) & (dst != -1)
    status = first_fault(
        asked,
        (~indices.is_valid(src, num_rows), Status.BAD_ARGUMENT),
        (~indices.take(state.live, src, False), Status.FREE_ROW),
        *_row_faults(state, dst, asked),
    )
    result = serve(state, own.wanted.astype(jnp.int32), status)
    return _join(state, result, dst, length, src, held, own)
