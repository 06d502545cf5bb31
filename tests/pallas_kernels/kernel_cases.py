"""Arrays for the tests of the operations: random bits of any dtype, and blocks that hold poison."""

import dataclasses

import ml_dtypes
import numpy as np

FLOAT8 = ("e4m3fn", "e5m2", "e4m3b11fnuz", "e4m3fnuz", "e5m2fnuz")
INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32")
DTYPES = ("float32", "bfloat16", "float16", *(f"float8_{name}" for name in FLOAT8), *INTEGERS)
WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32}
OUTSIDE = (-1, -9, 2**31 - 1, -(2**31))


def dtype_of(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def word_of(name: str) -> np.dtype:
    return np.dtype(WORDS[dtype_of(name).itemsize])


def narrower_words(name: str) -> list[np.dtype]:
    """The words that values of a dtype can be stored in: as wide as it, or narrower."""
    return [np.dtype(WORDS[n]) for n in WORDS if n <= dtype_of(name).itemsize]


def random_bits(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values of every bit pattern: NaNs with payloads, infinities, subnormals, minus zero."""
    word = word_of(name)
    bits = np.random.default_rng(seed).integers(0, 2 ** (8 * word.itemsize), shape, dtype=word)
    return bits.view(dtype_of(name))


def poisoned(count: int, size: int, word) -> np.ndarray:
    """u[count, size] of all-one bits: NaN in every float dtype that has one."""
    return np.full((count, size), np.iinfo(word).max, word)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Blocks to a row of the array, and words behind the last of them that belong to no block."""

    per_row: int = 1
    spare: int | None = None  # None: a row is a block, and no slab is named

    def __str__(self):
        return f"{self.per_row} and {self.spare}" if self.is_slab else "a row"

    @property
    def is_slab(self) -> bool:
        return self.spare is not None

    def width(self, size: int, word) -> int:
        """Words of a block that has `size`: blocks in slabs are multiples of 16 bytes."""
        each = 16 // np.dtype(word).itemsize
        return -(-size // each) * each if self.is_slab else size

    def slab(self, width: int) -> tuple[int, int] | None:
        """The option of the operations, for blocks of so many words."""
        return (self.per_row, width) if self.is_slab else None

    def laid(self, blocks: np.ndarray) -> np.ndarray:
        """The array in which these blocks lie one after the other, with poison behind them."""
        rows = blocks.reshape(-1, self.per_row * blocks.shape[1])
        return np.concatenate([rows, poisoned(len(rows), self.spare or 0, blocks.dtype)], axis=1)


ROW = Layout()
SLABS = (Layout(1, 3), Layout(3, 16), Layout(11, 5))
# Every dtype, and every layout with words of 1, 2 and 4 bytes.
IN_SLABS = [(name, SLABS[number % len(SLABS)]) for number, name in enumerate(DTYPES)]
IN_SLABS += [("float32", SLABS[2])]


def same_bits(got, wanted) -> bool:
    got, wanted = np.asarray(got), np.asarray(wanted)
    return (
        got.dtype == wanted.dtype
        and got.shape == wanted.shape
        and got.tobytes() == wanted.tobytes()
    )
