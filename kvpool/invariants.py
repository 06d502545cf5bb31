"""Check: recomputes on the host what a state must look like, and names what does not."""

import jax
import numpy as np

from kvpool import tables
from kvpool.held import Held, Lengths, held_columns
from kvpool.indices import NULL_BLOCK
from kvpool.state import State
from kvpool.status import Fault, InvariantError


def check(state: State) -> None:
    """Verifies every invariant of the bookkeeping; for tests and debugging, host only.

    Free and held blocks make up each pool; no id stands twice in a free stack; each holder count
    equals the table columns and retains that name the block; a row holds exactly the columns that
    its lengths call for, and in them all that a query at its settled length reads.

    Raises:
      InvariantError: naming the group and the block or row, or the faults that are set.
    """
    state = jax.tree.map(np.asarray, state)
    # Settled tokens count as room here, so that a length beyond it shows as columns that lack.
    lengths = Lengths(*(np.maximum(length, state.seq_lens) for length in state.lengths))
    held = held_columns(state.plan.spec.groups, lengths)
    if state.faults:
        raise InvariantError(f"faults are set: {Fault(int(state.faults))!r}")
    for index in range(len(state.plan.spec.groups)):
        _check_table(state, index, held)
    _check_rows(state)
    for pool in range(len(state.plan.pool_sizes)):
        _check_pool(state, pool)


def _check_rows(state: State) -> None:
    plan = state.plan
    ordered = (state.seq_lens >= 0) & (state.seq_lens <= state.solid) & (state.solid <= state.tail)
    ordered &= (state.tail <= state.room) & (state.room <= plan.max_seq_len)
    _require(
        ordered,
        lambda row: (
            f"row {row}: wanted 0 <= settled <= solid <= tail <= room <= {plan.max_seq_len}, got "
            f"{state.seq_lens[row]}, {state.solid[row]}, {state.tail[row]}, {state.room[row]}"
        ),
    )
    _require(state.live | (state.room == 0), lambda row: f"row {row}: free, but has room")


def _check_table(state: State, index: int, held: Held) -> None:
    name, pool = state.plan.spec.groups[index].name, state.plan.pool_of[index]
    ids, size = tables.of_group(state.table, index), state.plan.pool_sizes[pool]
    start, gap, resume, stop = (
        part[index][:, None] for part in (held.start, held.gap, held.resume, held.stop)
    )
    column = np.arange(ids.shape[1])
    wanted = ((column >= start) & (column < gap)) | ((column >= resume) & (column < stop))
    _require(
        ~wanted | ((ids >= 0) & (ids < size)),
        lambda row, column: (
            f"group {name}, row {row}: column {column} is live at settled length "
            f"{state.seq_lens[row]}, but names block {ids[row, column]} of {size}"
        ),
    )
    _require(
        wanted | (ids == NULL_BLOCK),
        lambda row, column: (
            f"group {name}, row {row}: column {column} is dead or not held at settled length "
            f"{state.seq_lens[row]}, but names block {ids[row, column]}"
        ),
    )
    _check_written(state, index, ids)


def _check_written(state: State, index: int, ids: jax.Array) -> None:
    group, pool = state.plan.spec.groups[index], state.plan.pool_of[index]
    unwritten = state.pool.unwritten
    if unwritten is None:
        return
    first = group.region.first_read(state.seq_lens)[:, None]
    unread = np.maximum(first - np.arange(ids.shape[1]) * group.block_size, 0)
    lacks = unwritten[state.pool.offsets[pool] + np.maximum(ids, 0)]
    _require(
        (ids == NULL_BLOCK) | ((lacks >= 0) & (lacks <= unread)),
        lambda row, column: (
            f"group {group.name}, row {row}: block {ids[row, column]} in column {column} lacks its "
            f"first {lacks[row, column]} tokens, but a query at settled length "
            f"{state.seq_lens[row]} reads all but {unread[row, column]}"
        ),
    )


def _check_pool(state: State, pool: int) -> None:
    plan, size = state.plan, state.plan.pool_sizes[pool]
    groups = [index for index, owner in enumerate(plan.pool_of) if owner == pool]
    name = ", ".join(plan.spec.groups[index].name for index in groups)
    part = slice(state.pool.offsets[pool], state.pool.offsets[pool] + size)
    holders, retained = state.pool.holders[part], state.pool.retained[part]
    free = state.pool.free_ids[part][: state.pool.num_free[pool]]
    counts = np.bincount(free[(free >= 0) & (free < size)], minlength=size)
    places = retained.copy()
    for index in groups:
        ids = tables.of_group(state.table, index)
        places += np.bincount(ids[(ids >= 0) & (ids < size)], minlength=size).astype(np.int32)
    _require(
        counts <= 1, lambda block: f"group {name}: block {block} is free {counts[block]} times"
    )
    _require(
        (counts == 0) | (places == 0),
        lambda block: f"group {name}: block {block} is free, but {places[block]} places name it",
    )
    _require(
        holders == places,
        lambda block: (
            f"group {name}: block {block} counts {holders[block]} holders, but {places[block]} "
            f"places name it ({retained[block]} of them retains)"
        ),
    )
    _require(
        (counts == 1) | (holders > 0),
        lambda block: f"group {name}: block {block} is lost, neither free nor held",
    )
    _require(
        retained >= 0, lambda block: f"group {name}: block {block} counts {retained[block]} retains"
    )


def _require(holds, message) -> None:
    where = np.argwhere(~np.asarray(holds))
    if len(where):
        raise InvariantError(message(*where[0].tolist()))
