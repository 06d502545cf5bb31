"""The same bytes in wider words: what the kernels count in."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ALIGNMENT = 16  # bytes; what a bulk copy asks of addresses and sizes


@dataclasses.dataclass(frozen=True)
class View:
    """Words of `unit` bytes."""

    unit: int
    is_bulk: bool  # whether every place and size is a multiple of 16 bytes

    @classmethod
    def of(cls, blocks: jax.Array, *sizes: int) -> "View":
        """The widest that counts the block's bytes and these sizes, given in words of `blocks`."""
        word = blocks.dtype.itemsize
        divisor = math.gcd(ALIGNMENT, *(size * word for size in (blocks.shape[1], *sizes)))
        return cls(min(divisor, 4), divisor == ALIGNMENT)

    @property
    def dtype(self) -> np.dtype:
        """The unsigned dtype of a word."""
        return np.dtype(f"uint{8 * self.unit}")

    def words(self, size: int, dtype) -> int:
        """Words of `size` elements."""
        return size * np.dtype(dtype).itemsize // self.unit

    def to_words(self, values: jax.Array, axes: int = 1) -> jax.Array:
        """Values [*lead, ...] as u[*lead, W]: the same bytes, which XLA on a GPU does not move."""
        lead, size = values.shape[:axes], math.prod(values.shape[axes:])
        width = self.words(size, values.dtype)
        narrow = max(1, self.unit // values.dtype.itemsize)
        split = (*lead, width, narrow) if narrow > 1 else (*lead, size)
        # As words of their own first: a CPU moves bfloat16 by way of float32 and loses NaN bits.
        values = lax.bitcast_convert_type(values, f"uint{8 * values.dtype.itemsize}")
        return lax.bitcast_convert_type(values.reshape(split), self.dtype).reshape(*lead, width)

    def from_words(self, words: jax.Array, shape: tuple[int, ...], dtype) -> jax.Array:
        """u[*lead, W] as [*lead, *shape] of `dtype`."""
        lead, dtype = words.shape[:-1], np.dtype(dtype)
        wide = max(1, dtype.itemsize // self.unit)
        split = (*lead, words.shape[-1] // wide, wide) if wide > 1 else words.shape
        return lax.bitcast_convert_type(words.reshape(split), dtype).reshape(*lead, *shape)


@dataclasses.dataclass(frozen=True)
class Places:
    """Where blocks lie: `per_row` of `width` words in a row of an array of `count` blocks."""

    count: int
    per_row: int
    width: int

    @classmethod
    def of(cls, blocks: jax.Array, slab: tuple[int, int] | None, view: View) -> "Places":
        """Of an array u[N, W] that is not widened yet; the width is in words of the view."""
        per_row, width = slab or (1, blocks.shape[1])
        scale = view.unit // blocks.dtype.itemsize
        return cls(blocks.shape[0] * per_row, per_row, width // scale)

    def has(self, block):
        """Whether the id is one of a block."""
        return (block >= 0) & (block < self.count)

    def at(self, block):
        """(row of the array, first word in it) of a block that is there."""
        if self.per_row == 1:
            return block, 0
        return lax.div(block, self.per_row), lax.rem(block, self.per_row) * self.width


def scalar(value) -> jax.Array:
    """i32[1]: a number that the kernel reads, so that one kernel serves every layer."""
    return jnp.asarray(value, jnp.int32).reshape(1)
