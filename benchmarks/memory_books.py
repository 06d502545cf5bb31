"""The books that `memory_replay` keeps: kvpool's own, and a model of them in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import kvpool as kv
from kvpool.held import Lengths, held_columns, lengths_after
from kvpool.needs import Groups, block_bytes, prefill_blocks


class KvBooks:
    """The verbs of kvpool, jitted; the state is given away and comes back changed."""

    def __init__(self, plan: kv.Plan):
        self.state = kv.init_state(plan.spec, plan)
        self.refused = {group.name: 0 for group in plan.spec.groups}  # entries, by what was short

    def decode(self, count, age, ends):
        """See `Books`."""
        arrays = (jnp.asarray(array, jnp.int32) for array in (count, age))
        self.state, kept = _decode(self.state, *arrays, jnp.asarray(ends))
        return np.asarray(kept)

    def enter(self, row, tokens, count):
        """See `Books`."""
        numbers = (jnp.asarray(number, jnp.int32) for number in (row, tokens, count))
        self.state, ok, shortfall = _enter(self.state, *numbers)
        if not ok:
            for name, short in shortfall.items():
                self.refused[name] += int(short) > 0
        return bool(ok)


@functools.partial(jax.jit, donate_argnums=0)
def _decode(state, count, age, ends):
    rows = jnp.arange(count.shape[0], dtype=jnp.int32)

    def without_newest(carry):
        state, count, _ = carry
        newest = jnp.argmax(jnp.where(count > 0, age, -1)).astype(jnp.int32)
        state = kv.release(state, newest[None])
        return try_to_reserve(state, count.at[newest].set(0))

    def try_to_reserve(state, count):
        state, result = kv.reserve(state, count, tail_only=True)
        return state, count, result.ok

    carry = try_to_reserve(state, count)
    state, count, _ = jax.lax.while_loop(lambda carry: ~carry[2], without_newest, carry)
    state = kv.advance(state, count)
    kept = count > 0
    return kv.release(state, jnp.where(kept & ends, rows, -1)), kept


@functools.partial(jax.jit, donate_argnums=0)
def _enter(state, row, tokens, count):
    rows = jnp.arange(count.shape[0], dtype=jnp.int32)
    state, result = kv.admit(state, row[None])

    def chunk(carry):
        state, _, _, done = carry
        step = jnp.minimum(tokens - done, state.plan.max_step_tokens)
        asked = jnp.where(rows == row, step, 0)
        state, result = kv.reserve(state, asked, tail_only=True)
        state = kv.advance(state, jnp.where(result.granted, asked, 0))
        return state, result.ok, result.shortfall, done + step

    carry = (state, result.ok, result.shortfall, jnp.int32(0))
    state, ok, shortfall, _ = jax.lax.while_loop(lambda c: c[1] & (c[3] < tokens), chunk, carry)
    # Only whether it would be granted counts: the state with the room is not used.
    _, result = kv.reserve(state, count, tail_only=True)
    shortfall = {
        name: jnp.where(ok, result.shortfall[name], short) for name, short in shortfall.items()
    }
    ok = ok & result.ok
    return kv.release(state, jnp.where(ok, -1, row)[None]), ok, shortfall


@functools.cache
class _Rows:
    """What rows hold, worked out once for all replays of a model."""

    def __init__(self, groups: Groups, chunk: int):
        self.groups = groups
        self.table = np.zeros((0, 0, len(groups)), np.int32)  # of each count and settled length
        self.prefill = functools.cache(
            lambda tokens: prefill_blocks(groups, tokens, chunk, tail_only=True)
        )

    def blocks(self, settled, count):
        """Blocks i64[S, G] of rows of settled i64[S] tokens with room for count i64[S] more."""
        counts, limit, _ = self.table.shape
        if count.max() >= counts or settled.max() >= limit:
            limit = max(limit, 1 << int(settled.max()).bit_length())
            lengths = Lengths.exactly(np.arange(limit))
            more = range(max(counts, int(count.max()) + 1))
            after = [lengths_after(self.groups, lengths, lengths.room + n, True) for n in more]
            held = [held_columns(self.groups, lengths).count.T for lengths in after]
            self.table = np.array(held, np.int32)
        return self.table[count, settled].astype(np.int64)


class ModelBooks:
    """The same from the arithmetic of what rows hold: no ids, no tables, only sums.

    Args:
      groups: a spec's.
      sizes: i64[P], blocks or bytes of each pool.
      weights: i64[P, G], what a block of each group takes of each pool.
    """

    def __init__(self, groups: Groups, sizes, weights, rows: int, chunk: int):
        self.of_rows = _Rows(groups, chunk)
        self.sizes, self.weights = np.asarray(sizes), np.asarray(weights)
        self.settled = np.zeros(rows, np.int64)
        self.used = self.next_used = np.zeros(len(self.sizes), np.int64)

    @classmethod
    def of(cls, plan: kv.Plan) -> "ModelBooks":
        """The pools of a plan, each of its own blocks."""
        weights = np.arange(len(plan.pool_sizes))[:, None] == np.array(plan.pool_of)
        sizes, rows, chunk = plan.pool_sizes, plan.max_seqs, plan.max_step_tokens
        return cls(plan.spec.groups, sizes, weights.astype(np.int64), rows, chunk)

    @classmethod
    def bound(cls, groups: Groups, budget: int, rows: int, chunk: int) -> "ModelBooks":
        """One pool of `budget` bytes."""
        return cls(groups, [budget], block_bytes(groups)[None], rows, chunk)

    def _with_room(self, settled, count):
        """What rows use, i64[P, S], once they have room for count i64[S] more tokens."""
        return self.weights @ self.of_rows.blocks(settled, count).T

    def decode(self, count, age, ends):
        """See `Books`."""
        order = np.argsort(np.where(count > 0, age, np.iinfo(np.int64).max))
        taken = np.cumsum(self._with_room(self.settled, count)[:, order], axis=1)
        fits = (taken <= self.sizes[:, None]).all(axis=0)
        kept = np.zeros_like(ends)
        kept[order] = fits & (count[order] > 0)
        self.settled = np.where(kept & ~ends, self.settled + count, 0)
        self.used = self._with_room(self.settled, np.zeros_like(count)).sum(axis=1)
        self.next_used = None
        return kept

    def enter(self, row, tokens, count):
        """See `Books`."""
        if self.next_used is None:
            others = np.where(self.settled > 0, count, 0)
            self.next_used = self._with_room(self.settled, others).sum(axis=1)
        tokens_twice, counts = np.array([tokens, tokens]), np.array([0, count[row]])
        rest, ready = self._with_room(tokens_twice, counts).T
        then = self.next_used + ready
        if (then > self.sizes).any():
            return False
        peak = self.weights @ self.of_rows.prefill(tokens)
        if (self.used[:, None] + peak > self.sizes[:, None]).any():
            return False
        self.settled[row], self.next_used = tokens, then
        self.used = self.used + rest
        return True
