"""StepView: the positions that one step writes and reads; built once, used by every layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvpool import indices, tables
from kvpool.arguments import int32
from kvpool.group import Group
from kvpool.indices import NULL_BLOCK
from kvpool.plan import Plan
from kvpool.regions import quotient
from kvpool.state import State, one_shard
from kvpool.status import SpecError
from kvpool.tables import BlockTable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepView:
    """The tokens of one step: rectangular over S rows, or flat where `rows` is given."""

    table: BlockTable
    seq_lens: jax.Array  # i32[S], settled tokens
    stop: jax.Array  # i32[S], settled tokens and those of this step, never beyond the room
    rows: jax.Array | None  # i32[T], NULL where the token is skipped
    positions: jax.Array | None  # i32[T]
    plan: Plan = dataclasses.field(metadata={"static": True})

    def key_positions(self, group: str, rows=None, max_blocks: int | None = None) -> jax.Array:
        """Positions of the keys that `read` returns for a layer of this group, i32[R, Lk].

        Args:
          group: name of a group of tokens.
          rows, max_blocks: as given to `read`; by default all rows and all their places.

        Returns:
          The position, of a compressed entry that of its last token; -1 where masked.

        Raises:
          SpecError: for an unknown group, or one of recurrent state.
          ValueError: for a wrong `rows` or `max_blocks`.
        """
        places = places_of(self, self.plan.spec.group_index(group), rows, max_blocks)
        return places.positions

    @property
    def has_tokens(self) -> jax.Array:
        """bool[S]: the step writes a token of the row."""
        return self.stop > self.seq_lens


def step_view(state: State, num_tokens) -> StepView:
    """The view of a rectangular step: row s brings tokens at positions n..n+num_tokens[s]-1.

    Args:
      state: with the step's room reserved.
      num_tokens: i32[S]; those beyond the row's room are skipped.

    Returns:
      A view whose values are [S, T, ...]; T comes from the values.

    Raises:
      ValueError: for num_tokens of a wrong shape or dtype.
    """
    num_tokens = int32("num_tokens", num_tokens, (state.plan.max_seqs,))
    stop = _rectangular_stop(one_shard(state).seq_lens, state.room, num_tokens)
    return StepView(state.table, state.seq_lens, stop, None, None, state.plan)


def ragged_view(state: State, rows, positions) -> StepView:
    """The view of a flat step of T tokens.

    Args:
      state: with the step's room reserved.
      rows: i32[T], the row of each token; -1 pads.
      positions: i32[T]; a token whose position is settled or beyond the row's room is skipped.

    Returns:
      A view whose values are [T, ...], and those of recurrent state [S, ...].

    Raises:
      ValueError: for rows or positions of a wrong shape or dtype.
    """
    rows = int32("rows", rows, (None,))
    positions = int32("positions", positions, rows.shape)
    rows, stop = _flat_tokens(one_shard(state).seq_lens, state.room, rows, positions)
    return StepView(state.table, state.seq_lens, stop, rows, positions, state.plan)


@jax.jit
def _rectangular_stop(seq_lens, room, num_tokens):
    return seq_lens + jnp.clip(num_tokens, 0, room - seq_lens)


@jax.jit
def _flat_tokens(seq_lens, room, rows, positions):
    settled = indices.take(seq_lens, rows, 0)
    written = (positions >= settled) & (positions < indices.take(room, rows, 0))
    rows = jnp.where(written, rows, NULL_BLOCK)
    ends = jnp.where(written, positions, 0) + 1
    last = indices.drop_absent(rows, seq_lens.shape[0])
    return rows, seq_lens.at[last].max(ends, mode="drop")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Places:
    """Where the keys of R rows lie: M blocks of E entries a row, in position order."""

    block_ids: jax.Array  # i32[R, M]
    starts: jax.Array  # i32[R], of the row's M * E entries the first that may be shown
    stops: jax.Array  # i32[R], the end of those that may be shown
    positions: jax.Array  # i32[R, M * E], of an entry's last token; -1 where masked

    @property
    def mask(self) -> jax.Array:
        """bool[R, M * E]: what is shown."""
        return self.positions >= 0

    def bounds(self, layer, entries: int = 1) -> tuple[jax.Array, jax.Array]:
        """(first, end) i32[R] of what may be shown, in units of so many entries.

        Nothing is, for a layer i32[] that is NULL.
        """
        stops = quotient(self.stops + (entries - 1), entries)
        return quotient(self.starts, entries), jnp.where(layer >= 0, stops, 0)


def places_of(view: StepView, group_index: int, rows, max_blocks: int | None) -> Places:
    """The keys that `read` returns, from the first block that a query at n reads."""
    group = view.plan.spec.groups[group_index]
    if group.is_state:
        raise SpecError(f"group {group.name!r}: recurrent state has no keys; use read_state")
    blocks = _num_blocks(view.plan, group, max_blocks)
    if rows is not None:
        rows = int32("rows", rows, (None,))
    return _places(view, rows, group_index, blocks)


def _num_blocks(plan: Plan, group: Group, max_blocks) -> int:
    most = plan.blocks_per_row(group)
    if max_blocks is None:
        return most
    if isinstance(max_blocks, bool) or not isinstance(max_blocks, (int, np.integer)):
        raise ValueError(f"max_blocks: wanted an integer, got {max_blocks!r}")
    if max_blocks < 1:
        raise ValueError(f"max_blocks: wanted at least 1, got {max_blocks}")
    return min(int(max_blocks), most)


@functools.partial(jax.jit, static_argnames=("group_index", "blocks"))
def _places(view, rows, group_index, blocks):
    group = view.plan.spec.groups[group_index]
    num_rows, ratio = view.seq_lens.shape[0], group.region.tokens_per_entry
    if rows is None:
        rows, settled, stop = jnp.arange(num_rows, dtype=jnp.int32), view.seq_lens, view.stop
    else:
        settled, stop = (indices.take(x, rows, 0) for x in (view.seq_lens, view.stop))
    dead = group.dead_columns(settled)
    columns = dead[:, None] + jnp.arange(blocks, dtype=jnp.int32)
    block_ids = tables.take(view.table, group_index, rows[:, None], columns)
    # An entry is shown once all its tokens are there, which ends at its last.
    starts, stops = (
        quotient(position - dead * group.block_size, ratio)
        for position in (group.region.first_read(settled), stop)
    )
    entry = np.arange(blocks * group.entries_per_block, dtype=np.int32)
    shown = (entry >= starts[:, None]) & (entry < stops[:, None])
    shown &= jnp.repeat(block_ids >= 0, group.entries_per_block, axis=1)
    last_tokens = (dead * group.block_size)[:, None] + entry * ratio + (ratio - 1)
    return Places(block_ids, starts, stops, jnp.where(shown, last_tokens, -1))


def slots_of(view: StepView, group_index: int, width: int | None) -> jax.Array:
    """i32[S * width], or i32[T] of a flat view: where the step's tokens are written, else NULL.

    Of a compressed group only the last token of an entry has a slot.
    """
    group = view.plan.spec.groups[group_index]
    ratio = group.region.tokens_per_entry
    rows, positions = view.rows, view.positions
    if rows is None:
        num_rows = view.seq_lens.shape[0]
        positions = view.seq_lens[:, None] + jnp.arange(width, dtype=jnp.int32)
        rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
        rows = jnp.where(positions < view.stop[:, None], rows, NULL_BLOCK)
        rows, positions = rows.reshape(-1), positions.reshape(-1)
    column = quotient(positions, group.block_size)
    place = positions - column * group.block_size
    written = rows >= 0
    if ratio > 1:
        written &= jax.lax.rem(place, np.int32(ratio)) == ratio - 1
        place = quotient(place, ratio)
    block_ids = tables.take(view.table, group_index, rows, column, written)
    return jnp.where(block_ids >= 0, block_ids * group.entries_per_block + place, NULL_BLOCK)


def state_blocks_of(view: StepView, group_index: int) -> jax.Array:
    """i32[S]: the state block of each row, NULL where it has none."""
    return tables.of_group(view.table, group_index)[:, 0]
