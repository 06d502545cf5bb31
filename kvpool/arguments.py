"""Turns what callers pass into i32 arrays of the right shape, or says what is wrong with it."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

_INT32 = np.iinfo(np.int32)


def int32(name: str, value, shape: tuple[int | None, ...]) -> jax.Array:
    """`value` as i32 of `shape`, where None is any size.

    Integers beyond int32 are clipped, so that they stay as absurd as they were.

    Raises:
      ValueError: naming the argument, got and wanted.
    """
    if isinstance(value, (int, float, list, tuple)):
        value = np.asarray(value)
        value = value.astype(np.int32) if value.size == 0 else value
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        got = type(value).__name__ if dtype is None else dtype
        raise ValueError(f"{name}: wanted integers, got {got}")
    matches = len(value.shape) == len(shape) and all(
        want is None or want == got for want, got in zip(shape, value.shape, strict=True)
    )
    if not matches:
        wanted = "[" + ", ".join("any" if n is None else str(n) for n in shape) + "]"
        raise ValueError(f"{name}: wanted i32{wanted}, got {dtype}{list(value.shape)}")
    if dtype != np.int32:
        value = (
            jnp.clip(value, _INT32.min, _INT32.max)
            if isinstance(value, jax.Array)
            else (np.clip(value, _INT32.min, _INT32.max))
        )
    return jnp.asarray(value, jnp.int32)


def rows_and_pads(name: str, value) -> jax.Array:
    """A list of rows, i32[R]; -1 pads."""
    return int32(name, value, (None,))


def ids_of_groups(name: str, value, spec) -> dict[str, jax.Array]:
    """{group: i32[K]}, all groups known."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: wanted {{group: ids}}, got {type(value).__name__}")
    for group in value:
        spec.group_index(group)
    return {group: int32(f"{name}[{group!r}]", ids, (None,)) for group, ids in value.items()}
