"""A small hybrid language model over bytes: sliding-window, recurrent and full attention layers.

The model knows nothing about caches. Each layer talks to a `Memory` that is passed in with the
call: an attention layer hands over the step's queries, keys and values and gets the attention
output back; a recurrent layer reads its state and hands over the next one. What a memory keeps,
and where, is its own business, so the same weights run without a cache, on dense arrays, and on
kvpool's blocks.

Axes: S rows, T tokens of a step, Lk keys a query may see, H heads, D head size.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from delta_rule import delta_rule

END = 256  # closes a document
BEGIN = 257  # opens a document
WEIGHTS = Path(__file__).with_name("tiny_model.safetensors")


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model. The defaults are those of the weights beside this file."""

    vocab_size: int = 260
    hidden: int = 128
    mlp_hidden: int = 304
    query_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    window: int = 64  # the query itself counts
    conv_taps: int = 4
    pattern: tuple[str, ...] = ("window", "window", "recurrent", "full") * 2
    context: int = 512  # longest sequence seen in training
    cache_dtype: str = "float32"  # of stored keys and values

    @property
    def conv_channels(self) -> int:
        """Channels of the short convolution: queries, keys and values of the recurrent layer."""
        return 3 * self.query_heads * self.head_dim

    @property
    def state_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """What one recurrent layer keeps of the past: {name: (shape of a row's entry, dtype)}."""
        return {
            "ssm": ((self.query_heads, self.head_dim, self.head_dim), "float32"),
            "conv": ((self.conv_taps - 1, self.conv_channels), "float32"),
        }


class Memory(Protocol):
    """The past of every row, as the layers see it during one step."""

    positions: jax.Array  # i32[S, T], of the step's tokens
    valid: jax.Array  # bool[S, T], False for padding at the end of a row's step
    parallel: bool  # whether recurrent layers may use the chunked form

    def attend(self, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """Keep k, v f32[S, T, Hkv, D]; attend from q f32[S, T, Hq, D]; give f32[S, T, Hq, D]."""

    def read_state(self, layer: int) -> dict[str, jax.Array]:
        """The layer's state before the step, {name: [S, ...]}; zeros for a row with no past."""

    def write_state(self, layer: int, state: dict[str, jax.Array]) -> None:
        """Keep the layer's state after the step's valid tokens."""


def attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Grouped-query attention in float32.

    q f32[S, T, Hq, D]; k, v [S, Lk, Hkv, D] of any float dtype; mask bool[S, T, Lk], True where
    the query may see the key. Gives f32[S, T, Hq, D]; a query that sees nothing gets the mean of
    what it was given, so padding never turns into NaN.
    """
    rows, steps, heads, size = q.shape
    k, v = (jnp.swapaxes(x, 1, 2).astype(jnp.float32) for x in (k, v))
    # Heads before tokens, so that no product has to transpose the scores.
    q = jnp.moveaxis(q.reshape(rows, steps, k.shape[1], -1, size), 1, 3) * size**-0.5
    scores = jnp.einsum("shgtd,shld->shgtl", q, k)
    scores = jnp.where(mask[:, None, None], scores, -1e30)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    out = jnp.einsum("shgtl,shld->shgtd", weights, v) / weights.sum(axis=-1, keepdims=True)
    return jnp.moveaxis(out, 3, 1).reshape(rows, steps, heads, size)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary position embedding of x f32[S, T, H, D] at positions i32[S, T]."""
    half = x.shape[-1] // 2
    rates = 10_000.0 ** (-jnp.arange(half) / half)
    angles = positions[..., None, None] * rates
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs, scale: float = 1.0) -> nnx.Linear:
    init = nnx.initializers.normal(scale * inputs**-0.5)
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


class AttentionLayer(nnx.Module):
    """Grouped-query attention with normalised queries and keys; the memory decides its reach."""

    def __init__(self, config: Config, index: int, rngs: nnx.Rngs):
        self.config, self.index = config, index
        kv = config.kv_heads * config.head_dim
        wide = config.query_heads * config.head_dim
        self.project = _linear(config.hidden, wide + 2 * kv, rngs)
        self.q_norm = nnx.RMSNorm(config.head_dim, rngs=rngs)
        self.k_norm = nnx.RMSNorm(config.head_dim, rngs=rngs)
        self.out = _linear(wide, config.hidden, rngs, scale=0.25)

    def __call__(self, x: jax.Array, memory: Memory) -> jax.Array:
        """x f32[S, T, hidden] -> f32[S, T, hidden]."""
        c = self.config
        heads = self.project(x).reshape(*x.shape[:2], -1, c.head_dim)
        q, k, v = jnp.split(heads, [c.query_heads, c.query_heads + c.kv_heads], axis=2)
        q = rotate(self.q_norm(q), memory.positions)
        k = rotate(self.k_norm(k), memory.positions)
        return self.out(memory.attend(self.index, q, k, v).reshape(*x.shape[:2], -1))


