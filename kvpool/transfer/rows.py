"""Rows: the bookkeeping on both sides of a transfer; nothing here waits for anyone.

The sender takes a row's bytes out (`offer_of`). The receiver makes room (`begin`), and when all has
come puts it there (`finish`), or gives the room back (`abandon`) and computes the row itself.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np

from kvpool import block_pool, cache, sharing, storage
from kvpool.buffers import positive
from kvpool.plan import Plan
from kvpool.spec import CacheSpec
from kvpool.state import State, one_shard, table_of
from kvpool.status import Result, SpecError
from kvpool.storage import Storage
from kvpool.transfer.offer import Offer
from kvpool.transfer.receiver import Inbox
from kvpool.transfer.shards import Shards, rank_groups


def offer_of(
    state: State, blocks: Storage, row: int, request: int | str, spec: CacheSpec,
    shards: Shards = Shards(), rank: int = 0,  # noqa: B008
) -> Offer:  # fmt: skip
    """All that a rank has of a row, as an Offer with bytes of its own.

    Args:
      state, blocks: of the rank, whose spec is `per_rank(spec, shards.heads)`.
      row: live, with at least one settled token.
      spec: of the whole cache.

    Raises:
      SpecError: for a row that does not exist or without tokens, a state or storage of another
        spec, or shards that deal blocks to several ranks, whose tables are not a state's.
    """
    _check(state, blocks, row, spec, shards)
    offer = Offer(request, spec, int(state.seq_lens[row]), shards, rank)
    fill(offer, state, blocks, row)
    return offer


def fill(offer: Offer, state: State, blocks: Storage, row: int) -> None:
    """Puts all that a rank has of a row into an offer; arguments and errors as `offer_of`.

    Snapshots that are offered are not a row's; who holds them puts them.
    """
    _check(state, blocks, row, offer.spec, offer.shards)
    if int(state.seq_lens[row]) != offer.num_tokens:
        raise SpecError(
            f"row {row}: {int(state.seq_lens[row])} tokens, the offer has {offer.num_tokens}"
        )
    offer.lacks = _lacks(state, row)
    for group, items in zip(offer.spec.groups, offer.items, strict=True):
        items = items[-1:] if group.is_state else items  # the last one is at the end
        ids = np.asarray(table_of(state, group.name))[row, items * (not group.is_state)]
        data = storage.export_blocks(blocks, group.name, ids)
        offer.put(group.name, data, items=items if offer.snapshots else None)


def holds(spec: CacheSpec, length: int) -> dict[str, np.ndarray]:
    """The masks of a receiver whose row begins with a prefix of so many tokens."""
    masks = {}
    for group in spec.groups:
        full = 0 if group.is_state else int(group.column_of(length))
        masks[group.name] = np.arange(full) >= int(group.dead_columns(length)) * (
            not group.is_state
        )
    return masks


def begin(state: State, row: int, num_tokens: int, prefix=None) -> tuple[State, Result]:
    """Room for a sequence that is to come into a free row, empty or at the end of a prefix.

    Returns:
      (state, Result of the row, R = 1). The copies that a prefix owes are in `copies`. Without a
      grant the state is as it was.

    Raises:
      SpecError, ValueError: for a row that does not exist, num_tokens below 1, or a prefix longer
        than that.
    """
    before, plan = state, state.plan
    _check_row(state, row)
    num_tokens = positive("num_tokens", num_tokens)
    state, admitted = sharing.admit(state, np.array([row], np.int32), prefix)
    if not bool(admitted.ok):
        return before, admitted
    while True:
        settled = int(state.seq_lens[row])
        if settled > num_tokens:
            raise SpecError(f"prefix: wanted at most {num_tokens} tokens, got {settled}")
        # More than a step at once: each but the last is settled, so that windows move on.
        step = min(num_tokens - settled, plan.max_step_tokens)
        wanted = np.zeros(plan.max_seqs, np.int32)
        wanted[row] = step
        state, result = cache.reserve(state, wanted, tail_only=True)
        if step > 0 and not bool(result.ok):
            asked = slice(row, row + 1)
            granted, status = result.granted[asked], result.status[asked]
            return before, result._replace(granted=granted, status=status)
        if settled + step == num_tokens:
            return state, admitted
        state = cache.advance(state, wanted)


def finish(state: State, blocks: Storage, row: int, inbox: Inbox) -> tuple[State, Storage]:
    """Puts an inbox that is full into the row that `begin` made room for, and settles it.

    Raises:
      SpecError: for an inbox in which something is missing, or of another spec or length; for the
        rest as `offer_of`.
    """
    plan = inbox.plan
    _check(state, blocks, row, plan.spec, plan.receiver)
    if not inbox.arrivals.ready:
        raise SpecError(f"inbox: {inbox.arrivals.missing} parcels have not come yet")
    room = int(state.room[row])
    if room != plan.num_tokens:
        raise SpecError(f"row {row}: has room for {room} tokens, the inbox has {plan.num_tokens}")
    for group, items, data in zip(plan.spec.groups, inbox.items, inbox.blocks, strict=True):
        if group.is_state:  # the last one is the row's own; snapshots are for a cache
            here = items == plan.num_tokens
            items, data = items[here] * 0, data[here]
        ids = np.asarray(table_of(state, group.name))[row, items]
        if len(ids):
            blocks = storage.import_blocks(blocks, group.name, ids, data)
        state = _put_lacks(state, group.name, inbox.lacks.get(group.name, {}), row, set(items))
    left = np.zeros(state.plan.max_seqs, np.int32)
    left[row] = plan.num_tokens - int(state.seq_lens[row])
    return cache.advance(state, left), blocks


def abandon(state: State, row: int) -> State:
    """Gives back what `begin` took; the row is free again."""
    return cache.release(state, np.array([row], np.int32))


def _check(state: State, blocks: Storage, row: int, spec: CacheSpec, shards: Shards) -> None:
    """SpecError unless this row exists, in a rank's part of this spec."""
    _check_row(state, row)
    if shards.context > 1:
        raise SpecError("shards: a state's table has all columns; use Offer.put and Inbox.blocks "
                        "for dealt blocks")  # fmt: skip
    if state.plan.spec.groups != rank_groups(spec, shards.heads):
        raise SpecError(
            f"state: of the spec {state.plan.spec.digest[:12]}, wanted one of "
            f"kvpool.per_rank(spec, {shards.heads}) of the spec {spec.digest[:12]}"
        )
    if blocks.plan != state.plan:
        raise SpecError("blocks: made from another plan than the state's")


