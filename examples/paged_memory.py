"""The tiny model on kvpool: its memory, and the two jitted steps of a serving loop.

Both steps do the same to every row: reserve room, run the model on a view, settle. `chunk_step`
runs up to `width` known tokens of each row, so prompts and decoding rows share a dispatch;
`decode_steps` runs many one-token steps on the device before it comes back.
"""

from __future__ import annotations

import collections
import functools

import jax
import jax.numpy as jnp
from flax import nnx

import kvpool as kv
from memories import sees
from tiny_model import END, Config

NONE = -1  # the token of a row that chose none in a step
TRACES: collections.Counter[str] = collections.Counter()  # how often each step was traced


def cache_spec(config: Config, block_size: int = 16) -> kv.CacheSpec:
    """What the model's layers keep, as kvpool is told it."""
    heads = (config.kv_heads, config.head_dim)
    regions = {
        "full": kv.FullAttention(*heads, dtype=config.cache_dtype),
        "window": kv.SlidingWindow(config.window, *heads, dtype=config.cache_dtype),
        "recurrent": kv.RecurrentState(config.state_shapes),
    }
    layers = [regions[kind] for kind in config.pattern]
    return kv.CacheSpec.from_layers(layers, block_size=block_size)


class PagedMemory:
    """`tiny_model.Memory` on blocks, for one step of num_tokens i32[S] tokens a row."""

    parallel = False

    def __init__(self, config, spec, state, storage, num_tokens, width):
        self.config, self.spec, self.storage = config, spec, storage
        self.view = kv.step_view(state, num_tokens)
        steps = jnp.arange(width, dtype=jnp.int32)
        self.positions = state.seq_lens[:, None] + steps
        self.valid = steps < num_tokens[:, None]

    def attend(self, layer, q, k, v):
        """Write the step's keys and values, read the row's past with them, attend."""
        self.put(layer, k, v)
        return self.look(layer, q)

    def put(self, layer, k, v):
        """Write the keys and values of the step's valid tokens."""
        dtype = self.config.cache_dtype
        values = {"k": k.astype(dtype), "v": v.astype(dtype)}
        self.storage = kv.write(self.storage, self.view, layer, values)

    def look(self, layer, q):
        """Attention of the step's queries over the row's past and the step's own tokens."""
        full = self.config.pattern[layer] == "full"
        window = None if full else self.config.window
        # A window's blocks for steps of this width; the plan's bound is for the widest step.
        most = None if full else -(-(window + q.shape[1] - 2) // self.spec.block_size) + 1
        past = self.past(layer, most)
        at = self.view.key_positions(self.spec.resolve(layer)[0], max_blocks=most)
        return attention_in_place(q, past["k"], past["v"], sees(self.positions, at, window))

    def past(self, layer, most):
        """The keys and values of the row's past and the step, of `most` blocks a row."""
        return kv.read(self.storage, self.view, layer, max_blocks=most)[0]

    def read_state(self, layer):
        """The layer's state at each row's settled length."""
        return kv.read_state(self.storage, self.view, layer)

    def write_state(self, layer, state):
        """The layer's state at the length that each row advances to."""
        self.storage = kv.write_state(self.storage, self.view, layer, state)


def attention_in_place(q, k, v, mask):
    """`tiny_model.attention`, of keys and values multiplied in the order in which they lie.

    To bring the heads before the tokens would copy all that was read, which costs a decode step
    more than its attention. So each query is set among zeros for the other heads: H times the
    multiplications, the same sums.
    """
    rows, steps, heads, size = q.shape
    kv_heads, head = k.shape[2], jnp.eye(k.shape[2])
    k, v = (x.astype(jnp.float32).reshape(rows, -1, kv_heads * size) for x in (k, v))
    q = q.reshape(rows, steps, kv_heads, -1, size) * size**-0.5
    q = jnp.einsum("sthgd,hi->sthgid", q, head).reshape(rows, steps * heads, -1)
    scores = jnp.einsum("snc,slc->snl", q, k).reshape(rows, steps, heads, -1)
    scores = jnp.where(mask[:, :, None], scores, -1e30)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = (weights / weights.sum(axis=-1, keepdims=True)).reshape(rows, steps * heads, -1)
    out = jnp.einsum("snl,slc->snc", weights, v)
    out = out.reshape(rows, steps, kv_heads, -1, kv_heads, size)
    return jnp.einsum("sthgid,hi->sthgd", out, head).reshape(rows, steps, heads, size)


@functools.partial(
    jax.jit, static_argnames=("graph", "spec", "memory"), donate_argnames=("state", "storage")
)
def chunk_step(
    graph, spec, params, state, storage, tokens, counts, chooses, sampling, memory=PagedMemory
):
    """Run counts i32[S] of tokens i32[S, width] of each row, on a memory of that class.

    Rows that `chooses` bool[S] get their next token; one that chose END is released. Gives
    (state, storage, granted bool[S], chosen i32[S]); a row that was refused ran nothing, and a
    row that chose no token has NONE.
    """
    TRACES["chunk_step"] += 1
    model = nnx.merge(graph, params)
    return _step(model, spec, state, storage, tokens, counts, chooses, sampling, memory)


@functools.partial(
    jax.jit,
    static_argnames=("graph", "spec", "steps", "memory"),
    donate_argnames=("state", "storage"),
)
def decode_steps(
    graph, spec, params, state, storage, last, left, sampling, steps, memory=PagedMemory
):
    """Run `steps` steps of one token on rows that may still choose left i32[S] tokens.

    last i32[S] is each row's newest token, not yet in the cache. A row that is done releases its
    blocks to the others at once; one that is refused tries again in the next step. Gives (state,
    storage, chosen i32[steps, S]), NONE where a row ran nothing.
    """
    TRACES["decode_steps"] += 1
    model = nnx.merge(graph, params)

    def body(carry, _):
        state, storage, last, left = carry
        asked = left > 0
        counts = asked.astype(jnp.int32)
        state, storage, granted, chosen = _step(
            model, spec, state, storage, last[:, None], counts, asked, sampling, memory
        )
        last = jnp.where(granted, chosen, last)
        left = jnp.where(granted, jnp.where(chosen == END, 0, left - 1), left)
        state = kv.release(state, jnp.where(granted & (left == 0), jnp.arange(left.size), -1))
        return (state, storage, last, left), chosen

    (state, storage, _, _), chosen = jax.lax.scan(body, (state, storage, last, left), length=steps)
    return state, storage, chosen


def _step(model, spec, state, storage, tokens, counts, chooses, sampling, memory):
    state, result = kv.reserve(state, counts, each=True)
    granted = result.granted
    counts = jnp.where(granted, counts, 0)
    past = memory(model.config, spec, state, storage, counts, tokens.shape[1])
    hidden = model(tokens, past)
    newest = jnp.maximum(counts - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, newest, axis=1)[:, 0]
    token = choose(model.logits(hidden), state.seq_lens + counts, *sampling)
    token = jnp.where(granted, token, NONE)
    # Settling depends on the token chosen, so XLA sees that the tables are read before they
    # change; counts alone would cost a copy of the tables in every step of a scan.
    state = kv.advance(state, jnp.where(token == NONE, 0, counts))
    return state, past.storage, granted, jnp.where(chooses, token, NONE)


def choose(logits, positions, requests, seed, temperature):
    """The next token i32[S] from f32[S, vocab]: the best at temperature 0, else a sample.

    The noise is that of (seed, request, position), so a token does not depend on the row, the
    step or the preemptions that a request went through.
    """

    def noise(request, position):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), request), position)
        return jax.random.gumbel(key, logits.shape[-1:])

    drawn = jax.vmap(noise)(requests, positions)
    return jnp.argmax(logits + temperature * drawn, axis=-1).astype(jnp.int32)
