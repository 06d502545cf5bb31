"""Check: recomputes on the host what a state must look like, and names what does not."""

import jax
import numpy as np

from kvpool import slab_invariants, tables
from kvpool.held import Held, Lengths, held_columns
from kvpool.indices import NULL_BLOCK
from kvpool.state import State
from kvpool.status import Fault, InvariantError


def check(state: State) -> None:
    """Verifies every invariant of the bookkeeping; for tests and debugging, host only.

    Free and held blocks make up each pool; no id stands twice in a free stack; each holder count
    equals the table columns and retains that name the block; a row holds exactly the columns that
    its lengths call for, and in them all that a query at its settled length reads. Every slab is
    free, or has blocks of the one pool that owns it, and of no other; what is counted of its
    blocks, and where it stands on a stack, is right.

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
        _check_holders(state, pool)
        if not state.plan.pool_per_slab[pool]:
            _check_free_stack(state, pool)
    slab_invariants.check(state.pool, require)


def _check_rows(state: State) -> None:
    plan = state.plan
    ordered = (state.seq_lens >= 0) & (state.seq_lens <= state.solid) & (state.solid <= state.tail)
    ordered &= (state.tail <= state.room) & (state.room <= plan.max_seq_len)
    require(
        ordered,
        lambda row: (
            f"row {row}: wanted 0 <= settled <= solid <= tail <= room <= {plan.max_seq_len}, got "
            f"{state.seq_lens[row]}, {state.solid[row]}, {state.tail[row]}, {state.room[row]}"
        ),
    )
    require(state.live | (state.room == 0), lambda row: f"row {row}: free, but has room")


def _check_table(state: State, index: int, held: Held) -> None:
    name, pool = state.plan.spec.groups[index].name, state.plan.pool_of[index]
    ids, size = tables.of_group(state.table, index), state.plan.pool_sizes[pool]
    start, gap, resume, stop = (
        part[index][:, None] for part in (held.start, held.gap, held.resume, held.stop)
    )
    column = np.arange(ids.shape[1])
    wanted = ((column >= start) & (column < gap)) | ((column >= resume) & (column < stop))
    require(
        ~wanted | ((ids >= 0) & (ids < size)),
        lambda row, column: (
            f"group {name}, row {row}: column {column} is live at settled length "
            f"{state.seq_lens[row]}, but names block {ids[row, column]} of {size}"
        ),
    )
    require(
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
    require(
        (ids == NULL_BLOCK) | ((lacks >= 0) & (lacks <= unread)),
        lambda row, column: (
            f"group {group.name}, row {row}: block {ids[row, column]} in column {column} lacks its "
            f"first {lacks[row, column]} tokens, but a query at settled length "
            f"{state.seq_lens[row]} reads all but {unread[row, column]}"
        ),
    )


def _of_pool(state: State, pool: int):
    """(names of the groups, the pool's elements of holders and retained)."""
    groups = zip(state.plan.spec.groups, state.plan.pool_of, strict=True)
    start = state.pool.offsets[pool]
    part = slice(start, start + state.plan.pool_sizes[pool])
    return ", ".join(group.name for group, owner in groups if owner == pool), part


def _check_holders(state: State, pool: int) -> None:
    plan, size = state.plan, state.plan.pool_sizes[pool]
    name, part = _of_pool(state, pool)
    holders, retained = state.pool.holders[part], state.pool.retained[part]
    places = retained.copy()
    for index, owner in enumerate(plan.pool_of):
        if owner == pool:
            ids = tables.of_group(state.table, index)
            places += np.bincount(ids[(ids >= 0) & (ids < size)], minlength=size).astype(np.int32)
    require(
        holders == places,
        lambda block: (
            f"group {name}: block {block} counts {holders[block]} holders, but {places[block]} "
            f"places name it ({retained[block]} of them retains)"
        ),
    )
    require(
        retained >= 0, lambda block: f"group {name}: block {block} counts {retained[block]} retains"
    )
    cached = np.sum((retained > 0) & (retained == holders))
    counted = state.pool.num_cached[pool]
    require(
        [cached == counted],
        lambda _: f"group {name}: counts {counted} blocks that only retains hold, has {cached}",
    )


def _check_free_stack(state: State, pool: int) -> None:
    size = state.plan.pool_sizes[pool]
    name, part = _of_pool(state, pool)
    holders, num_free = state.pool.holders[part], state.pool.num_free[pool]
    require(
        [0 <= num_free <= size],
        lambda _: f"group {name}: counts {num_free} free blocks, but there are {size}",
    )
    start = sum(state.pool.stack_sizes[:pool])
    free = state.pool.free_ids[start : start + num_free]
    require(
        (free >= 0) & (free < size),
        lambda depth: (
            f"group {name}: at {depth} of its free stack is block {free[depth]} of {size}"
        ),
    )
    counts = np.bincount(free, minlength=size)
    require(counts <= 1, lambda block: f"group {name}: block {block} is free {counts[block]} times")
    require(
        (counts == 0) | (holders == 0),
        lambda block: f"group {name}: block {block} is free, but {holders[block]} places name it",
    )
    require(
        (counts == 1) | (holders > 0),
        lambda block: f"group {name}: block {block} is lost, neither free nor held",
    )


def require(holds, message) -> None:
    """InvariantError of message(*index) for the first element that does not hold."""
    where = np.argwhere(~np.asarray(holds))
    if len(where):
        raise InvariantError(message(*where[0].tolist()))
