"""The gated delta rule, one token after the other and in chunks.

A head's state S maps keys to values. Each token first lets the state fade, then moves what the
state answers for its key towards its value, then asks the state for its query:

    S <- exp(decay) S
    S <- S + beta k (v - k S)
    out = q S
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 64  # tokens of a chunk in the parallel form


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    state: jax.Array,
    parallel: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Run T tokens of every row. All float32.

    q, k [S, T, H, Dk]; v [S, T, H, Dv]; decay (of the logarithm, <= 0) and beta [S, T, H];
    state [S, H, Dk, Dv]. Gives (out [S, T, H, Dv], the state after the last token). `parallel`
    takes the chunked form, for training; T must then be a multiple of CHUNK, else ValueError.
    """
    if parallel and q.shape[1] % CHUNK:
        raise ValueError(f"parallel form: T={q.shape[1]} is not a multiple of {CHUNK}")
    return (_chunked if parallel else _sequential)(q, k, v, decay, beta, state)


def _sequential(q, k, v, decay, beta, state):
    def token(state, inputs):
        q, k, v, decay, beta = inputs
        state = jnp.exp(decay)[..., None, None] * state
        answer = jnp.einsum("shk,shkv->shv", k, state)
        state = state + jnp.einsum("shk,shv->shkv", k, beta[..., None] * (v - answer))
        return state, jnp.einsum("shk,shkv->shv", q, state)

    inputs = (q, k, v, decay, beta)
    if q.shape[1] == 1:  # a decode step: no loop around a single token
        state, out = token(state, tuple(x[:, 0] for x in inputs))
        return out[:, None], state
    state, out = jax.lax.scan(token, state, tuple(jnp.moveaxis(x, 1, 0) for x in inputs))
    return jnp.moveaxis(out, 0, 1), state


def _chunked(q, k, v, decay, beta, state):
    """Inside a chunk the corrections u_t = beta_t (v_t - k_t S_t) solve a triangular system, so
    only the state at the chunks' borders is carried through a loop."""
    rows, steps, heads = decay.shape

    def chunks(x):  # [S, T, H, ...] -> [chunks, S, H, CHUNK, ...]
        x = x.reshape(rows, steps // CHUNK, CHUNK, heads, *x.shape[3:])
        return jnp.moveaxis(jnp.moveaxis(x, 3, 2), 1, 0)

    q, k, v, decay, beta = map(chunks, (q, k, v, decay, beta))
    total = jnp.cumsum(decay, axis=-1)
    # fade[t, i]: what is left at t of something written at i <= t.
    lower = jnp.tril(jnp.ones((CHUNK, CHUNK), bool))
    fade = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))
    overlap = jnp.einsum("cshtk,cshik->cshti", k, k) * fade
    ages = jnp.exp(total)[..., None]
    sides = beta[..., None] * jnp.concatenate([v, ages * k], axis=-1)
    solved = _inverse(overlap * beta[..., None]) @ sides
    own, past = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    looks = jnp.einsum("cshtk,cshik->cshti", q, k) * fade
    left = jnp.exp(total[..., -1:] - total)[..., None] * k

    def chunk(state, inputs):
        own, past, looks, q_aged, left, last = inputs
        u = own - past @ state
        out = q_aged @ state + looks @ u
        state = last[..., None, None] * state + jnp.swapaxes(left, -1, -2) @ u
        return state, out

    last = jnp.exp(total[..., -1])
    state, out = jax.lax.scan(chunk, state, (own, past, looks, ages * q, left, last))
    out = jnp.moveaxis(jnp.moveaxis(out, 0, 1), 2, 3)  # [S, chunks, CHUNK, H, Dv]
    return out.reshape(rows, steps, heads, -1), state


def _inverse(lower: jax.Array) -> jax.Array:
    """Inverse of 1 + the strictly lower part of f32[..., n, n], n a power of two, by blocks.

    With the diagonal blocks of side b inverted, X - X L X inverts those of side 2b, where L is
    what lies between two of them. Unlike a series in powers this does not cancel, and unlike a
    solver it is nothing but matrix products.
    """
    size = lower.shape[-1]
    at = jnp.arange(size)
    inverse, side = jnp.eye(size), 1
    while side < size:
        block = at // side
        between = (block[:, None] % 2 == 1) & (block[None, :] == block[:, None] - 1)
        inverse = inverse - inverse @ jnp.where(between, lower, 0.0) @ inverse
        side *= 2
    return inverse
