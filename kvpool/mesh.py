"""Mesh: a cache on many devices, blocks over one axis of their mesh and heads over another.

Every rank of the heads axis keeps its own heads of all layers in blocks of the same ids, so the
bookkeeping of a shard is the same on all its ranks and moves nothing between them. Over the blocks
axis there are two ways:

- per shard: every shard has rows and blocks of its own, D caches side by side. The plan is that of
  one shard, and everything a shard has gets an axis of shards in front: a state's arrays [D, ...],
  a result's, the tokens of a step.
- replicated: one set of rows, whose blocks lie on all shards, so that a row can be longer than a
  shard has memory for. Every device keeps the whole state and makes the same moves in it. The plan
  counts the blocks of all shards; see `kvpool.parts` for which lie where.

The block arrays are [D, M, rows, W] for D shards and M ranks.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from kvpool import plan_checks, words
from kvpool.buffers import heads_and_rows, share
from kvpool.parts import Part
from kvpool.plan import Plan
from kvpool.rules import PER_SHARD, REPLICATED, Rules
from kvpool.spec import CacheSpec
from kvpool.state import State, init_state
from kvpool.status import SpecError
from kvpool.storage import Storage
from kvpool.variants import per_rank


def init(
    spec: CacheSpec, plan: Plan, mesh: Mesh, rules: Rules | None = None
) -> tuple[State, Storage]:
    """(state, storage) on a mesh, all rows and blocks free; what `kvpool.init` does for a mesh.

    Raises:
      SpecError: see `check_plan`.
    """
    rules = Rules() if rules is None else rules
    shards, ranks = check_plan(spec, plan, mesh, rules)
    replicated = rules.bookkeeping == REPLICATED

    def state() -> State:
        one = init_state(plan.spec, plan)
        if replicated:
            return one
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (shards, *x.shape)), one)

    divided = shards if replicated else 1
    in_blocks = NamedSharding(mesh, rules.storage)
    arrays = []
    for array, (rows, size) in enumerate(zip(plan.array_rows, plan.array_bytes, strict=True)):
        word = words.word_of(plan, array)
        shape = (shards, ranks, rows // divided, size // word.itemsize)
        arrays.append(jnp.zeros(shape, word, device=in_blocks))
    part = None if rules.blocks is None or divided == 1 else Part(rules.blocks, divided)
    # XLA calls arrays without elements replicated, so that the first verb would change their place.
    specs = jax.tree.map(
        lambda x: rules.state if x.size else PartitionSpec(), jax.eval_shape(state)
    )
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=_is_spec)
    return jax.jit(state, out_shardings=places)(), Storage(tuple(arrays), plan, part)


def check_plan(spec: CacheSpec, plan: Plan, mesh: Mesh, rules: Rules) -> tuple[int, int]:
    """(shards, ranks) of a mesh for which the plan was made.

    Raises:
      SpecError: for axes that the mesh lacks, heads that its ranks cannot divide, a plan that was
        not made for a rank's part of the spec, blocks that its shards cannot divide.
    """
    shards, ranks = rules.sizes(mesh)
    try:
        of_rank = per_rank(spec, ranks)
    except SpecError as error:
        raise SpecError(
            f"mesh: axis {rules.heads!r} has {ranks} devices, but {error}; give a mesh with fewer "
            "there, or rules with heads=None to keep all heads on every device"
        ) from error
    if plan.spec != of_rank:
        whole = "the whole spec" if plan.spec == spec else f"the spec {plan.spec.digest[:12]}"
        raise SpecError(
            f"plan: made for {whole}, wanted it for what one of {ranks} ranks keeps; plan for "
            f"kvpool.per_rank(spec, {ranks}) and the memory of one device"
        )
    plan_checks.check_entries(plan)
    if rules.bookkeeping == REPLICATED:
        _check_shares(plan, rules, shards)
    return shards, ranks


def _check_shares(plan: Plan, rules: Rules, shards: int) -> None:
    """SpecError unless every shard has as many blocks and slabs as the others."""
    for group, array in zip(plan.spec.groups, plan.array_of, strict=True):
        rows = plan.array_rows[array]
        if rows % shards:
            what, more = "blocks", rows + -rows % shards
            cure = f"num_blocks of {more}"
            if array == plan.slab_array:
                what, cure = "slabs", f"budget_bytes of {more * plan.slab_bytes:,}"
            raise SpecError(
                f"plan: group {group.name} has {rows} {what}, which {shards} shards on axis "
                f"{rules.blocks!r} cannot divide; plan with {cure}"
            )


def on_mesh(
    function: Callable,
    mesh: Mesh,
    rules: Rules | None = None,
    in_specs=None,
    out_specs=None,
    check_vma: bool = True,
) -> Callable:
    """`function` on every device at once, each with its own part of what is given; jitted.

    Inside, a State is one shard's and a Storage one device's, as if there were no mesh: every verb
    takes them unchanged. It is a `jax.shard_map` over all axes of the mesh, so the function may use
    their collectives; the bookkeeping uses none. Make it once, e.g.
    `reserve = on_mesh(kv.reserve, mesh, rules)`: each call of `on_mesh` compiles anew.

    Args:
      function: of arrays and pytrees of them, by position; static arguments bound before.
      in_specs: for each argument a PartitionSpec or a tree of them, as `jax.shard_map` takes them.
        By default `rules.storage` for a Storage and `rules.state` for everything else. Under
        bookkeeping per shard, the first axis of what has a spec that begins with the blocks axis is
        the axis of shards and is not there inside; PartitionSpec() is for what all shards share.
      out_specs: the same of what the function returns.
      check_vma: as `jax.shard_map` has it: refuse what may differ between devices on which its spec
        says it is the same, such as blocks exported on every rank. False where that is known
        better, e.g. of tokens chosen from what all ranks gathered; `kvpool.check` then compares
        the copies of a state.

    Raises:
      SpecError: for rules that do not fit the mesh; at a call for a storage made for others, or
        what lacks the axis of shards.
    """
    rules = Rules() if rules is None else rules
    check = functools.partial(_check_axes, rules, rules.sizes(mesh))
    without_axes = functools.partial(_without_axes, rules)
    with_axes = functools.partial(_with_axes, rules)

    @jax.jit
    def everywhere(*args):
        specs = _specs_of(rules, args) if in_specs is None else in_specs
        _map(check, specs, args)
        if all(kind == AxisType.Explicit for kind in mesh.axis_types):
            args = _map(lambda spec, x: jax.reshard(x, NamedSharding(mesh, spec)), specs, args)

        def run(out_specs, finish, check_vma):
            def inside(*args):
                return finish(function(*_map(without_axes, specs, args)))

            mapped = jax.shard_map(
                inside, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma
            )
            return mapped(*args)

        outs = out_specs
        if outs is None:
            as_it_is = jax.eval_shape(lambda: run(PartitionSpec(), lambda out: out, False))
            outs = _specs_of(rules, as_it_is)
        return run(outs, lambda out: _map(with_axes, outs, out), check_vma)

    return everywhere


def own_heads(
    values: jax.Array, axis: int, rules: Rules | None = None, segments: Sequence = ()
) -> jax.Array:
    """Inside `on_mesh`, the heads of this rank, of values that have those of all along an axis.

    As in the plan for `per_rank`: an equal share in their order; where there are fewer heads than
    ranks one, which several ranks have.

    Args:
      segments: of the buffer that the values are for: the parts that are joined along the axis,
        each a number of rows or (heads, rows of a head), of which a rank has its share of each.

    Raises:
      SpecError: for heads that the ranks cannot divide, naming both; segments that are not as many
        rows as the axis has; outside of `on_mesh`.
    """
    name = (Rules() if rules is None else rules).heads
    if name is None:
        return values
    try:
        ranks = lax.axis_size(name)
    except NameError as error:
        raise SpecError(
            f"values: there is no mesh axis {name!r} here; call it inside `on_mesh`"
        ) from error
    parts, start = [], 0
    for heads, rows in map(heads_and_rows, segments or (values.shape[axis],)):
        own = share(heads, ranks)
        if own is None:
            raise SpecError(
                f"values: {heads} heads cannot be divided among {ranks} ranks on {name!r}"
            )
        first = start + lax.div(lax.axis_index(name) * heads, ranks) * rows
        parts.append(lax.dynamic_slice_in_dim(values, first, own * rows, axis))
        start += heads * rows
    if start != values.shape[axis]:
        raise SpecError(f"segments: {start} rows in all, wanted the {values.shape[axis]} of values")
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis)


def _specs_of(rules: Rules, tree):
    """By the type of what they are for."""
    return jax.tree.map(
        lambda x: rules.storage if _is_storage(x) else rules.state, tree, is_leaf=_is_storage
    )


def _map(change: Callable[[PartitionSpec, Any], Any], specs, tree):
    """change(spec, x) for every Storage and every array, of specs that are a prefix of the tree."""

    def under(spec, subtree):
        return jax.tree.map(functools.partial(change, spec), subtree, is_leaf=_is_storage)

    return jax.tree.map(under, specs, tree, is_leaf=_is_spec)


def _without_axes(rules: Rules, spec: PartitionSpec, value):
    axes = _axes(rules, spec, value)
    return jax.tree.map(lambda x: lax.squeeze(x, axes), value)


def _with_axes(rules: Rules, spec: PartitionSpec, value):
    axes = _axes(rules, spec, value)
    return jax.tree.map(lambda x: lax.expand_dims(x, axes), value)


def _check_axes(rules: Rules, sizes: tuple[int, int], spec: PartitionSpec, value) -> None:
    """SpecError unless a Storage or an array has the axes that it is to lose."""
    if _is_storage(value):
        divided = rules.bookkeeping == REPLICATED and sizes[0] > 1
        if value.blocks[0].shape[:2] != sizes or (value.part is not None) != divided:
            raise SpecError("storage: made for another mesh or other rules than those of `on_mesh`")
    elif _axes(rules, spec, value) and jnp.shape(value)[:1] != sizes[:1]:
        raise SpecError(
            f"arguments: wanted an axis of {sizes[0]} shards in front, got one of the shape "
            f"{list(jnp.shape(value))}; rules say bookkeeping {rules.bookkeeping!r}"
        )


def _axes(rules: Rules, spec: PartitionSpec, value) -> tuple[int, ...]:
    """The axes, of shards and of ranks, that are not there inside."""
    if _is_storage(value):
        return (0, 1)
    has_shards = rules.bookkeeping == PER_SHARD and len(spec) > 0 and spec[0] == rules.blocks
    return (0,) if has_shards else ()


def _is_spec(value) -> bool:
    return isinstance(value, PartitionSpec)


def _is_storage(value) -> bool:
    return isinstance(value, Storage)
