"""Regions: what one layer keeps of the past, as retention x payload.

The retention says which positions are kept, the payload what is stored for each entry. This
module is also the single source of the retention arithmetic: which positions a query reads, which
columns of a block table are dead, and how many blocks a row can hold. Its functions take Python
ints, numpy and jax integers alike.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from kvpool.buffers import (
    BLOCK,
    Buffer,
    buffers_of,
    compute_dtype_of,
    positive,
    with_scales,
)
from kvpool.status import SpecError

ALL, WINDOW, CHUNK, STATE = "all", "window", "chunk", "state"
MAX_TOKENS = 2**30  # so that sums of two counts stay within int32
ALIGNMENT = 16  # bytes; what a bulk tensor copy asks of every buffer


@dataclasses.dataclass(frozen=True)
class Region:
    """What a layer keeps of the past.

    Args:
      retention: "all", ("window", W), ("chunk", C) or "state". W counts the query itself.
      buffers: {name: (shape of an entry, dtype)}. For "state" an entry is the whole state.
      tokens_per_entry: tokens that share one entry; more than 1 for compressed caches.
      scales: None, "token" or "block". With scales, the buffers of CODE_DTYPES are quantised as
        they are written and dequantised as they are read (`kvpool.scales` has the bounds). Each
        gets a float32 buffer NAME_scale of its shape without the last axis, so one scale a head:
        for every entry with "token", for every block with "block".
      compute_dtype: of the values of quantised buffers, given to a write and returned by a read:
        one of COMPUTE_DTYPES; with scales "bfloat16" by default, without them None.

    Raises:
      SpecError: naming the argument, what was given and what is wanted.
    """

    retention: str | tuple[str, int]
    buffers: tuple[Buffer, ...]  # as they lie in a block; scales last
    tokens_per_entry: int
    scales: str | None
    compute_dtype: str | None

    def __init__(
        self,
        retention: str | Sequence,
        buffers: Mapping[str, tuple[Sequence[int], str]] | Sequence[Buffer],
        tokens_per_entry: int = 1,
        scales: str | None = None,
        compute_dtype: str | None = None,
    ):
        set_field = object.__setattr__
        set_field(self, "retention", _retention(retention))
        set_field(self, "compute_dtype", compute_dtype_of(scales, compute_dtype))
        set_field(self, "scales", scales)
        set_field(self, "buffers", with_scales(buffers_of(buffers), scales))
        set_field(self, "tokens_per_entry", token_count("tokens_per_entry", tokens_per_entry))
        if self.kind == STATE and self.tokens_per_entry != 1:
            raise SpecError(f'tokens_per_entry: a "state" has 1, got {self.tokens_per_entry}')
        if self.kind == STATE and scales is not None:
            raise SpecError(f'scales: a "state" has none, got {scales!r}')

    @property
    def kind(self) -> str:
        """ "all", "window", "chunk" or "state"."""
        return self.retention if isinstance(self.retention, str) else self.retention[0]

    @property
    def span(self) -> int:
        """W of a window, C of a chunk, in tokens; 0 where nothing is dropped."""
        return 0 if isinstance(self.retention, str) else self.retention[1]

    @property
    def payload(self) -> tuple[Buffer, ...]:
        """The buffers but for the scales of a region that quantises."""
        return tuple(buffer for buffer in self.buffers if buffer.scale_of is None)

    @property
    def scale_buffers(self) -> dict[str, Buffer]:
        """{name of a quantised buffer: the buffer of its scales}."""
        return {b.scale_of: b for b in self.buffers if b.scale_of is not None}

    @property
    def values(self) -> tuple[Buffer, ...]:
        """What a write takes and a read returns: the payload, where quantised in compute_dtype."""
        return tuple(
            Buffer(b.name, b.shape, self.compute_dtype)
            if self.compute_dtype and b.name in self.scale_buffers
            else b
            for b in self.payload
        )

    def block_tokens(self, block_size: int) -> int:
        """Tokens of a block: block_size, rounded up to whole entries.

        Raises:
          SpecError: for scales per block where a cut row may go on in the middle of a fresh block,
            whose old scale could not be told from one that the row's own tokens need.
        """
        size = -(-block_size // self.tokens_per_entry) * self.tokens_per_entry
        if self.scales == BLOCK and self.kind == CHUNK and self.span % size:
            raise SpecError(
                f'scales "block": wanted chunks of whole blocks of {size} tokens, got {self.span}; '
                'give another block_size or scales "token"'
            )
        if self.scales == BLOCK and self.kind == WINDOW and self.span == 1:
            raise SpecError('scales "block": wanted a window of at least 2 tokens, got 1')
        return size

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


def _keys_and_values(num_kv_heads, head_dim, v_head_dim, dtype):
    heads = positive("num_kv_heads", num_kv_heads)
    k_dim = positive("head_dim", head_dim)
    v_dim = k_dim if v_head_dim is None else positive("v_head_dim", v_head_dim)
    return {"k": ((heads, k_dim), dtype), "v": ((heads, v_dim), dtype)}


def FullAttention(
    num_kv_heads, head_dim, v_head_dim=None, dtype="bfloat16", scales=None, compute_dtype=None
) -> Region:
    """Keys `k` [num_kv_heads, head_dim], values `v` [num_kv_heads, v_head_dim] of every token.

    For this and the other caches of tokens `scales` and `compute_dtype` are those of `Region`:
    `dtype="int8", scales="token"` keeps codes of 8 bits and a scale for every token and head.
    """
    payload = _keys_and_values(num_kv_heads, head_dim, v_head_dim, dtype)
    return Region(ALL, payload, 1, scales, compute_dtype)


def SlidingWindow(
    window, num_kv_heads, head_dim, v_head_dim=None, dtype="bfloat16", scales=None,
    compute_dtype=None,
) -> Region:  # fmt: skip
    """Keys and values of the last `window` tokens; the query counts as one of them."""
    payload = _keys_and_values(num_kv_heads, head_dim, v_head_dim, dtype)
    return Region((WINDOW, positive("window", window)), payload, 1, scales, compute_dtype)


def ChunkedLocal(
    chunk, num_kv_heads, head_dim, v_head_dim=None, dtype="bfloat16", scales=None,
    compute_dtype=None,
) -> Region:  # fmt: skip
    """Keys and values of the tokens in the query's own chunk of `chunk` tokens."""
    payload = _keys_and_values(num_kv_heads, head_dim, v_head_dim, dtype)
    return Region((CHUNK, positive("chunk", chunk)), payload, 1, scales, compute_dtype)


def LatentAttention(
    latent_dim, rope_dim, dtype="bfloat16", scales=None, compute_dtype=None
) -> Region:
    """Multi-head latent attention: `latent` [latent_dim] and `rope` [rope_dim] of every token."""
    latent, rope = positive("latent_dim", latent_dim), positive("rope_dim", rope_dim)
    payload = {"latent": ((latent,), dtype), "rope": ((rope,), dtype)}
    return Region(ALL, payload, 1, scales, compute_dtype)


def Compressed(ratio, entry_dim, dtype="bfloat16", scales=None, compute_dtype=None) -> Region:
    """One `entry` [entry_dim] for every `ratio` tokens, kept for the whole past."""
    entry = positive("entry_dim", entry_dim)
    payload = {"entry": ((entry,), dtype)}
    return Region(ALL, payload, positive("ratio", ratio), scales, compute_dtype)


def RecurrentState(buffers: Mapping[str, tuple]) -> Region:
    """Recurrent state, one per row: {name: (shape, dtype)}, e.g. `ssm` and `conv`.

    Where parts are joined along the first axis, as the queries, keys and values of a convolution
    are, a third item gives their sizes: ranks divide each for itself.
    """
    return Region(STATE, buffers)
