"""Fits: can a request of this length run now, later, or never."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from kvpool import arguments, block_pool
from kvpool.grants import outgrows
from kvpool.held import Lengths, held_columns, lengths_after
from kvpool.plan import Plan
from kvpool.room import missing_columns
from kvpool.state import State, by_pool, state_held
from kvpool.status import Status


def fits(state: State, num_tokens, keep_free: int | Mapping[str, int] = 0) -> jax.Array:
    """Judges rows one by one: would num_tokens more fit?  A free row counts as empty.

    Args:
      num_tokens: i32[S], of any length: what is beyond max_step_tokens is taken in such steps.
      keep_free: blocks of every pool, or {group name: blocks} of some, that must stay free; pools
        that share slabs must then be able to get theirs all together.

    Returns:
      i32[S]: Status.OK; Status.LATER, blocks are short now; Status.NEVER, no sequence of steps
      gets there. A row at 0 tokens or less needs nothing and is OK.

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
    groups = plan.spec.groups
    lengths = lengths_after(groups, state.lengths, target, tail_only=False)
    in_one_step = missing_columns(held, held_columns(groups, lengths)).count
    needs = []
    for index, group in enumerate(groups):
        one_step = in_one_step[index]
        if not group.region.span:
            needs.append(one_step)
            continue
        bound = plan.blocks_per_row(group)
        columns = group.ceil_columns(target) - held.start[index]
        in_steps = jnp.maximum(jnp.minimum(columns, bound) - held.count[index], 0)
        needs.append(jnp.where(num_tokens > plan.max_step_tokens, in_steps, one_step))
    later = ~block_pool.fit(state.pool, by_pool(plan, jnp.stack(needs)), keep)
    # However it gets there, a row of that length holds at least this.
    never = too_long | outgrows(plan, held_columns(groups, Lengths.exactly(target)).count)
    verdict = jnp.where(never, Status.NEVER, jnp.where(later, Status.LATER, Status.OK))
    return jnp.where(num_tokens > 0, verdict, Status.OK).astype(jnp.int32)
