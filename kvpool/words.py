"""Words: where the blocks of a group lie in its array, counted in unsigned words.

The word of an array is as wide as the narrowest dtype of the groups that live in it. A cast between
equal widths, or from a wider dtype, fuses with the move of the bits; a wider word would be put
together in a temporary array.
"""

import dataclasses
import functools
from collections.abc import Iterable

import jax
import numpy as np

from kvpool.buffers import Buffer
from kvpool.group import Group
from kvpool.plan import Plan

_WORDS: dict[int, np.dtype] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
}


@dataclasses.dataclass(frozen=True)
class Words:
    """The blocks of one group in its array u[N, W]; all sizes in words."""

    group: Group
    word: np.dtype
    array: int  # which of the storage's arrays
    slab: tuple[int, int] | None  # as pallas_kernels takes it

    def count(self, size: int) -> int:
        """Words of so many bytes."""
        return size // self.word.itemsize

    @property
    def block(self) -> int:
        """Of a block with all its layers."""
        return self.count(self.group.bytes_per_block)

    @property
    def layer(self) -> int:
        """From one layer of the group to the next."""
        return self.count(self.group.buffer_offsets[-1])

    @property
    def starts(self) -> tuple[int, ...]:
        """For each buffer its first word, counted from the layer's."""
        return tuple(map(self.count, self.group.buffer_offsets[:-1]))

    def buffers(self, layer) -> list[tuple[Buffer, jax.Array]]:
        """Each buffer with the word of a block at which it begins, i32[], for a layer i32[]."""
        base = layer * self.layer
        pairs = zip(self.group.region.buffers, self.starts, strict=True)
        return [(buffer, base + start) for buffer, start in pairs]


@functools.lru_cache(maxsize=1024)
def words_of(plan: Plan, group: int) -> Words:
    """The words of a group, by its number."""
    spec, array = plan.spec.groups[group], plan.array_of[group]
    word = word_of(plan, array)
    whole = plan.array_bytes[array] == spec.bytes_per_block
    slab = None if whole else (plan.per_row[group], spec.bytes_per_block // word.itemsize)
    return Words(spec, word, array, slab)


def word_of(plan: Plan, array: int) -> np.dtype:
    """The unsigned dtype of an array; its size divides every entry's bytes."""
    pairs = zip(plan.spec.groups, plan.array_of, strict=True)
    return narrowest([group for group, home in pairs if home == array])


def narrowest(groups: Iterable[Group]) -> np.dtype:
    """The unsigned dtype of an array for these groups."""
    return _WORDS[min(buffer.numpy_dtype.itemsize for g in groups for buffer in g.region.buffers)]
