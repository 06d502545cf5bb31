"""Compaction: blocks leave slabs that are sparsely used, so that other groups can have the slabs.

Nothing here happens by itself. Who calls `compact` holds ids in tables, which follow, and perhaps
ids of its own, which `follow` translates.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvpool import arguments, block_pool, indices, slabs, tables
from kvpool.indices import NULL_BLOCK
from kvpool.regions import positive
from kvpool.state import State
from kvpool.status import SpecError
from kvpool.storage import Storage, copy_blocks


def compact(state: State, storage: Storage, max_moves: int = 256):
    """Empties sparsely used slabs of an elastic cache into the others of their pool.

    Afterwards, or after several calls, the blocks of each pool lie in as few slabs as can hold
    them. It looks at all blocks, unlike the verbs of a step, so it is for moments when slabs are
    short: when a group's `shortfall` is above 0 although many of its blocks are not held.

    Args:
      max_moves: blocks of each pool that one call moves at most, at least 1; static under jit.

    Returns:
      (state, storage, moves {group: (src, dst)}, i32[max_moves] each, -1 pads). The moves are done,
      and every table and holder count follows; ids held elsewhere go through `follow`. Groups of
      one pool have the same moves. Without any, the state is bit-identical.

    Raises:
      SpecError: for a storage of another plan, or max_moves below 1.
    """
    max_moves = positive("max_moves", max_moves)
    if state.plan != storage.plan:
        raise SpecError("storage: made for another plan than the state's")
    state, moves = _compact(state, max_moves)
    of_group, once = {}, {}
    for group, pool in zip(state.plan.spec.groups, state.plan.pool_of, strict=True):
        of_group[group.name] = moves[pool]
        # Blocks of one pool of slabs have equal bytes: moved for one group, moved for all.
        if state.plan.pool_of.index(pool) == len(of_group) - 1:
            once[group.name] = moves[pool]
    return state, copy_blocks(storage, once), of_group


def follow(moves: Mapping[str, tuple], blocks: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Where blocks {group: ids i32[K]} are after the `moves` that `compact` returned.

    Raises:
      SpecError, ValueError: for a group without moves, ids of another kind.
    """
    followed = {}
    for name, ids in blocks.items():
        if name not in moves:
            raise SpecError(f"blocks: no group {name!r}; there are moves of {', '.join(moves)}")
        ids = arguments.int32(f"blocks[{name!r}]", ids, (None,))
        src, dst = moves[name]
        order = jnp.argsort(src)
        nth = jnp.minimum(jnp.searchsorted(src[order], ids), src.shape[0] - 1)
        moved = (src[order][nth] == ids) & (ids != NULL_BLOCK)
        followed[name] = jnp.where(moved, dst[order][nth], ids)
    return followed


@functools.partial(jax.jit, static_argnames="max_moves")
def _compact(state: State, max_moves: int):
    pool, none = state.pool, jnp.full(max_moves, NULL_BLOCK, jnp.int32)
    held = block_pool.held_in_slabs(pool)
    moves = [(none, none) if of_pool is None else _moves(of_pool, max_moves) for of_pool in held]
    if pool.slabs is None:
        return state, moves
    which = jnp.repeat(jnp.arange(len(moves), dtype=jnp.int32), max_moves)
    src, dst = (jnp.concatenate(ids) for ids in zip(*moves, strict=True))
    moved = _with_pool_moved(state, which, src, dst)
    # What is put anew in order would differ in the order alone.
    any_move = jnp.any(src != NULL_BLOCK)
    return jax.tree.map(lambda old, new: jnp.where(any_move, new, old), state, moved), moves


def _moves(held: jax.Array, max_moves: int) -> tuple[jax.Array, jax.Array]:
    """The first moves (src, dst) i32[max_moves] that put `held` bool[S, k] into the fewest slabs.

    The sparsest slabs are emptied, the sparsest of them first, into the fullest.
    """
    count, each = held.shape
    fullest = jnp.argsort(-jnp.sum(held, axis=1, dtype=jnp.int32))
    stays = jnp.arange(count) * each < jnp.sum(held, dtype=jnp.int32)
    room = ~held[fullest] & stays[:, None]
    leaving = (held[fullest] & ~stays[:, None])[::-1]
    dst = _places(room, fullest, max_moves)
    src = _places(leaving, fullest[::-1], max_moves)
    return src, jnp.where(src == NULL_BLOCK, NULL_BLOCK, dst)


def _places(chosen: jax.Array, slab: jax.Array, most: int) -> jax.Array:
    """Ids of the first blocks chosen, bool[S, k] in rows that are those of `slab` i32[S]."""
    each = chosen.shape[1]
    nth = jnp.nonzero(chosen.reshape(-1), size=most, fill_value=NULL_BLOCK)[0].astype(jnp.int32)
    row = jnp.where(nth == NULL_BLOCK, NULL_BLOCK, nth // each)
    base = indices.take(slab, row, 0) * each
    return jnp.where(nth == NULL_BLOCK, NULL_BLOCK, base + nth % each).astype(jnp.int32)


def _with_pool_moved(state: State, which, src, dst) -> State:
    """The state in which block src[k] of pool which[k] is block dst[k]."""
    pool = state.pool
    places, targets = pool.place(which, src), pool.place(which, dst)
    to = jnp.full(pool.holders.shape, NULL_BLOCK, jnp.int32)
    to = indices.put(to, places, dst)

    def moved(counts):
        values = indices.take(counts, places, 0)
        return indices.put(indices.put(counts, places, 0), targets, values)

    unwritten = None if pool.unwritten is None else moved(pool.unwritten)
    pool = dataclasses.replace(
        pool, holders=moved(pool.holders), retained=moved(pool.retained), unwritten=unwritten
    )
    held = block_pool.held_in_slabs(pool)
    if pool.slabs is not None:
        pool = dataclasses.replace(pool, slabs=slabs.rebuilt(pool.slabs, held))
    columns = []
    for group, number in enumerate(state.plan.pool_of):
        ids = tables.of_group(state.table, group)
        new = indices.take(to, pool.place(jnp.full_like(ids, number), ids), NULL_BLOCK)
        columns.append(jnp.where(new == NULL_BLOCK, ids, new))
    table = dataclasses.replace(state.table, block_ids=jnp.concatenate(columns, axis=1))
    return dataclasses.replace(state, pool=pool, table=table)
