"""The one place that indexes arrays by ids.

JAX wraps negative indices even in its drop mode, so an absent id (-1, or anything outside the
array) would read or overwrite the last element. These helpers first turn every id outside
`0..size-1` into `size`, which scatters drop and gathers fill.
"""

import jax
import jax.numpy as jnp

NULL_BLOCK = -1


def is_valid(ids: jax.Array, size: int | jax.Array) -> jax.Array:
    """Whether each id lies in 0..size-1."""
    return (ids >= 0) & (ids < size)


def drop_absent(ids: jax.Array, size: int, where=True) -> jax.Array:
    """`ids`, with `size` in the place of every id that is outside 0..size-1 or not `where`."""
    return jnp.where(is_valid(ids, size) & where, ids, size)


def take(array: jax.Array, ids: jax.Array, fill) -> jax.Array:
    """array[ids] along axis 0, `fill` where the id is absent."""
    if array.shape[0] == 0:
        return jnp.full((*ids.shape, *array.shape[1:]), fill, array.dtype)
    return array.at[drop_absent(ids, array.shape[0])].get(mode="fill", fill_value=fill)


def put(array: jax.Array, ids: jax.Array, values, where=True) -> jax.Array:
    """array with array[ids] = values; absent ids and those not `where` write nothing."""
    return array.at[drop_absent(ids, array.shape[0], where)].set(values, mode="drop")


def add(array: jax.Array, ids: jax.Array, values, where=True) -> jax.Array:
    """array with array[ids] += values; absent ids and those not `where` add nothing."""
    return array.at[drop_absent(ids, array.shape[0], where)].add(values, mode="drop")


def lookup(values, index: jax.Array) -> jax.Array:
    """values[index] of a few `values`, by comparison: unlike a gather it fuses with its users."""
    found = jnp.zeros_like(index)
    for place in range(len(values)):
        found = jnp.where(index == place, jnp.asarray(values[place], found.dtype), found)
    return found


def first_naming(ids: jax.Array, size: int, where=True) -> jax.Array:
    """bool[R]: valid, `where`, and the first of its kind among `ids` i32[R]."""
    order = jnp.arange(ids.shape[0], dtype=jnp.int32)
    safe = drop_absent(ids, size, where)
    first = jnp.full(size, ids.shape[0], jnp.int32).at[safe].min(order, mode="drop")
    return (safe < size) & (take(first, ids, -1) == order)
