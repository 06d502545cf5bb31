"""What a caller names and gives for a layer: where its region lives, and the region's values."""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvpool import indices
from kvpool.group import Group
from kvpool.indices import NULL_BLOCK
from kvpool.spec import CacheSpec
from kvpool.status import SpecError


def locate(spec: CacheSpec, layer, tag: str | None):
    """(group index, index of the layer in the group as i32[]).

    Args:
      layer: an integer, or a traced i32[] as a scan over layers gives it.
      tag: which of the layer's regions. With a traced layer it must mean one and the same group
        in every layer that has it; a layer that lacks it has the index NULL.

    Raises:
      SpecError: for a pair that does not exist, or a traced layer whose tag means several groups.
      ValueError: for a layer that is no integer.
    """
    if isinstance(layer, jax.core.Tracer):
        if layer.shape or not jnp.issubdtype(layer.dtype, jnp.integer):
            raise ValueError(f"layer: wanted i32[], got {layer.dtype}{list(layer.shape)}")
        group, index_of = _members(spec, tag)
        return group, indices.take(jnp.asarray(index_of), layer.astype(jnp.int32), NULL_BLOCK)
    try:
        layer = layer.__index__()
    except (AttributeError, TypeError) as error:
        raise ValueError(f"layer: wanted an integer, got {layer!r}") from error
    name, index = spec.resolve(layer, tag)
    return spec.group_index(name), np.int32(index)


@functools.lru_cache(maxsize=1024)
def _members(spec: CacheSpec, tag: str | None) -> tuple[int, np.ndarray]:
    """(group index, i32[layers]: each layer's index in it, NULL where the layer lacks the tag)."""
    index_of = np.full(len(spec.layers), NULL_BLOCK, np.int32)
    names = []
    for layer in range(len(spec.layers)):
        try:
            name, index_of[layer] = spec.resolve(layer, tag)
        except SpecError:
            continue
        names.append(name)
    if not names:
        spec.resolve(0, tag)  # raises, naming the pairs that exist
    if len(set(names)) > 1:
        raise SpecError(
            f"a traced layer with tag {tag!r} must mean one group, got "
            f"{', '.join(sorted(set(names)))}; give a tag, or scan over the layers of one group"
        )
    return spec.group_index(names[0]), index_of


def payload(
    group: Group, values: Mapping, lead: tuple[int, ...], any_width: bool = False
) -> tuple[jax.Array, ...]:
    """The arrays of the payload's buffers in their order, [*lead, *entry] each.

    Args:
      values: {buffer: array}, in the dtypes of `Region.values`.
      lead: the leading axes wanted.
      any_width: whether one more axis follows them, of any size but the same for all buffers.

    Raises:
      ValueError: for missing or unknown buffers, wrong shapes or dtypes.
    """
    buffers = group.region.values
    names = [buffer.name for buffer in buffers]
    if not isinstance(values, Mapping) or set(values) != set(names):
        got = ", ".join(map(str, values)) if isinstance(values, Mapping) else type(values).__name__
        raise ValueError(f"values: wanted the buffers {', '.join(names)}, got {got}")
    if any_width:
        lead = (*lead, *np.shape(values[names[0]])[len(lead) : len(lead) + 1])
    return tuple(
        checked(f"values[{b.name!r}]", values[b.name], (*lead, *b.shape), b.numpy_dtype)
        for b in buffers
    )


def as_words(data, word: np.dtype):
    """Words u[K, W] of another width as those of `word`; anything else is left as it is."""
    dtype = np.dtype(getattr(data, "dtype", object))
    if dtype.kind != "u" or dtype == word or np.ndim(data) != 2:
        return data
    if isinstance(data, np.ndarray):
        fits = data.shape[1] * dtype.itemsize % word.itemsize == 0
        return np.ascontiguousarray(data).view(word) if fits else data
    ratio = word.itemsize // dtype.itemsize
    if ratio > 1 and data.shape[1] % ratio:
        return data
    split = data.reshape(data.shape[0], -1, ratio) if ratio > 1 else data
    return jax.lax.bitcast_convert_type(split, word).reshape(data.shape[0], -1)


def checked(name: str, value, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """`value` as a jax array; ValueError naming got and wanted unless shape and dtype are these."""
    value = value if hasattr(value, "dtype") else np.asarray(value)
    if value.dtype != dtype or value.shape != shape:
        raise ValueError(
            f"{name}: wanted {dtype.name}{list(shape)}, "
            f"got {np.dtype(value.dtype).name}{list(value.shape)}"
        )
    return jnp.asarray(value)
