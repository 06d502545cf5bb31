"""HostBlocks: the bytes of one group's blocks in host memory, in one of two layouts.

"block_first" keeps a block as one run of bytes, as `export_blocks` gives it: best for whole blocks
and for storage. "layer_first" keeps each layer's part of all blocks together: best for a device
that takes one layer after the other. Both hold the same bytes; `convert` makes one of the other.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from kvpool.group import Group
from kvpool.status import SpecError

BLOCK_FIRST, LAYER_FIRST = "block_first", "layer_first"
PINNED = "pinned_host"
_ALIGNMENT = 64  # bytes; jax on the CPU reads an array that lies so where it is


class HostBlocks:
    """Blocks 0..num_blocks-1 of a group.

    Args:
      group: of a spec.
      layout: BLOCK_FIRST or LAYER_FIRST.
      device: memory that this device moves bytes to without a copy in between, where it has such
        of the kind "pinned_host" and is no CPU; None: plain memory.

    Raises:
      SpecError: for an unknown layout.
    """

    def __init__(self, group: Group, num_blocks: int, layout: str = BLOCK_FIRST, device=None):
        check_layout(layout)
        self.group, self.layout = group, layout
        layers, layer = len(group.layers), group.buffer_offsets[-1]
        shape = (num_blocks, layers) if layout == BLOCK_FIRST else (layers, num_blocks)
        self._keeper, memory = _memory(num_blocks * layers * layer, device)
        array = memory.reshape(*shape, layer)
        self._parts = array if layout == BLOCK_FIRST else array.swapaxes(0, 1)
        self._seen: dict = {}

    @property
    def array(self) -> np.ndarray:
        """All bytes: u8[blocks, layers, bytes] if block-first, else u8[layers, blocks, bytes]."""
        return self._parts if self.layout == BLOCK_FIRST else self._parts.swapaxes(0, 1)

    def put(self, ids: Sequence[int], blocks: np.ndarray) -> None:
        """Takes in the blocks u[K, W], of whatever words, that `export_blocks` gave."""
        parts = as_bytes(blocks).reshape(len(ids), *self._parts.shape[1:])
        for start, run in runs(ids):
            self._parts[run] = parts[start : start + run.stop - run.start]

    def put_one(self, block_id: int, block: np.ndarray) -> None:
        """Takes in one block u8[bytes_per_block]."""
        self._parts[block_id] = block.reshape(self._parts.shape[1:])

    def get(self, ids: Sequence[int]) -> np.ndarray:
        """The blocks u8[K, bytes_per_block] as `import_blocks` takes them.

        Where they lie one after the other this is a view, which changes with them.
        """
        return self._gathered(self._parts, ids).reshape(len(ids), -1)

    def seen_by(self, device, word: np.dtype) -> jax.Array | None:
        """The blocks u[N, W] as an array of a CPU device, in this very memory.

        What changes in the memory changes in the array, which jax takes for immutable: nothing may
        use it beyond a call that is waited for. None where a block is no single run, or jax copied.
        """
        if self.layout != BLOCK_FIRST or not self._parts.size:
            return None
        if (device, word) not in self._seen:
            blocks = self._parts.reshape(len(self._parts), -1).view(word)
            array = jax.device_put(blocks, device)
            same = array.unsafe_buffer_pointer() == blocks.ctypes.data
            self._seen[device, word] = array if same else None
        return self._seen[device, word]

    def get_layer(self, ids: Sequence[int], layer: int) -> np.ndarray:
        """The part of one layer, by its index in the group: u8[K, bytes]; a view as `get`."""
        return self._gathered(self._parts[:, layer], ids)

    def _gathered(self, parts: np.ndarray, ids: Sequence[int]) -> np.ndarray:
        found = list(runs(ids))
        if len(found) == 1 and parts[:1].flags.c_contiguous:
            return np.ascontiguousarray(parts[found[0][1]])
        out = aligned(len(ids) * parts[:1].size).reshape(len(ids), *parts.shape[1:])
        for start, run in found:
            out[start : start + run.stop - run.start] = parts[run]
        return out


def check_layout(layout: str) -> None:
    """SpecError unless the layout is known."""
    if layout not in (BLOCK_FIRST, LAYER_FIRST):
        raise SpecError(f"layout: wanted {BLOCK_FIRST!r} or {LAYER_FIRST!r}, got {layout!r}")


def convert(array: np.ndarray, to: str) -> np.ndarray:
    """The other layout of `HostBlocks.array`, copied.

    Args:
      array: u8[layers, blocks, bytes] where `to` is BLOCK_FIRST, u8[blocks, layers, bytes] where it
        is LAYER_FIRST.
    """
    check_layout(to)
    return np.ascontiguousarray(array.swapaxes(0, 1))


def runs(ids: Sequence[int]) -> Iterator[tuple[int, slice]]:
    """(place of the first among `ids`, slice of blocks) of each run of consecutive ids."""
    start = 0
    for place in range(1, len(ids) + 1):
        if place == len(ids) or ids[place] != ids[place - 1] + 1:
            yield start, slice(ids[start], ids[place - 1] + 1)
            start = place


def as_bytes(array: np.ndarray) -> np.ndarray:
    """u8 of an array whose last axis is contiguous."""
    return array.view(np.uint8)


def aligned(size: int) -> np.ndarray:
    """u8[size] that jax on the CPU need not copy."""
    raw = np.empty(size + _ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return raw[start : start + size]


def _memory(size: int, device) -> tuple[object, np.ndarray]:
    """(what keeps the memory, u8[size] all 0): touched, so that no copy waits for pages."""
    pinned = device is not None and device.platform != "cpu"
    if pinned and any(memory.kind == PINNED for memory in device.addressable_memories()):
        return pinned_memory(size, device)
    memory = aligned(size)
    memory[:] = 0
    return memory, memory


def pinned_memory(size: int, device) -> tuple[object, np.ndarray]:
    """(array that owns the memory, u8[size] all 0) in the device's pinned host memory.

    The array is never given to jax again, which may hold it for immutable.
    """
    sharding = jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED)
    owner = jax.device_put(np.zeros(max(size, 1), np.uint8), sharding)
    owner.block_until_ready()
    view: Any = (ctypes.c_uint8 * size).from_address(owner.unsafe_buffer_pointer())
    return owner, np.frombuffer(view, np.uint8)
