"""Values of a store: a header that says what the bytes are, and a checksum over all of it.

Whatever is torn, cut short, written for another key or by another version does not pass, and is
then no value at all. The checksum is XXH3-128: it detects what a broken write or disk does as well
as a CRC-32C would, with 2^-128 left to chance in the place of 2^-32, and runs at the speed of
memory on every machine, where zlib's CRC-32 takes longer than reading a block from a fast disk.
"""

import hashlib
import json
import struct
import sys
from typing import NamedTuple

from kvpool.spec import CacheSpec

VERSION = 1  # of the stored form; older values are not read
MAGIC = b"kvp\n"
_HEADER = struct.Struct("<4sHH16s16sQ")  # magic, version, 0, namespace, key, payload bytes
_CHECKSUM = 16
OVERHEAD = _HEADER.size + _CHECKSUM  # bytes of a value beside its payload


class Bad(NamedTuple):
    """Why a value is not what was looked for."""

    kind: str
    reason: str


def namespace(
    spec: CacheSpec,
    *,
    layout: str = "page_first",
    layers: tuple[int, int] | None = None,
    heads: tuple[int, int] | None = None,
    model: str = "",
) -> bytes:
    """16 bytes that differ wherever the bytes of a block would be wrong.

    Args:
      spec: regions, dtypes, block sizes and the order of the layers.
      layout: how a block's bytes lie; "page_first" is that of `export_blocks`.
      layers: (first, stop) of those in a block, None for all.
      heads: (first, stop) of the kv heads, None for all.
      model: a name for the weights; the tokens' hashes know nothing of them.
    """
    said = {
        "format": VERSION,
        "spec": spec.to_dict(),
        "layout": layout,
        "layers": layers,
        "heads": heads,
        "model": model,
        "byteorder": sys.byteorder,
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).digest()[:16]


def pack(space: bytes, key: bytes, payload: memoryview) -> bytes:
    """The value of a payload: header, checksum, payload.

    Args:
      space: as `namespace` gives it.
      key: the whole key, so that a value that got under another one is found out.
      payload: u8[n], contiguous.
    """
    header = _HEADER.pack(MAGIC, VERSION, 0, space, _digest(key), len(payload))
    return b"".join((header, _checksum(header, payload), payload))


def unpack(space: bytes, key: bytes, value: bytes, size: int) -> memoryview | Bad:
    """The payload of `size` bytes that was packed for this key, or what is wrong."""
    if len(value) < OVERHEAD:
        return Bad("short", f"cut short: {len(value)} bytes")
    header, view = value[: _HEADER.size], memoryview(value)
    magic, version, _, its_space, its_key, length = _HEADER.unpack(header)
    if magic != MAGIC:
        return Bad("foreign", "foreign: not written by kvpool")
    if version != VERSION:
        return Bad("version", f"of format version {version}, wanted {VERSION}")
    if its_space != space or its_key != _digest(key):
        return Bad("key", "foreign: written for another key")
    if length != size or len(value) != OVERHEAD + size:
        return Bad("short", f"cut short: {len(value)} bytes, wanted {OVERHEAD + size}")
    payload = view[OVERHEAD:]
    if _checksum(header, payload) != view[_HEADER.size : OVERHEAD]:
        return Bad("torn", "torn: its checksum differs")
    return payload


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()[:16]


def _checksum(header: bytes, payload: memoryview) -> bytes:
    import xxhash

    state = xxhash.xxh3_128(header)
    state.update(payload)
    return state.digest()
