"""Words: how the bytes of a group's blocks are counted in unsigned words.

The word of a group is as wide as its narrowest dtype. A cast between equal widths, or from a wider
dtype, fuses with the move of the bits; a wider word would be put together in a temporary array.
"""

import jax
import numpy as np

from kvpool.buffers import Buffer
from kvpool.group import Group

_WORDS: dict[int, np.dtype] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
}


def word_of(group: Group) -> np.dtype:
    """The unsigned dtype of the group's block array; its size divides every entry's bytes."""
    return _WORDS[min(buffer.numpy_dtype.itemsize for buffer in group.region.buffers)]


def words_of_block(group: Group) -> int:
    """W of the group's block array u[N, W]."""
    return group.bytes_per_block // word_of(group).itemsize


def layer_words(group: Group) -> int:
    """Words from one layer of the group to the next."""
    return group.buffer_offsets[-1] // word_of(group).itemsize


def buffer_starts(group: Group) -> tuple[int, ...]:
    """For each buffer its first word, counted from the layer's."""
    return tuple(start // word_of(group).itemsize for start in group.buffer_offsets[:-1])


def buffers_of_layer(group: Group, layer) -> list[tuple[Buffer, jax.Array]]:
    """Each buffer with the word of a block at which it begins, i32[], for a layer i32[]."""
    base = layer * layer_words(group)
    starts = buffer_starts(group)
    return [(b, base + start) for b, start in zip(group.region.buffers, starts, strict=True)]
