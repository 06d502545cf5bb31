"""Arrays for the tests of the operations: random bits of any dtype, and blocks that hold poison."""

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


def same_bits(got, wanted) -> bool:
    got, wanted = np.asarray(got), np.asarray(wanted)
    return (
        got.dtype == wanted.dtype
        and got.shape == wanted.shape
        and got.tobytes() == wanted.tobytes()
    )
