"""Parcels: the bytes of some items and layers from one rank to another, as a message carries them.

Both sides list the same parcels, so a message names its parcel and nothing more. On the way a
parcel is its items one after the other, each contiguous: its layers in order, each layer's cuts.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvpool.buffers import positive
from kvpool.status import SpecError
from kvpool.transfer.keys import Key
from kvpool.transfer.plan import Piece, TransferPlan, owners
from kvpool.transfer.shards import Cut, Lane

MAX_BYTES = 8 << 20  # of a parcel, where a layer of an item is not more
PORTION = 1 << 20  # bytes cut, summed and moved at once, while a processor's cache has them
MOST_BYTES = 64 << 20  # that a receiver may ask for instead; a broken parcel comes again as a whole


class Parcel(NamedTuple):
    """Items [start, stop) of a piece, layers [first, last) of the group."""

    piece: int  # place in `Outline.pieces`
    start: int
    stop: int
    first: int
    last: int
    num_bytes: int

    def portions(self) -> Iterator[tuple[slice, range]]:
        """(items, counted from its first, layers) of stretches of its bytes in their order.

        None is above PORTION, unless a layer of one item is.
        """
        layers, items = self.last - self.first, self.stop - self.start
        layer = self.num_bytes // (layers * items)
        some = max(1, min(layers, PORTION // layer))
        step = max(1, PORTION // (layers * layer))
        for start in range(0, items, step):
            for first in range(self.first, self.last, some):
                last = min(first + some, self.last)
                yield slice(start, min(start + step, items)), range(first, last)


class Outline(NamedTuple):
    """All that goes from one rank to another."""

    pieces: tuple[Piece, ...]
    parcels: tuple[Parcel, ...]

    @property
    def num_bytes(self) -> int:
        """Of all parcels."""
        return sum(parcel.num_bytes for parcel in self.parcels)


def outline(
    plan: TransferPlan,
    sender: int,
    receiver: int,
    max_bytes: int = MAX_BYTES,
    by_layer: bool = False,
) -> Outline:
    """The parcels of one pair of ranks.

    Args:
      max_bytes: at most so many a parcel, unless a layer of one item is more.
      by_layer: whether a parcel has one layer, in the order in which a prefill computes them; else
        a parcel has all layers of its items where they fit.

    Raises:
      SpecError: for no such rank, or max_bytes below 1 or above MOST_BYTES.
    """
    if positive("max_bytes", max_bytes) > MOST_BYTES:
        raise SpecError(f"max_bytes: wanted at most {MOST_BYTES:,}, got {max_bytes!r:.80}")
    pieces = tuple(plan.pieces(sender, receiver))
    parcels = []
    for index, piece in enumerate(pieces):
        layers = max(1, min(piece.lane.layers, max_bytes // piece.lane.layer_bytes))
        layers = 1 if by_layer else layers
        for first in range(0, piece.lane.layers, layers):
            last = min(first + layers, piece.lane.layers)
            each = (last - first) * piece.lane.layer_bytes
            step = max(1, max_bytes // each)
            for start in range(0, len(piece.items), step):
                stop = min(start + step, len(piece.items))
                parcels.append(Parcel(index, start, stop, first, last, (stop - start) * each))
    if by_layer:
        numbers = owners(plan.spec)
        parcels.sort(key=lambda p: (numbers[pieces[p.piece].group][p.first][0], p.piece, p.start))
    return Outline(pieces, tuple(parcels))


def parcel_key(
    plan: TransferPlan, listed: Outline, number: int, request: int | str, sender: int, receiver: int
) -> Key:
    """The key of a parcel's first layer of its first item."""
    parcel = listed.parcels[number]
    piece = listed.pieces[parcel.piece]
    layer, tag = owners(plan.spec)[piece.group][parcel.first]
    pair = sender * plan.receiver.ranks + receiver
    return Key(request, layer, tag, int(piece.items[parcel.start]), pair)


def _runs(blocks: np.ndarray, layer: int, cut: Sequence[int], layers: range) -> np.ndarray:
    """A view u8[K, layers, count, run] of blocks u8[K, bytes] in one of a cut's two places."""
    start, stride, run, count = cut
    return np.lib.stride_tricks.as_strided(
        blocks[:, layers.start * layer + start :],
        (len(blocks), len(layers), count, run),
        (blocks.strides[0], layer, stride, 1),
    )


def _sent(lane: Lane, cut: Cut, data: np.ndarray, layers: int) -> np.ndarray:
    """A view u8[K, layers, count, run] of a cut's bytes on the way."""
    place = (cut.wire, cut.run, cut.run, cut.repeats)
    return _runs(data, lane.layer_bytes, place, range(layers))


def pack(lane: Lane, blocks: np.ndarray, layers: range | None = None) -> np.ndarray:
    """The bytes u8[K, len(layers) * lane.layer_bytes] that a lane sends of a sender's blocks.

    Args:
      blocks: u8[K, bytes_per_block of the sender's rank], C-contiguous rows.
      layers: of the group; None: all.

    Raises:
      ValueError: for blocks of another size.
    """
    _check(blocks, lane.layers * lane.source_layer)
    layers = range(lane.layers) if layers is None else layers
    if lane.sent_as_it_lies:
        return blocks[:, layers.start * lane.layer_bytes : layers.stop * lane.layer_bytes]
    data = np.empty((len(blocks), len(layers) * lane.layer_bytes), np.uint8)
    for cut in lane.cuts:
        sent = _sent(lane, cut, data, len(layers))
        source = (cut.source, cut.source_stride, cut.run, cut.repeats)
        sent[...] = _runs(blocks, lane.source_layer, source, layers)
    return data


def unpack(lane: Lane, data: np.ndarray, blocks: np.ndarray, layers: range | None = None) -> None:
    """Puts what `pack` gave into a receiver's blocks u8[K, bytes_per_block], in place."""
    layers = range(lane.layers) if layers is None else layers
    _check(blocks, lane.layers * lane.target_layer)
    _check(data, len(layers) * lane.layer_bytes)
    if lane.kept_as_it_comes:
        blocks[:, layers.start * lane.layer_bytes : layers.stop * lane.layer_bytes] = data
        return
    for cut in lane.cuts:
        target = (cut.target, cut.target_stride, cut.run, cut.repeats)
        _runs(blocks, lane.target_layer, target, layers)[...] = _sent(lane, cut, data, len(layers))


def _check(blocks: np.ndarray, size: int) -> None:
    """ValueError unless these are rows of so many bytes, each contiguous: views go by address."""
    if blocks.ndim != 2 or blocks.shape[1] != size or blocks.strides[1] != 1:
        raise ValueError(f"blocks: wanted u8[K, {size}] of contiguous rows, got {blocks.shape}")
