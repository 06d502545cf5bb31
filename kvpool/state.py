"""State: the whole bookkeeping of a cache as one immutable pytree, and what it says of rows."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from kvpool import block_pool, indices, tables
from kvpool.block_pool import BlockPool
from kvpool.held import Held, Lengths, held_columns
from kvpool.plan import Plan
from kvpool.spec import CacheSpec
from kvpool.status import SpecError
from kvpool.tables import BlockTable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State:
    """S rows over the plan's groups and pools.

    The four lengths of a row are those of `Lengths`, of which its columns are a function.
    """

    seq_lens: jax.Array  # i32[S], settled tokens
    room: jax.Array  # i32[S], seq_lens <= solid <= tail <= room
    solid: jax.Array  # i32[S]
    tail: jax.Array  # i32[S]
    live: jax.Array  # bool[S], admitted and not released
    table: BlockTable
    pool: BlockPool
    faults: jax.Array  # i32[], sticky bits of status.Fault
    plan: Plan = dataclasses.field(metadata={"static": True})

    @property
    def lengths(self) -> Lengths:
        """The lengths that say which columns every row holds, each i32[S]."""
        return Lengths(self.seq_lens, self.room, self.solid, self.tail)


def init_state(spec: CacheSpec, plan: Plan, device=None) -> State:
    """A state whose rows and blocks are all free.

    Args:
      device: a jax Device or Sharding; None takes jax's default device. The CPU device is a good
        home for the bookkeeping of a cache on an accelerator.

    Raises:
      SpecError: when the plan was made for another spec.
    """
    check_plan(spec, plan)
    # An array for every leaf: a donated state must not name one buffer twice.
    rows = functools.partial(jnp.zeros, plan.max_seqs, jnp.int32)
    state = State(
        seq_lens=rows(),
        room=rows(),
        solid=rows(),
        tail=rows(),
        live=jnp.zeros(plan.max_seqs, bool),
        table=tables.init(plan.max_seqs, tuple(map(plan.columns, spec.groups))),
        pool=block_pool.init(
            plan.pool_sizes,
            plan.slabs,
            plan.pool_per_slab,
            may_lack=any(group.short_chunks for group in spec.groups),
        ),
        faults=jnp.zeros((), jnp.int32),
        plan=plan,
    )
    return jax.device_put(state, device)


def check_plan(spec: CacheSpec, plan: Plan) -> None:
    """SpecError unless the plan was made for this spec."""
    if plan.spec != spec:
        raise SpecError(
            f"plan: made for the spec {plan.spec.digest[:12]}, got the spec {spec.digest[:12]}"
        )


def table_of(state: State, group: str) -> jax.Array:
    """The block table of a group: i32[S, ceil(max_seq_len / B)], of a state group i32[S, 1].

    Column i holds the block of tokens [i*B, (i+1)*B), NULL_BLOCK where the row holds none.
    """
    return tables.of_group(state.table, state.plan.spec.group_index(group))


def free_blocks(state: State) -> dict[str, jax.Array]:
    """{group name: i32[]}, blocks that the group could still get if no other group got any.

    They are those of its pool that nobody holds. Where pools share slabs, they are the unused ones
    in the slabs of its pool and all those of the free slabs, which other groups count as well.
    """
    return per_group(state.plan, block_pool.free(state.pool))


def per_group(plan: Plan, values: jax.Array) -> dict[str, jax.Array]:
    """{group name: the value of its pool}, of values [P]."""
    pairs = zip(plan.spec.groups, plan.pool_of, strict=True)
    return {group.name: values[pool] for group, pool in pairs}


def put_lengths(state: State, rows: jax.Array, length) -> State:
    """Rows i32[R] settled at `length`, with room exactly to there; absent rows are skipped."""
    names = ("seq_lens", "room", "solid", "tail")
    put: dict[str, Any] = {name: indices.put(getattr(state, name), rows, length) for name in names}
    return dataclasses.replace(state, **put)


def state_held(state: State, rows=None) -> Held:
    """The columns [G, R] that rows i32[R] hold, None: all; an absent row holds nothing."""
    lengths = state.lengths
    if rows is not None:
        lengths = Lengths(*(indices.take(length, rows, 0) for length in lengths))
    return held_columns(state.plan.spec.groups, lengths)


def pool_of(plan: Plan, group: jax.Array) -> jax.Array:
    """The pool of each group index."""
    return indices.lookup(plan.pool_of, group)


def allocate_one_each(
    plan: Plan, pool: BlockPool, wanted: jax.Array
) -> tuple[BlockPool, jax.Array]:
    """A free block for each group and row that is `wanted` bool[G, R]: (pool, ids i32[G, R])."""
    which = jnp.broadcast_to(jnp.asarray(plan.pool_of, jnp.int32)[:, None], wanted.shape)
    pool, ids = block_pool.allocate(pool, which.reshape(-1), wanted.reshape(-1))
    return pool, ids.reshape(wanted.shape)


def by_pool(plan: Plan, counts: jax.Array) -> jax.Array:
    """[G, ...] counts per group summed into [P, ...] per pool."""
    if plan.pool_of == tuple(range(len(plan.pool_of))):
        return counts
    pools = jnp.arange(len(plan.pool_sizes))[:, None] == jnp.asarray(plan.pool_of)
    return jnp.tensordot(pools.astype(jnp.int32), counts, axes=1)
