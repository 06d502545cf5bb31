"""Two memories without blocks: the whole sequence at once, and one dense array per layer.

`NoCache` is what training and the recomputation that checks the demo use. `DenseCache` is what a
serving loop without paging would keep, and what the benchmark compares kvpool with.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tiny_model import Config, attention


def step_tokens(lengths: jax.Array, num_tokens: jax.Array, width: int):
    """Positions i32[S, width] and validity bool[S, width] of a step after `lengths` tokens."""
    steps = jnp.arange(width, dtype=jnp.int32)
    return lengths[:, None] + steps, steps < num_tokens[:, None]


def sees(q_positions: jax.Array, k_positions: jax.Array, window: int | None) -> jax.Array:
    """bool[S, T, Lk]: which keys, of positions i32[S, Lk] with -1 for none, a query may see."""
    distance = q_positions[:, :, None] - k_positions[:, None, :]
    mask = (distance >= 0) & (k_positions >= 0)[:, None, :]
    return mask if window is None else mask & (distance < window)


class NoCache:
    """The whole sequence in one step: keys and values are those at hand, states start at zero."""

    def __init__(self, config: Config, rows: int, width: int, parallel: bool = False):
        self.config, self.parallel = config, parallel
        empty, full = jnp.zeros(rows, jnp.int32), jnp.full(rows, width, jnp.int32)
        self.positions, self.valid = step_tokens(empty, full, width)

    def attend(self, layer, q, k, v):
        """Causal attention over the step's own keys; see `tiny_model.Memory`."""
        k, v = k.astype(self.config.cache_dtype), v.astype(self.config.cache_dtype)
        window = self.config.window
        if self.config.pattern[layer] == "full":
            return attention(q, k, v, sees(self.positions, self.positions, None))
        if q.shape[1] % window:
            return attention(q, k, v, sees(self.positions, self.positions, window))
        return _banded(q, k, v, window)

    def read_state(self, layer):
        """Zeros: there is no past."""
        shapes = self.config.state_shapes.items()
        rows = self.positions.shape[0]
        return {name: jnp.zeros((rows, *shape), dtype) for name, (shape, dtype) in shapes}

    def write_state(self, layer, state):
        """Nothing comes after the step, so nothing is kept."""


def _banded(q, k, v, window):
    """Sliding-window attention of whole sequences, a window's queries at a time: each sees its
    own stretch and the one before, so the cost is T * 2W and not T * T."""
    rows, width = q.shape[:2]

    def stretches(x):
        return x.reshape(rows, width // window, window, *x.shape[2:])

    def with_previous(x):
        x = stretches(x)
        before = jnp.pad(x[:, :-1], ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2))
        x = jnp.concatenate([before, x], axis=2)
        return x.reshape(-1, *x.shape[2:])

    at = jnp.arange(2 * window) - window
    first = jnp.arange(width // window) == 0
    k_positions = jnp.where(first[:, None] & (at < 0), -window - 1, at)
    distance = at[window:, None] - k_positions[:, None, :]
    mask = jnp.tile((distance >= 0) & (distance < window), (rows, 1, 1))
    q = stretches(q).reshape(-1, window, *q.shape[2:])
    out = attention(q, with_previous(k), with_previous(v), mask)
    return out.reshape(rows, width, *out.shape[2:])


class DenseCache:
    """One array per layer, preallocated for every row and updated in place.

    Keys and values lie as `[S, H, length, D]`, the order in which attention multiplies them. Full
    layers keep `max_len` places. Window layers keep a ring for the window and one step: what
    position p wrote lies at `p % ring`, and is overwritten once nobody can see it.
    """

    parallel = False

    def __init__(self, config: Config, arrays: dict, num_tokens: jax.Array, width: int):
        """`arrays` as from `DenseCache.zeros`, num_tokens i32[S] of the step's `width` tokens."""
        self.config, self.arrays = config, dict(arrays)
        self.positions, self.valid = step_tokens(arrays["lengths"], num_tokens, width)
        self.arrays["lengths"] = arrays["lengths"] + num_tokens

    @staticmethod
    def zeros(config: Config, rows: int, max_len: int, max_step: int) -> dict:
        """Empty arrays: {"lengths": i32[S], layer: {name: [S, ...]}}. A step may be as wide as
        `max_step` tokens."""
        arrays: dict = {"lengths": jnp.zeros(rows, jnp.int32)}
        for layer, kind in enumerate(config.pattern):
            length = max_len if kind == "full" else min(max_len, config.window + max_step - 1)
            entry = ((config.kv_heads, length, config.head_dim), config.cache_dtype)
            entries = config.state_shapes if kind == "recurrent" else {"k": entry, "v": entry}
            arrays[str(layer)] = {
                name: jnp.zeros((rows, *shape), dtype) for name, (shape, dtype) in entries.items()
            }
        return arrays

    def attend(self, layer, q, k, v):
        """Keep the step's keys and values, then attend to what the array holds."""
        self.put(layer, k, v)
        return self.look(layer, q)

    def put(self, layer, k, v):
        """Put the keys and values of the step's valid tokens in their places."""
        kept = self.arrays[str(layer)]
        length = kept["k"].shape[2]
        rows = jnp.arange(k.shape[0])[:, None]
        slots = jnp.where(self.valid, self.positions % length, length)
        self.arrays[str(layer)] = {
            name: kept[name].at[rows, :, slots].set(x.astype(kept[name].dtype), mode="drop")
            for name, x in (("k", k), ("v", v))
        }

    def look(self, layer, q):
        """Attention of the step's queries over what the layer's array holds."""
        k, v = (jnp.swapaxes(self.arrays[str(layer)][name], 1, 2) for name in ("k", "v"))
        window = None if self.config.pattern[layer] == "full" else self.config.window
        mask = sees(self.positions, self._key_positions(k.shape[1]), window)
        return attention(q, k, v, mask)

    def _key_positions(self, length: int) -> jax.Array:
        """i32[S, length]: the newest position that each place of a ring was written at."""
        newest = self.arrays["lengths"][:, None] - 1
        at = newest - (newest - jnp.arange(length)) % length
        return jnp.where(at >= 0, at, -1)

    def read_state(self, layer):
        """The layer's arrays as they are; rows start with zeros in them."""
        return self.arrays[str(layer)]

    def write_state(self, layer, state):
        """Replace the layer's arrays; padding left its rows as they were."""
        self.arrays[str(layer)] = state
