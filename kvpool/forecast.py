"""Fits: can a request of this length run now, later, or never."""

import functools
import math
import operator
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvpool import arguments, block_pool
from kvpool.grants import outgrows
from kvpool.held import Held, Lengths, held_columns, lengths_after
from kvpool.plan import Plan
from kvpool.regions import CHUNK, quotient
from kvpool.room import missing_columns
from kvpool.state import State, by_pool, state_held
from kvpool.status import Status


def fits(state: State, num_tokens, keep_free: int | Mapping[str, int] = 0) -> jax.Array:
    """Judges rows one by one: would num_tokens more fit?  A free row counts as empty.

    Args:
      num_tokens: i32[S], of any length: what is beyond max_step_tokens is taken in such steps, or
        in smaller ones where such steps are more than all the memory.
      keep_free: blocks of every pool, or {group name: blocks} of some, that must stay free; pools
        that share slabs must then be able to get theirs all together.

    Returns:
      i32[S]: Status.OK; Status.LATER, blocks are short now; Status.NEVER, no sequence of steps
      gets there. A row at 0 tokens or less needs nothing and is OK. In an elastic cache LATER can
        also mean that blocks are free, but in slabs that others use: `compact` them.

    Raises:
      ValueError, SpecError: for num_tokens of another shape or kind, an unknown group.
    """
    num_tokens = arguments.int32("num_tokens", num_tokens, state.seq_lens.shape)
    return _fits(state, num_tokens, _kept(state.plan, keep_free))


def _kept(plan: Plan, keep_free) -> jax.Array:
    """Blocks of each pool that must stay free, i32[P]: the most that one of its groups asks."""
    if not isinstance(keep_free, Mapping):
        keep_free = {group.name: keep_free for group in plan.spec.groups}
    kept = jnp.zeros(len(plan.pool_sizes), jnp.int32)
    for name, blocks in keep_free.items():
        pool = plan.pool_of[plan.spec.group_index(name)]
        kept = kept.at[pool].max(arguments.int32("keep_free", blocks, ()))
    return kept


@jax.jit
def _fits(state, num_tokens, keep):
    plan = state.plan
    too_long = num_tokens > plan.max_seq_len - state.seq_lens
    target = state.seq_lens + jnp.where((num_tokens > 0) & ~too_long, num_tokens, 0)
    held = state_held(state)
    needs = _needs(plan, state.lengths, held, target, num_tokens)
    enough = block_pool.fit(state.pool, by_pool(plan, needs), keep)
    # However it gets there, a row of that length holds at least this.
    exact = held_columns(plan.spec.groups, Lengths.exactly(target)).count
    never = too_long | outgrows(plan, exact)
    if not plan.row_fits:  # steps of that size can be too much where smaller ones are not
        small = [exact, *(_writing(plan, *step) for step in _last_steps(state, target))]
        never |= _any(outgrows(plan, _at_least(plan, blocks, exact)) for blocks in small)
        short = (jnp.maximum(blocks - held.count, 0) for blocks in small)
        lacks = _any(~block_pool.fit(state.pool, by_pool(plan, blocks), keep) for blocks in short)
        enough = jnp.where(outgrows(plan, needs + held.count), ~lacks, enough)
    verdict = jnp.where(never, Status.NEVER, jnp.where(enough, Status.OK, Status.LATER))
    return jnp.where(num_tokens > 0, verdict, Status.OK).astype(jnp.int32)


def _needs(plan: Plan, lengths: Lengths, held: Held, target, num_tokens) -> jax.Array:
    """New blocks i32[G, R] for steps of the largest size."""
    lengths = lengths_after(plan.spec.groups, lengths, target, tail_only=False)
    in_one_step = missing_columns(held, held_columns(plan.spec.groups, lengths)).count
    needs = []
    for index, group in enumerate(plan.spec.groups):
        one_step = in_one_step[index]
        if not group.region.span:
            needs.append(one_step)
            continue
        bound = plan.blocks_per_row(group)
        columns = group.ceil_columns(target) - held.start[index]
        in_steps = jnp.maximum(jnp.minimum(columns, bound) - held.count[index], 0)
        needs.append(jnp.where(num_tokens > plan.max_step_tokens, in_steps, one_step))
    return jnp.stack(needs)


def _last_steps(state: State, target) -> list[tuple[jax.Array, jax.Array]]:
    """(settled, room) i32[R] of steps of one token on the way to `target`.

    A window holds the most when a token begins a block, a chunk when one ends it. An empty row may
    begin with a step of the largest size that leaves the windows' past out.
    """
    groups = state.plan.spec.groups
    start = jnp.where(state.seq_lens > 0, state.seq_lens, state.plan.max_step_tokens)
    sizes = {group.block_size for group in groups if group.region.span}
    chunks = {group.region.span for group in groups if group.region.kind == CHUNK}
    last = [quotient(target - 1, size) * size for size in sorted({*sizes, math.lcm(*sizes)})]
    last += [quotient(target, chunk) * chunk - 1 for chunk in sorted(chunks)]
    steps = []
    for settled in (start, *last):
        passes = (settled >= start) & (settled < target)
        steps.append((jnp.where(passes, settled, target), jnp.where(passes, settled + 1, target)))
    return steps


def _writing(plan: Plan, settled, room) -> jax.Array:
    """Blocks i32[G, R] of rows that have room beyond what is settled."""
    return held_columns(plan.spec.groups, Lengths(settled, room, room, room)).count


def _at_least(plan: Plan, blocks, exact) -> jax.Array:
    """`blocks` where no step can pass by: a chunk can begin, and W = 1 go on, with nothing held."""
    passable = [group.region.kind == CHUNK or group.region.span == 1 for group in plan.spec.groups]
    return jnp.where(np.array(passable)[:, None], exact, blocks)


def _any(conditions) -> jax.Array:
    return functools.reduce(operator.or_, conditions)
