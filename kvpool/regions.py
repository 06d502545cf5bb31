"""Regions: what one layer keeps of the past, as retention x payload.

The retention says which positions are kept, the payload what is stored for each entry. This
module is also the single source of the retention arithmetic: which positions a query reads, which
columns of a block table are dead, and how many blocks a row can hold. Its functions take Python
ints, numpy and jax integers alike.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax
import ml_dtypes
import numpy as np

from kvpool.status import SpecError

ALL, WINDOW, CHUNK, STATE = "all", "window", "chunk", "state"
MAX_TOKENS = 2**30  # so that sums of two counts stay within int32
ALIGNMENT = 16  # bytes; what a bulk tensor copy asks of every buffer

_DTYPE_NAMES = (
    "float32 bfloat16 float16 float8_e4m3fn float8_e5m2 float8_e4m3b11fnuz float8_e4m3fnuz "
    "float8_e5m2fnuz int8 uint8 int16 uint16 int32 uint32"
)
_DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in _DTYPE_NAMES.split(" ")}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One named array of a payload: the shape of an entry, without a token axis, and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype as numpy and jax take it."""
        return _DTYPES[self.dtype]

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry."""
        return math.prod(self.shape) * self.numpy_dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Region:
    """What a layer keeps of the past.

    Args:
      retention: "all", ("window", W), ("chunk", C) or "state". W counts the query itself.
      buffers: {name: (shape of an entry, dtype)}. For "state" an entry is the whole state.
      tokens_per_entry: tokens that share one entry; more than 1 for compressed caches.

    Raises:
      SpecError: naming the argument, what was given and what is wanted.
    """

    retention: str | tuple[str, int]
    buffers: tuple[Buffer, ...]
    tokens_per_entry: int

    def __init__(
        self,
        retention: str | Sequence,
        buffers: Mapping[str, tuple[Sequence[int], str]] | Sequence[Buffer],
        tokens_per_entry: int = 1,
    ):
        set_field = object.__setattr__
        set_field(self, "retention", _retention(retention))
        set_field(self, "buffers", _buffers(buffers))
        set_field(self, "tokens_per_entry", token_count("tokens_per_entry", tokens_per_entry))
        if self.kind == STATE and self.tokens_per_entry != 1:
            raise SpecError(f'tokens_per_entry: a "state" has 1, got {self.tokens_per_entry}')

    @property
    def kind(self) -> str:
        """ "all", "window", "chunk" or "state"."""
        return self.retention if isinstance(self.retention, str) else self.retention[0]

    @property
    def span(self) -> int:
        """W of a window, C of a chunk, in tokens; 0 where nothing is dropped."""
        return 0 if isinstance(self.retention, str) else self.retention[1]

    def first_read(self, n):
        """First position that a query at position n reads; n itself when it needs no past."""
        if self.kind == WINDOW:
            return _clamped(n - self.span + 1)
        if self.kind == CHUNK:
            return quotient(n, self.span) * self.span
        return n * 0

    def blocks_per_row(self, block_size: int, step_tokens: int, seq_len: int) -> int:
        """Most blocks that a row of up to seq_len tokens holds in steps of up to step_tokens."""
        if self.kind == STATE:
            return 1
        columns = -(-seq_len // block_size)
        if self.kind == ALL:
            return columns
        return min(columns, -(-(self.span + step_tokens - 2) // block_size) + 1)


@dataclasses.dataclass(frozen=True)
class SharedWith:
    """The cache of an earlier layer: the region of one tag, or all of that layer's regions."""

    layer: int
    tag: str | None = None


def quotient(n, size: int):
    """n // size for n >= 0.  On jax arrays it is the one operation that `//` would take ten for."""
    return jax.lax.div(n, np.int32(size)) if isinstance(n, jax.Array) else n // size


def _clamped(n):
    return n * (n > 0)  # max(0, n) for Python, numpy and jax integers


