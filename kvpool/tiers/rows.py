"""Backup and restore of a live row: all that it holds goes to the host, and comes back elsewhere.

`backup` and `restore` do it at once. `start_backup` and `start_restore` leave it to their caller to
move the bytes, between the steps of a decode loop, and to call `finish_backup` or `finish_restore`;
until then the blocks at both ends are held, and must not be moved by `compact`.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvpool import block_pool
from kvpool.cache import advance, release, reserve
from kvpool.held import Lengths
from kvpool.retains import drop, retain
from kvpool.sharing import admit
from kvpool.state import State, table_of
from kvpool.status import Result, SpecError
from kvpool.storage import Storage
from kvpool.tiers.copies import Loading, Saving, pieces_of
from kvpool.tiers.host_tier import HostTier
from kvpool.tiers.pool_group import Allocation, Shortfall

Ids = Mapping[str, np.ndarray]  # {group: i32[K], blocks of the device in the order of columns}


@dataclasses.dataclass(eq=False)
class Backup:
    """What one row held for its `length` settled tokens, in host memory."""

    length: int
    allocation: Allocation
    lacking: Ids  # of each block, how many tokens at its start were never written
    readers: int  # restores under way
    _held: Ids
    _saving: Saving

    @property
    def done(self) -> bool:
        """Whether all bytes are there."""
        return self._saving.done

    def send(self, storage: Storage, wait: bool = False) -> bool:
        """Moves the copy on, as `copies.Saving.send`; whether it is done."""
        return self._saving.send(storage, wait)


@dataclasses.dataclass(eq=False)
class Restore:
    """A row on its way back: it is live and has room for all, but is not settled yet."""

    row: int
    record: Backup
    _held: Ids
    _loading: Loading
    _under_way: bool = True

    @property
    def done(self) -> bool:
        """Whether all bytes are there."""
        return self._loading.done

    @property
    def layers_to_come(self) -> frozenset[int]:
        """The layers of the model that still lack something."""
        return self._loading.layers_to_come

    def receive(self, storage: Storage, donate: bool = False, wait: bool = False) -> Storage:
        """Moves the copy on, as `copies.Loading.receive`."""
        return self._loading.receive(storage, donate, wait)


def backup(tier: HostTier, state: State, storage: Storage, row: int) -> Backup | Shortfall:
    """Copies all that a row holds for its settled tokens to the host; the row stays as it is.

    Every group goes along: blocks of tokens, states, and those of draft layers. What is reserved
    beyond the settled length does not.

    Returns:
      A Backup, for any number of `restore` and one `discard`; or a Shortfall, and nothing changed.

    Raises:
      SpecError: for a row that is not live, a state or storage of another spec.
      Whatever the copy raises; the host blocks are free again then.
    """
    tier.check_plan(storage.plan)
    record = _planned(tier, state, row)
    if isinstance(record, Backup):
        try:
            record.send(storage, wait=True)
        except BaseException:
            tier.pools.release(record.allocation)
            raise
    return record


def start_backup(tier: HostTier, state: State, row: int) -> tuple[State, Backup | Shortfall]:
    """A backup whose bytes the caller moves with `send`, until `finish_backup`.

    Returns:
      (state, Backup): the row's blocks are held, so that it may be released at once; it must not go
      on, or fork, since its last blocks would change. Or (the state as it was, Shortfall).

    Raises:
      SpecError: as `backup`.
    """
    record = _planned(tier, state, row)
    return (retain(state, record._held) if isinstance(record, Backup) else state), record


def finish_backup(tier: HostTier, state: State, record: Backup) -> State:
    """The state that holds the row's blocks no longer.

    A backup that is not `done` is given up: its host blocks are free again.
    """
    state = drop(state, record._held)
    record._held = {}
    if not record.done:
        record._saving.end()
        tier.pools.release(record.allocation)
    return state


def restore(
    tier: HostTier, state: State, storage: Storage, record: Backup, row: int, donate: bool = False
) -> tuple[State, Storage, Result]:
    """Makes a free row what another was when it was backed up, in whatever blocks are free.

    Args:
      donate: whether `storage` may be used up, in the place of one copy of it.

    Returns:
      (state, storage, Result of one row). Not granted, e.g. OUT_OF_BLOCKS or BUSY: both as they
      were. The record stays, until `discard`.

    Raises:
      SpecError: for a record that is not done or discarded, a state or storage of another spec.
      Whatever the copy raises; a storage that was not donated is as it was.
    """
    tier.check_plan(storage.plan)
    seated, restoring, result = start_restore(tier, state, record, row, by_layer=False)
    if restoring is None:
        return state, storage, result
    try:
        storage = restoring.receive(storage, donate, wait=True)
    except BaseException:
        record.readers -= 1
        raise
    return finish_restore(seated, restoring), storage, result


def start_restore(
    tier: HostTier, state: State, record: Backup, row: int, by_layer: bool = True
) -> tuple[State, Restore | None, Result]:
    """A restore whose bytes the caller moves with `receive`, until `finish_restore`.

    Args:
      by_layer: the model's first layer comes first, so that `layers_to_come` tells which can start.

    Returns:
      (state, Restore, Result of one row): the row is live with no token settled, and its blocks are
      held. Not granted: (the state as it was, None, Result).

    Raises:
      SpecError: as `restore`.
    """
    tier.check_plan(state.plan)
    if not tier.pools.holds(record.allocation):
        raise SpecError("record: wanted a backup of this tier, got one that was discarded")
    if not record.done:
        raise SpecError("record: its bytes are still on their way; send(storage, wait=True) first")
    seated, result = _seated(state, row, record.length)
    if not bool(result.granted[0]):
        return state, None, result
    ids = _blocks(seated, row, record.length)
    seated = retain(_with_lacking(seated, ids, record.lacking), ids)
    pieces = pieces_of(tier.memory, ids, record.allocation.ids, tier.chunk_bytes, by_layer)
    record.readers += 1
    return seated, Restore(row, record, ids, Loading(tier.memory, pieces)), result


def finish_restore(state: State, restoring: Restore) -> State:
    """The state in which the row is settled at the record's length.

    A restore that is not `done` is given up: the row is free again.

    Raises:
      SpecError: for a restore that was finished before.
    """
    if not restoring._under_way:
        raise SpecError("restoring: wanted one that is under way, got one that was finished before")
    restoring._under_way = False
    restoring.record.readers -= 1
    state = drop(state, restoring._held)
    if not restoring.done:
        restoring._loading.end()
        return release(state, np.array([restoring.row], np.int32))
    return advance(state, _alone(state, restoring.row, restoring.record.length))


def discard(tier: HostTier, record: Backup) -> None:
    """Gives the host blocks of a backup back.

    Raises:
      SpecError: for a record that was discarded before, or is being restored from or still sent.
    """
    if record.readers or not record.done:
        what = "is being restored from" if record.readers else "is not done; finish_backup ends it"
        raise SpecError(f"record: it {what}")
    tier.pools.release(record.allocation)


def _planned(tier: HostTier, state: State, row: int) -> Backup | Shortfall:
    tier.check_plan(state.plan)
    rows = state.plan.max_seqs
    if isinstance(row, bool) or not isinstance(row, (int, np.integer)) or not 0 <= row < rows:
        raise SpecError(f"row: wanted one of 0..{rows - 1}, got {row!r}")
    if not bool(state.live[row]):
        raise SpecError(f"row: wanted a live one, row {row} is free")
    length = int(state.seq_lens[row])
    ids = _blocks(state, row, length)
    allocation = tier.pools.allocate({name: len(some) for name, some in ids.items()})
    if isinstance(allocation, Shortfall):
        return allocation
    pieces = pieces_of(tier.memory, ids, allocation.ids, tier.chunk_bytes)
    saving = Saving(tier.memory, pieces)
    return Backup(length, allocation, _lacking(state, ids), 0, ids, saving)


def _blocks(state: State, row: int, length: int) -> dict[str, np.ndarray]:
    """The blocks that a row holds for its first `length` tokens."""
    lengths, blocks = Lengths.exactly(np.array([length], np.int32)), {}
    for group in state.plan.spec.groups:
        held = group.held(lengths)
        columns = slice(int(held.start[0]), int(held.stop[0]))
        blocks[group.name] = np.asarray(table_of(state, group.name))[row, columns]
    return blocks


def _seated(state: State, row: int, length: int) -> tuple[State, Result]:
    """The row live, with blocks exactly for what a query at `length` reads; Result of one row."""
    seated, result = admit(state, np.array([row], np.int32))
    if not bool(result.granted[0]) or not length:
        return seated, result
    # Its past comes as a whole, however few tokens a step may have.
    plan = state.plan
    any_step = dataclasses.replace(plan, max_step_tokens=plan.max_seq_len)
    seated = dataclasses.replace(seated, plan=any_step)
    seated, reserved = reserve(seated, _alone(state, row, length), tail_only=True)
    one = slice(row, row + 1)
    result = reserved._replace(granted=reserved.granted[one], status=reserved.status[one])
    return dataclasses.replace(seated, plan=plan), result


def _alone(state: State, row: int, tokens: int) -> np.ndarray:
    counts = np.zeros(state.plan.max_seqs, np.int32)
    counts[row] = tokens
    return counts


def _lacking(state: State, ids: Ids) -> Ids:
    pool, found = state.pool, {}
    for name, some in ids.items() if pool.unwritten is not None else ():
        which = _pool_of(state, name, some)
        found[name] = np.asarray(block_pool.lacking(pool, which, jnp.asarray(some)))
    return found


def _with_lacking(state: State, ids: Ids, lacking: Ids) -> State:
    pool = state.pool
    for name, tokens in lacking.items():
        which = _pool_of(state, name, ids[name])
        pool = block_pool.set_lacking(pool, which, jnp.asarray(ids[name]), tokens)
    return dataclasses.replace(state, pool=pool)


def _pool_of(state: State, name: str, ids: np.ndarray) -> jax.Array:
    return jnp.full(ids.shape, state.plan.pool_of[state.plan.spec.group_index(name)], jnp.int32)
