"""Room: which lengths a reserve leaves a row with, and which columns it lacks for them."""

import dataclasses

import jax
import jax.numpy as jnp

from kvpool.moves import Moves
from kvpool.state import Held, State, ceil_div


def lengths_after(state: State, target: jax.Array, tail_only: bool):
    """(room, solid, tail) i32[S] of rows that get room up to `target` i32[S] >= seq_lens."""
    room, solid, tail = state.room, state.solid, state.tail
    if not tail_only:
        grows = target > solid  # closes a gap, if there is one
        end = jnp.maximum(target, room)
        return tuple(jnp.where(grows, end, old) for old in (room, solid, tail))
    # Room inside the gap that a query could not read: the gap closes.
    closes = (solid < target) & (target < tail)
    solid, tail = (jnp.where(closes, room, length) for length in (solid, tail))
    grows = target > room
    had_gap = solid < tail
    new_gap = jnp.zeros(target.shape, bool)
    for group in state.plan.spec.groups:
        if group.region.span:
            new_gap |= group.dead_columns(target) > ceil_div(room, group.block_size)
    new_room = jnp.where(grows, target, room)
    keeps = ~grows | had_gap
    new_solid = jnp.where(keeps, solid, jnp.where(new_gap, room, target))
    return new_room, new_solid, jnp.where(keeps, tail, target)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Missing:
    """Columns a row lacks: `first_count` from `first` on, then `second_count` from `second` on."""

    first: jax.Array  # i32[G, S]
    first_count: jax.Array  # i32[G, S]
    second: jax.Array  # i32[G, S]
    second_count: jax.Array  # i32[G, S]

    @property
    def count(self) -> jax.Array:
        """Columns missing in all, i32[G, S]."""
        return self.first_count + self.second_count

    def column(self, moves: Moves) -> jax.Array:
        """The column of each move's block."""
        beyond = moves.place - moves.pick(self.first_count)
        return jnp.where(
            beyond < 0, moves.pick(self.first) + moves.place, moves.pick(self.second) + beyond
        )


def missing_columns(held: Held, wanted: Held) -> Missing:
    """What `wanted` has beyond `held`: the gap where it closes, and what lies past its end."""
    closed = wanted.gap == wanted.resume
    second = jnp.where(closed, held.stop, jnp.maximum(held.stop, wanted.resume))
    return Missing(
        first=held.gap,
        first_count=jnp.where(closed, held.resume - held.gap, 0),
        second=second,
        second_count=jnp.maximum(wanted.stop - second, 0),
    )