class RecurrentLayer(nnx.Module):
    """Gated delta rule behind a short causal convolution. Its state: "ssm" and "conv"."""

    def __init__(self, config: Config, index: int, rngs: nnx.Rngs):
        self.config, self.index = config, index
        wide = config.query_heads * config.head_dim
        self.project = _linear(config.hidden, config.conv_channels, rngs)
        self.rates = _linear(config.hidden, 2 * config.query_heads, rngs)
        self.gate = _linear(config.hidden, wide, rngs)
        taps = jax.random.normal(rngs.params(), (config.conv_taps, config.conv_channels))
        self.conv = nnx.Param(0.5 * taps)
        # Decay per token of each head at the start, from a memory of about 8 tokens to 256.
        lives = jnp.geomspace(8.0, 256.0, config.query_heads)
        self.decay_bias = nnx.Param(jnp.log(jnp.expm1(1.0 / lives)))
        self.norm = nnx.RMSNorm(config.head_dim, rngs=rngs)
        self.out = _linear(wide, config.hidden, rngs, scale=0.25)

    def __call__(self, x: jax.Array, memory: Memory) -> jax.Array:
        """x f32[S, T, hidden] -> f32[S, T, hidden]; padding leaves the state as it was."""
        c, steps = self.config, x.shape[1]
        state, valid = memory.read_state(self.index), memory.valid[..., None]
        inputs = jnp.concatenate([state["conv"], self.project(x)], axis=1)
        mixed = sum(inputs[:, i : i + steps] * tap for i, tap in enumerate(self.conv[...]))
        heads = jax.nn.silu(mixed).reshape(*x.shape[:2], 3, c.query_heads, c.head_dim)
        q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        decay, beta = jnp.split(self.rates(x), 2, axis=-1)
        # A padded position neither decays nor writes: log decay 0 and strength 0.
        decay = jnp.where(valid, -jax.nn.softplus(decay + self.decay_bias[...]), 0.0)
        beta = jnp.where(valid, jax.nn.sigmoid(beta), 0.0)
        out, ssm = delta_rule(_unit(q), _unit(k), v, decay, beta, state["ssm"], memory.parallel)
        memory.write_state(self.index, {"ssm": ssm, "conv": _tail(inputs, memory.valid, c)})
        gated = self.norm(out).reshape(*x.shape[:2], -1) * jax.nn.silu(self.gate(x))
        return self.out(gated)


def _unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _tail(inputs: jax.Array, valid: jax.Array, config: Config) -> jax.Array:
    """The last taps - 1 inputs up to each row's last valid token, f32[S, taps - 1, channels]."""
    first = jnp.sum(valid, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(config.conv_taps - 1)
    return jnp.take_along_axis(inputs, first[..., None], axis=1)


class Mlp(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.up = _linear(config.hidden, 2 * config.mlp_hidden, rngs)
        self.down = _linear(config.mlp_hidden, config.hidden, rngs, scale=0.25)

    def __call__(self, x: jax.Array) -> jax.Array:
        """x f32[..., hidden] -> f32[..., hidden]."""
        gate, value = jnp.split(self.up(x), 2, axis=-1)
        return self.down(jax.nn.silu(gate) * value)


class Layer(nnx.Module):
    """A mixer over time and an MLP, each normalised before and added to the stream."""

    def __init__(self, config: Config, index: int, rngs: nnx.Rngs):
        mixer = RecurrentLayer if config.pattern[index] == "recurrent" else AttentionLayer
        self.mixer_norm = nnx.RMSNorm(config.hidden, rngs=rngs)
        self.mixer = mixer(config, index, rngs)
        self.mlp_norm = nnx.RMSNorm(config.hidden, rngs=rngs)
        self.mlp = Mlp(config, rngs)

    def __call__(self, x: jax.Array, memory: Memory) -> jax.Array:
        """x f32[S, T, hidden] -> f32[S, T, hidden]."""
        x = x + self.mixer(self.mixer_norm(x), memory)
        return x + self.mlp(self.mlp_norm(x))


class TinyModel(nnx.Module):
    """The whole model. Its embedding also reads out the logits."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.config = config
        self.embed = nnx.Param(jax.random.normal(rngs.params(), (config.vocab_size, config.hidden)))
        self.layers = nnx.List([Layer(config, i, rngs) for i in range(len(config.pattern))])
        self.norm = nnx.RMSNorm(config.hidden, rngs=rngs)

    def __call__(self, tokens: jax.Array, memory: Memory) -> jax.Array:
        """tokens i32[S, T] -> hidden f32[S, T, hidden]. The memory takes what the layers keep."""
        x = self.embed[...][tokens]
        for layer in self.layers:
            x = layer(x, memory)
        return self.norm(x)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden f32[..., hidden] -> f32[..., vocab_size]."""
        return hidden @ self.embed[...].T * self.config.hidden**-0.5


def save(model: TinyModel, path: Path = WEIGHTS) -> None:
    """Write the weights as float16 under dotted names."""
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    names = {".".join(map(str, path)): value[...] for path, value in flat}
    save_file({name: np.asarray(value, np.float16) for name, value in names.items()}, path)


def load(path: Path = WEIGHTS, config: Config | None = None) -> TinyModel:
    """The model with the weights of `path`, computing in float32. Raises KeyError for a weight
    that the file lacks."""
    model = TinyModel(config or Config(), nnx.Rngs(0))
    stored = load_file(path)
    flat = nnx.to_flat_state(nnx.state(model, nnx.Param))
    for name, value in flat:
        value.set_value(jnp.asarray(stored[".".join(map(str, name))], jnp.float32))
    nnx.update(model, nnx.from_flat_state(flat))
    return model