def _check_row(state: State, row: int) -> None:
    rows = one_shard(state).plan.max_seqs
    if not isinstance(row, (int, np.integer)) or isinstance(row, bool) or not 0 <= row < rows:
        raise SpecError(f"row: wanted one from 0 to {rows - 1}, got {row!r}")


def _lacks(state: State, row: int) -> dict[str, dict[int, int]]:
    """{group: {column: tokens}} of a row's blocks that lack tokens at their start."""
    if state.pool.unwritten is None:
        return {}
    found, unwritten = {}, np.asarray(state.pool.unwritten)
    for group in state.plan.spec.groups:
        if group.short_chunks:
            ids = np.asarray(table_of(state, group.name))[row]
            (columns,) = np.nonzero(ids >= 0)
            tokens = unwritten[_offset(state.plan, group.name) + ids[columns]]
            pairs = zip(columns.tolist(), tokens.tolist(), strict=True)
            found[group.name] = {column: lacking for column, lacking in pairs if lacking}
    return found


def _offset(plan: Plan, group: str) -> int:
    return sum(plan.pool_sizes[: plan.pool_of[plan.spec.group_index(group)]])


def _put_lacks(state: State, group: str, lacks: dict[int, int], row: int, items: set) -> State:
    """The blocks that came lack what they lacked at the sender."""
    columns = [column for column in lacks if column in items]
    if not columns or state.pool.unwritten is None:
        return state
    ids = np.asarray(table_of(state, group))[row, columns]
    which = jnp.full(len(ids), state.plan.pool_of[state.plan.spec.group_index(group)], jnp.int32)
    tokens = jnp.asarray([lacks[column] for column in columns], jnp.int32)
    pool = block_pool.set_lacking(state.pool, which, jnp.asarray(ids, jnp.int32), tokens)
    return dataclasses.replace(state, pool=pool)
