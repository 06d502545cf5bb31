"""Copies of blocks between a device's storage and host memory, a bounded chunk at a time.

A copy is moved on by its owner, between the steps of a decode loop: each call starts what fits into
its share of device memory and takes in what has arrived, and waits for nothing unless it is told
to. The blocks at both ends belong to whoever started the copy, until it is done or given up.
"""

import functools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from kvpool import storage as verbs
from kvpool.status import SpecError
from kvpool.storage import Storage
from kvpool.tiers.host_blocks import HostBlocks, as_bytes

CHUNK_BYTES = 4 << 20  # of a chunk; on the CPU the least that hides the cost of starting it
DEPTH = 2  # chunks on their way at a time


def _import_data(storage: Storage, group: str, ids, layer, data) -> Storage:
    """Blocks ids i32[K], or one layer of them, from u[K, words]."""
    if layer is None:
        return verbs.import_blocks(storage, group, ids, data)
    return verbs.import_layer(storage, group, ids, layer, data)


def _import_seen(storage: Storage, group: str, ids, layer, host, host_ids) -> Storage:
    """The same from places host_ids i32[K] of the host's blocks u[N, W], which jax sees.

    One after the other: so each is copied once, where a gather of all would be an array of its own.
    """
    layers = len(storage.plan.spec.group(group).layers)
    words = host.shape[1] if layer is None else host.shape[1] // layers
    first = 0 if layer is None else layer * words

    def one(place, storage):
        data = lax.dynamic_slice(host, (host_ids[place], first), (1, words))
        return _import_data(storage, group, lax.dynamic_slice_in_dim(ids, place, 1), layer, data)

    return lax.fori_loop(0, ids.shape[0], one, storage)


_export = jax.jit(verbs.export_blocks, static_argnames="group")
# By whether the storage that is given may be used up.
_IMPORT_DATA = {
    donate: jax.jit(_import_data, static_argnames="group", donate_argnums=(0,) if donate else ())
    for donate in (False, True)
}
_IMPORT_SEEN = {
    donate: jax.jit(_import_seen, static_argnames="group", donate_argnums=(0,) if donate else ())
    for donate in (False, True)
}


class Piece(NamedTuple):
    """Blocks of one group that move together, whole or one layer of them."""

    group: str
    device_ids: np.ndarray  # i32[K]
    host_ids: tuple[int, ...]  # K, ascending
    layer: int | None = None  # index in the group


class _Copy:
    """What copies in both directions share: pieces to start, chunks on their way."""

    def __init__(self, memory: Mapping[str, HostBlocks], pieces: Sequence[Piece]):
        self._memory = memory
        self._todo = deque(pieces)
        self._flying: deque = deque()
        self._given_up = False

    @property
    def done(self) -> bool:
        """Whether every byte has arrived."""
        return not (self._todo or self._flying or self._given_up)

    def end(self) -> None:
        """Gives up what has not arrived: nothing moves from now on into blocks of others."""
        self._given_up = not self.done
        self._todo.clear()
        self._flying.clear()

    def _check_goes_on(self) -> None:
        if self._given_up:
            raise SpecError("copy: wanted one that goes on, got one that was given up")

    @property
    def _may_start(self) -> bool:
        return bool(self._todo) and len(self._flying) < DEPTH


class Saving(_Copy):
    """Blocks on their way from a storage to the host."""

    def send(self, storage: Storage, wait: bool = False) -> bool:
        """Moves the copy on.

        Args:
          storage: the present one; the blocks that are saved must not have changed meanwhile.
          wait: to the end, in the place of one chunk more.

        Returns:
          Whether it is done.

        Raises:
          SpecError: where it was given up.
          Whatever a copy raises: the blocks on the host then hold nothing of use.
        """
        self._check_goes_on()
        while self._flying and self._flying[0][1].is_ready():
            self._take_in()
        if self._may_start:
            self._start(storage, wait)
        while wait and not self.done:
            if self._may_start:
                self._start(storage, wait)
            else:
                self._take_in()
        return self.done

    def _start(self, storage: Storage, wait: bool) -> None:
        piece = self._todo[0]
        view = host_view(storage, piece.group, wait)
        if view is not None:  # the storage lies in host memory: one copy, and no chunk
            memory = self._memory[piece.group]
            for device_id, host_id in zip(piece.device_ids.tolist(), piece.host_ids, strict=True):
                memory.put_one(host_id, view[device_id])
        else:
            chunk = _export(storage, group=piece.group, ids=piece.device_ids)
            chunk.copy_to_host_async()
            self._flying.append((piece, chunk))
        self._todo.popleft()

    def _take_in(self) -> None:
        piece, chunk = self._flying[0]
        self._memory[piece.group].put(piece.host_ids, np.asarray(chunk))
        self._flying.popleft()


