"""Publish: what the prefix cache reads from a state and does to it, in calls of one shape."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np

from kvpool import block_pool, indices, retains, storage
from kvpool.indices import NULL_BLOCK
from kvpool.plan import Plan
from kvpool.prefix.places import Places
from kvpool.prefix.tree import Kept
from kvpool.state import State, free_blocks, one_shard
from kvpool.status import SpecError
from kvpool.storage import Storage

_WIDTH = 256  # ids of each group in a call; one width, so that there is one trace


def check_given(places: Places, plan: Plan, state: State, storage: Storage | None) -> None:
    """SpecError for a state or storage that is not of the plan, or lies so that it has no use."""
    for name, one in (("state", state), ("storage", storage)):
        if one is not None and one.plan != plan:
            raise SpecError(f"{name}: made from another plan than the cache's")
    one_shard(state)
    on_mesh = storage is not None and (storage.part is not None or storage.blocks[0].ndim != 2)
    if on_mesh and places.states:
        raise SpecError(
            "storage: on a mesh, where the cache has no way to copy a recurrent state; make it for "
            "a spec without one"
        )


def look_at_row(state: State, row: int) -> tuple[bool, int, list[list[int]]]:
    """(live, settled tokens, the ids in each group's columns) of a row.

    A block that lacks tokens at its start, since a `truncate` took it, counts as not held.
    """
    seen = np.asarray(_look_at_row(state, row)).tolist()
    ids, groups = seen[2:], []
    for columns in state.table.columns:
        groups.append(ids[:columns])
        ids = ids[columns:]
    return bool(seen[0]), seen[1], groups


@jax.jit
def _look_at_row(state, row):
    ids = indices.take(state.table.block_ids, row[None], NULL_BLOCK)[0]
    pools = jnp.asarray(np.repeat(state.plan.pool_of, state.table.columns), jnp.int32)
    ids = jnp.where(block_pool.lacking(state.pool, pools, ids) > 0, NULL_BLOCK, ids)
    lengths = jnp.stack([state.live[row].astype(jnp.int32), state.seq_lens[row]])
    return jnp.concatenate([lengths, ids])


def take_snapshot(state: State, storage: Storage | None, row: int):
    """A snapshot of the row: (state, storage, {state group: id}), no ids where blocks are short."""
    state, result = retains.snapshot(state, np.array([row], np.int32))
    copies, granted = jax.device_get((result.copies, result.granted))
    if not granted[0]:
        return state, storage, {}
    if storage is not None:
        storage = _copy_blocks(storage, copies)
    return state, storage, {name: int(ids[1][0]) for name, ids in copies.items()}


# The storage is donated: it would be copied whole otherwise.
_copy_blocks = jax.jit(storage.copy_blocks, donate_argnums=0)
_retain = jax.jit(retains.retain)
_drop = jax.jit(retains.drop)
_free_blocks = jax.jit(free_blocks)


def retain(state: State, places: Places, kept: Iterable[Kept]) -> State:
    """One more holder for each block."""
    return _for_each(_retain, state, places, kept)


def drop(state: State, places: Places, kept: Iterable[Kept]) -> State:
    """One holder fewer for each block and snapshot."""
    return _for_each(_drop, state, places, kept)


def free_of_pools(state: State) -> list[int]:
    """Blocks that nobody holds, of each pool."""
    free, plan = jax.device_get(_free_blocks(state)), state.plan
    by_pool = {pool: free[g.name] for g, pool in zip(plan.spec.groups, plan.pool_of, strict=True)}
    return [int(by_pool[pool]) for pool in range(len(plan.pool_sizes))]


def holders_of_pools(state: State) -> list[np.ndarray]:
    """How many holders each block has, i32[N] for each pool."""
    holders = np.asarray(state.pool.holders)
    return [
        holders[start : start + size]
        for start, size in zip(state.pool.offsets, state.plan.pool_sizes, strict=True)
    ]


def _for_each(verb, state, places, kept):
    ids: dict[str, list[int]] = {group.name: [] for group in places.groups}
    for one in kept:
        ids[places.of_place[one.place].name].append(one.block)
    for start in range(0, max(map(len, ids.values())), _WIDTH):
        blocks = {name: np.full(_WIDTH, NULL_BLOCK, np.int32) for name in ids}
        for name, some in ids.items():
            part = some[start : start + _WIDTH]
            blocks[name][: len(part)] = part
        state = verb(state, blocks)
    return state
