"""Room: which columns a row lacks for what it is to hold."""

import dataclasses

import jax
import jax.numpy as jnp

from kvpool.held import Held
from kvpool.moves import Moves


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