class Loading(_Copy):
    """Blocks on their way from the host into a storage."""

    @property
    def layers_to_come(self) -> frozenset[int]:
        """The layers of the model that still lack something; on the others a step may run."""
        layers: set[int] = set()
        for piece in self._todo:
            of_group = self._memory[piece.group].group.layers
            layers.update(of_group if piece.layer is None else (of_group[piece.layer],))
        return frozenset(layers)

    def receive(self, storage: Storage, donate: bool = False, wait: bool = False) -> Storage:
        """Moves the copy on.

        Args:
          donate: whether the storage that is given may be used up; else it is copied once. Where
            something is raised it is gone all the same.
          wait: to the end, in the place of one chunk more.

        Returns:
          The storage with one chunk more in it, or with all.

        Raises:
          SpecError: where it was given up.
        """
        self._check_goes_on()
        while self._flying and self._flying[0][1].is_ready():
            self._flying.popleft()
        if self._may_start:
            storage, donate = self._start(storage, donate), True  # it is this function's own now
        while wait and not self.done:
            if self._may_start:
                storage, donate = self._start(storage, donate), True
            else:
                self._flying.popleft()[1].block_until_ready()
        return storage

    def _start(self, storage: Storage, donate: bool) -> Storage:
        piece = self._todo[0]
        memory, word = self._memory[piece.group], _word(storage.plan, piece.group)
        devices = list(storage.blocks[0].devices())
        alone = len(devices) == 1
        layer = None if piece.layer is None else np.int32(piece.layer)
        named = {"group": piece.group, "ids": piece.device_ids, "layer": layer}
        seen = memory.seen_by(devices[0], word) if alone and _platform(storage) == "cpu" else None
        if seen is not None:
            host_ids = np.array(piece.host_ids, np.int32)
            storage = _IMPORT_SEEN[donate](storage, **named, host=seen, host_ids=host_ids)
        else:
            data = self._staged(piece).view(word)
            if alone and _platform(storage) != "cpu":
                data = jax.device_put(data, devices[0])
                self._flying.append((piece, data))
            storage = _IMPORT_DATA[donate](storage, **named, data=data)
        if not self._flying:  # it reads the host's memory itself, which may be another's after this
            jax.block_until_ready(storage)
        self._todo.popleft()
        return storage

    def _staged(self, piece: Piece) -> np.ndarray:
        memory = self._memory[piece.group]
        if piece.layer is None:
            return memory.get(piece.host_ids)
        return memory.get_layer(piece.host_ids, piece.layer)


def pieces_of(
    memory: Mapping[str, HostBlocks],
    device_ids: Mapping[str, Sequence[int] | np.ndarray],
    host_ids: Mapping[str, Sequence[int]],
    chunk_bytes: int = CHUNK_BYTES,
    by_layer: bool = False,
) -> list[Piece]:
    """The blocks {group: ids} at both ends, cut into pieces of at most `chunk_bytes` or one block.

    Args:
      by_layer: first all of the model's first layer, then of its second, and so on.
    """
    pieces: list[tuple[int, Piece]] = []
    for name, ids in device_ids.items():
        group = memory[name].group
        layers = range(len(group.layers)) if by_layer else (None,)
        size = group.buffer_offsets[-1] if by_layer else group.bytes_per_block
        most = max(1, chunk_bytes // size)
        order = sorted(range(len(ids)), key=lambda k: host_ids[name][k])  # in runs where possible
        for layer in layers:
            start = 0
            while start < len(order):  # powers of two, so that few sizes are compiled
                part = order[start : start + _power_of_two(min(most, len(order) - start))]
                start += len(part)
                piece = Piece(
                    name,
                    np.array([ids[k] for k in part], np.int32),
                    tuple(host_ids[name][k] for k in part),
                    layer,
                )
                pieces.append((0 if layer is None else group.layers[layer], piece))
    return [piece for _, piece in sorted(pieces, key=lambda numbered: numbered[0])]


def host_view(storage: Storage, group: str, wait: bool) -> np.ndarray | None:
    """The blocks u8[N, bytes_per_block] where they lie, or None where the host cannot see them.

    On the CPU a gather and a copy would move every byte twice. The view must be dropped before the
    storage is donated, which would else be copied as a whole.
    """
    index = storage.plan.spec.group_index(group)
    shape = (storage.plan.blocks[index], storage.plan.spec.groups[index].bytes_per_block)
    if _platform(storage) != "cpu" or len(storage.blocks) != len(storage.plan.blocks):
        return None
    blocks: Any = storage.blocks[index]
    if len(blocks.devices()) != 1 or not (wait or blocks.is_ready()):
        return None
    view = as_bytes(np.from_dlpack(blocks.block_until_ready()))
    return view if view.shape == shape else None


def _platform(storage: Storage) -> str:
    return next(iter(storage.blocks[0].devices())).platform


@functools.lru_cache(maxsize=64)
def _word(plan, group: str) -> np.dtype:
    """The dtype that `import_blocks` takes."""
    none = jax.ShapeDtypeStruct((0,), np.int32)
    storage = jax.eval_shape(lambda: verbs.init_storage(plan.spec, plan))
    return jax.eval_shape(
        functools.partial(verbs.export_blocks, group=group), storage, ids=none
    ).dtype


def _power_of_two(number: int) -> int:
    """The largest that is no larger."""
    return 1 << (number.bit_length() - 1)