def positive(name: str, value) -> int:
    """`value` as an int of at least 1, or SpecError naming the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise SpecError(f"{name}: wanted an integer of at least 1, got {value!r}")
    return int(value)


def token_count(name: str, value) -> int:
    """`positive`, and small enough to count tokens in int32."""
    value = positive(name, value)
    if value > MAX_TOKENS:
        raise SpecError(f"{name}: wanted at most 2^30 tokens, got {value:,}")
    return value


def _retention(retention):
    if isinstance(retention, str) and retention in (ALL, STATE):
        return retention
    if not isinstance(retention, str) and isinstance(retention, Sequence) and len(retention) == 2:
        kind, span = retention
        if kind in (WINDOW, CHUNK):
            return (kind, token_count(kind, span))
    raise SpecError(
        f'retention: wanted "all", ("window", W), ("chunk", C) or "state", got {retention!r}'
    )


def _buffers(buffers):
    if isinstance(buffers, Mapping):
        buffers = [Buffer(name, *_shape_and_dtype(name, entry)) for name, entry in buffers.items()]
    if not buffers or not all(isinstance(buffer, Buffer) for buffer in buffers):
        raise SpecError(f"buffers: wanted {{name: (shape, dtype)}}, at least one, got {buffers!r}")
    return tuple(buffers)


def _shape_and_dtype(name, entry):
    if not isinstance(name, str) or not name:
        raise SpecError(f"buffers: wanted a non-empty name, got {name!r}")
    if not isinstance(entry, Sequence) or isinstance(entry, str) or len(entry) != 2:
        raise SpecError(f"buffer {name!r}: wanted (shape of an entry, dtype), got {entry!r}")
    shape, dtype = entry
    if isinstance(shape, (int, np.integer)):
        raise SpecError(f"buffer {name!r}: wanted a shape as a tuple, got {shape!r}")
    sizes = tuple(positive(f"buffer {name!r}: size in shape {tuple(shape)}", n) for n in shape)
    return sizes, _dtype_name(name, dtype)


def _dtype_name(name, dtype):
    try:
        found = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    except TypeError:
        found = repr(dtype)
    if found not in _DTYPES:
        raise SpecError(f"buffer {name!r}: no dtype {found!r}; there are {', '.join(_DTYPES)}")
    return found


def _keys_and_values(num_kv_heads, head_dim, v_head_dim, dtype):
    heads = positive("num_kv_heads", num_kv_heads)
    k_dim = positive("head_dim", head_dim)
    v_dim = k_dim if v_head_dim is None else positive("v_head_dim", v_head_dim)
    return {"k": ((heads, k_dim), dtype), "v": ((heads, v_dim), dtype)}


def FullAttention(num_kv_heads, head_dim, v_head_dim=None, dtype="bfloat16") -> Region:
    """Keys `k` [num_kv_heads, head_dim], values `v` [num_kv_heads, v_head_dim] of every token."""
    return Region(ALL, _keys_and_values(num_kv_heads, head_dim, v_head_dim, dtype))


def SlidingWindow(window, num_kv_heads, head_dim, v_head_dim=None, dtype="bfloat16") -> Region:
    """Keys and values of the last `window` tokens; the query counts as one of them."""
    payload = _keys_and_values(num_kv_heads, head_dim, v_head_dim, dtype)
    return Region((WINDOW, positive("window", window)), payload)


def ChunkedLocal(chunk, num_kv_heads, head_dim, v_head_dim=None, dtype="bfloat16") -> Region:
    """Keys and values of the tokens in the query's own chunk of `chunk` tokens."""
    payload = _keys_and_values(num_kv_heads, head_dim, v_head_dim, dtype)
    return Region((CHUNK, positive("chunk", chunk)), payload)


def LatentAttention(latent_dim, rope_dim, dtype="bfloat16") -> Region:
    """Multi-head latent attention: `latent` [latent_dim] and `rope` [rope_dim] of every token."""
    latent, rope = positive("latent_dim", latent_dim), positive("rope_dim", rope_dim)
    return Region(ALL, {"latent": ((latent,), dtype), "rope": ((rope,), dtype)})


def Compressed(ratio, entry_dim, dtype="bfloat16") -> Region:
    """One `entry` [entry_dim] for every `ratio` tokens, kept for the whole past."""
    entry = positive("entry_dim", entry_dim)
    return Region(ALL, {"entry": ((entry,), dtype)}, positive("ratio", ratio))


def RecurrentState(buffers: Mapping[str, tuple[Sequence[int], str]]) -> Region:
    """Recurrent state, one per row: {name: (shape, dtype)}, e.g. `ssm` and `conv`."""
    return Region(STATE, buffers)
