"""Buffers: the named arrays of a payload, and the scales of those that are quantised."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from kvpool.status import SpecError

_DTYPE_NAMES = (
    "float32 bfloat16 float16 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e4m3fnuz "
    "float8_e5m2fnuz int8 uint8 int16 uint16 int32 uint32"
)
_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in _DTYPE_NAMES.split(" ")}

TOKEN, BLOCK = "token", "block"
CODE_DTYPES = ("int8", "float8_e4m3fn", "float8_e5m2")  # what a region with scales quantises to
COMPUTE_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One named array of a payload: the shape of an entry, without a token axis, and its dtype.

    The scales of a quantised buffer are a buffer of their own, which says whose they are, and
    whether a block has one entry of them in all, in the place of one for every entry.

    `segments` are the parts that are joined along the first axis, such as the queries, keys and
    values of one convolution; () for one part. Each is (heads, rows of a head) and is cut between
    heads, or a number of rows, between any of which it may be cut. They say how the buffer is cut
    among ranks, and change nothing of what is kept, so they do not count where buffers are
    compared.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    scale_of: str | None = None
    per_block: bool = False
    segments: tuple[int | tuple[int, int], ...] = dataclasses.field(default=(), compare=False)

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype as numpy and jax take it."""
        return _DTYPES[self.dtype]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize

    def bytes_in_block(self, entries: int) -> int:
        """Bytes in a block of so many entries, without padding."""
        return self.entry_bytes * (1 if self.per_block else entries)


def buffers_of(buffers) -> tuple[Buffer, ...]:
    """The buffers that {name: (shape, dtype)} or a sequence of them describe, or SpecError."""
    if isinstance(buffers, Mapping):
        buffers = [_buffer(name, entry) for name, entry in buffers.items()]
    if not buffers or not all(isinstance(buffer, Buffer) for buffer in buffers):
        raise SpecError(f"buffers: wanted {{name: (shape, dtype)}}, at least one, got {buffers!r}")
    return tuple(buffers)


def with_scales(buffers: tuple[Buffer, ...], scales: str | None) -> tuple[Buffer, ...]:
    """The payload of `buffers`, and behind it the scales of those that are quantised.

    Raises:
      SpecError: where there is none, or a buffer leaves no place for its scales.
    """
    payload = [buffer for buffer in buffers if buffer.scale_of is None]
    if scales is None:
        return tuple(payload)
    quantised = [buffer for buffer in payload if buffer.dtype in CODE_DTYPES]
    if not quantised:
        got = ", ".join(f"{buffer.name} of {buffer.dtype}" for buffer in payload)
        raise SpecError(f"scales: wanted a dtype of {', '.join(CODE_DTYPES)}, got {got}")
    for buffer in quantised:
        if not buffer.shape:
            raise SpecError(f"scales: wanted an axis to scale, buffer {buffer.name!r} has none")
        if any(other.name == f"{buffer.name}_scale" for other in payload):
            raise SpecError(f"scales: wanted the name '{buffer.name}_scale', got it in the buffers")
    return (
        *payload,
        *(
            Buffer(f"{b.name}_scale", b.shape[:-1], "float32", b.name, scales == BLOCK)
            for b in quantised
        ),
    )


def compute_dtype_of(scales: str | None, compute_dtype) -> str | None:
    """The dtype's name, "bfloat16" where only scales are given, None without; or SpecError."""
    if scales not in (None, TOKEN, BLOCK):
        raise SpecError(f'scales: wanted None, "token" or "block", got {scales!r}')
    if scales is None:
        if compute_dtype is not None:
            raise SpecError(f"compute_dtype: wanted None without scales, got {compute_dtype!r}")
        return None
    found = "bfloat16" if compute_dtype is None else _name_of(compute_dtype)
    if found not in COMPUTE_DTYPES:
        raise SpecError(f"compute_dtype: wanted {', '.join(COMPUTE_DTYPES)}, got {found!r}")
    return found


def _buffer(name, entry) -> Buffer:
    if not isinstance(name, str) or not name:
        raise SpecError(f"buffers: wanted a non-empty name, got {name!r}")
    if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) not in (2, 3):
        raise SpecError(f"buffer {name!r}: wanted (shape of an entry, dtype), got {entry!r}")
    shape, dtype = entry[:2]
    if isinstance(shape, (int, np.integer)):
        raise SpecError(f"buffer {name!r}: wanted a shape as a tuple, got {shape!r}")
    sizes = tuple(positive(f"buffer {name!r}: size in shape {tuple(shape)}", n) for n in shape)
    segments = () if len(entry) == 2 else _segments(name, sizes, entry[2])
    return Buffer(name, sizes, dtype_name(f"buffer {name!r}", dtype), segments=segments)


def _segments(name, sizes, segments):
    where = f"buffer {name!r}: segment"
    if not isinstance(segments, Sequence) or isinstance(segments, str):
        raise SpecError(f"{where}s: wanted a tuple of rows or (heads, rows), got {segments!r}")
    parts = tuple(_segment(where, part) for part in segments)
    total = sum(heads * rows for heads, rows in map(heads_and_rows, parts))
    if parts and total != sum(sizes[:1]):
        raise SpecError(f"{where}s {parts} are {total} in all, wanted the first axis of {sizes}")
    return parts


def _segment(where: str, part):
    if not isinstance(part, Sequence):
        return positive(where, part)
    if isinstance(part, str) or len(part) != 2:
        raise SpecError(f"{where}: wanted rows or (heads, rows of a head), got {part!r}")
    heads, rows = part
    return positive(f"{where}: heads", heads), positive(f"{where}: rows", rows)


def heads_and_rows(segment: int | tuple[int, int]) -> tuple[int, int]:
    """(heads, rows of a head) of a segment; rows that may be cut anywhere are heads of one row."""
    return segment if isinstance(segment, tuple) else (segment, 1)


def dtype_name(where: str, dtype) -> str:
    """The name of a dtype given as text or as numpy and jax know it; SpecError for no such one."""
    found = _name_of(dtype)
    if found not in _DTYPES:
        raise SpecError(f"{where}: no dtype {found!r}; there are {', '.join(_DTYPES)}")
    return found


def _name_of(dtype) -> str:
    try:
        return dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        return repr(dtype)


def positive(name: str, value) -> int:
    """`value` as an int of at least 1, or SpecError naming the argument."""
    return count(name, value, 1)


def count(name: str, value, least: int = 0) -> int:
    """`value` as an int of at least `least`, or SpecError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise SpecError(f"{name}: wanted an integer of at least {least}, got {value!r}")
    return int(value)


def share(heads: int, ranks: int) -> int | None:
    """Heads that one of `ranks` ranks has, at least one; None where they cannot be divided."""
    return max(1, heads // ranks) if heads % ranks == 0 or ranks % heads == 0 else None
