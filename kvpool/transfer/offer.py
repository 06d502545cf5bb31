"""Offer: the bytes of one sequence that a sending rank holds ready, all at once or as they come."""

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping

import numpy as np

from kvpool.spec import CacheSpec
from kvpool.status import SpecError
from kvpool.transfer.keys import checked_request
from kvpool.transfer.parcels import Outline, Parcel, pack
from kvpool.transfer.plan import TransferPlan, plan
from kvpool.transfer.shards import Shards, rank_groups


class Offer:
    """What a rank has of a request's items, for whoever asks.

    The bytes are its own, so the row that they come from may go on or end. `put` brings them: a
    group at once, or some layers or items as a prefill computes them; what was put is sent.
    """

    def __init__(
        self,
        request: int | str,
        spec: CacheSpec,
        num_tokens: int,
        shards: Shards = Shards(),  # noqa: B008
        rank: int = 0,
        *,
        snapshots=(),
        lacks: Mapping[str, Mapping[int, int]] | None = None,
    ):
        """An offer of nothing yet.

        Args:
          request: its name, the same at the receiver.
          spec: of the whole cache.
          num_tokens: settled, once the prefill has ended.
          shards, rank: which part of the cache this is.
          snapshots: as in `plan`.
          lacks: {group: {column: tokens}}, of blocks that lack tokens at their start.

        Raises:
          SpecError: as `plan`; for a rank that there is not, or a request that
            `keys.checked_request` refuses.
        """
        self.request, self.spec, self.num_tokens = checked_request(request), spec, num_tokens
        self.shards, self.rank, self.snapshots = shards, rank, tuple(snapshots)
        self.lacks = {
            name: {int(column): int(tokens) for column, tokens in of_group.items()}
            for name, of_group in (lacks or {}).items()
        }
        whole = plan(spec, num_tokens, shards, shards, snapshots=self.snapshots)
        shards.check_rank(rank)
        self.items = local_items(whole, shards, rank)
        groups = rank_groups(spec, shards.heads)
        self.blocks = [
            np.zeros((len(items), group.bytes_per_block), np.uint8)
            for group, items in zip(groups, self.items, strict=True)
        ]
        self._here = [
            np.zeros((len(group.layers), len(items)), bool)
            for group, items in zip(groups, self.items, strict=True)
        ]
        self.mark = secrets.token_hex(8)  # tells it from other offers of the same name
        self.news = asyncio.Event()  # of the next notify; take it before looking for what is new
        self.served: set[int] = set()
        self.streams: set[asyncio.Task] = set()  # that send what it has
        self.outcome: str | None = None  # "delivered", "cancelled" or "withdrawn" once it ended
        self.touch()

    def touch(self) -> None:
        """Notes that a receiver gave a sign."""
        self.active = time.monotonic()

    def put(self, group: str, data, layers: range | None = None, items=None) -> None:
        """Brings bytes, which must not be put twice while they may be on their way.

        Args:
          data: u8[K, bytes], or words as `export_blocks` gives them: K items, of which only the
            bytes of `layers` are taken.
          layers: places in the group, one after the other; None: all.
          items: which i64[K], as in `items`; None: all of the group.

        Raises:
          SpecError: for items that are not offered, layers that there are not, or data of another
            size.
        """
        index = self.spec.group_index(group)
        every = range(len(self.spec.groups[index].layers))
        layers = every if layers is None else layers
        if not isinstance(layers, range) or every[layers.start : layers.stop] != layers:
            raise SpecError(f"layers: wanted a range of {every} without gaps, got {layers!r}")
        places = slice(None) if items is None else self.places(index, items)
        data = as_bytes(data)
        wanted = self.blocks[index][places].shape
        if data.shape != wanted:
            raise SpecError(f"data: wanted u8{list(wanted)}, got u8{list(data.shape)}")
        step = wanted[1] // len(every)
        part = slice(layers.start * step, layers.stop * step)
        if items is None and layers == every:
            self.blocks[index] = data  # the caller's own array, and no copy
        else:
            self.blocks[index][places, part] = data[:, part]
        self._here[index][layers.start : layers.stop, places] = True

    def places(self, group: int, items) -> np.ndarray:
        """Places of items in `items`; SpecError for one that is not offered."""
        return places_of(self.items[group], items)

    def notify(self) -> None:
        """Tells those who wait that something was put, or that the offer has ended."""
        self.touch()
        news, self.news = self.news, asyncio.Event()
        news.set()

    def has(self, outline: Outline, parcel: Parcel) -> bool:
        """Whether all bytes of a parcel are here."""
        piece = outline.pieces[parcel.piece]
        places = self.places(piece.group, piece.items[parcel.start : parcel.stop])
        return bool(self._here[piece.group][parcel.first : parcel.last, places].all())

    def portions(self, outline: Outline, parcel: Parcel) -> Iterator[np.ndarray]:
        """The bytes u8[...] of a parcel, in order; without a copy where they lie so."""
        piece = outline.pieces[parcel.piece]
        places = self.places(piece.group, piece.items[parcel.start : parcel.stop])
        for items, layers in parcel.portions():
            blocks = self.blocks[piece.group][as_slice(places[items])]
            yield pack(piece.lane, blocks, layers).reshape(-1)


def local_items(whole: TransferPlan, shards: Shards, rank: int) -> list[np.ndarray]:
    """For each group the items of a plan that lie on a rank."""
    way = rank // shards.heads
    found = []
    for group in whole.spec.groups:
        items = whole.items(group.name)
        found.append(items if group.is_state else items[items % shards.context == way])
    return found


def places_of(here: np.ndarray, items) -> np.ndarray:
    """Places i64[K] of items in the sorted array `here`; SpecError for one that is not in it."""
    items = np.asarray(items, np.int64)
    places = np.searchsorted(here, items)
    found = places < len(here)
    found[found] = here[places[found]] == items[found]
    if not found.all():
        raise SpecError(f"items: {items[~found][:4].tolist()} are not offered")
    return places


def as_slice(places: np.ndarray):
    """Evenly spaced places as a slice, which makes a view where an array would make a copy."""
    if len(places) == 1:
        return slice(int(places[0]), int(places[0]) + 1, 1)
    step = int(places[1] - places[0]) if len(places) else 0
    if step > 0 and (np.diff(places) == step).all():
        return slice(int(places[0]), int(places[-1]) + 1, step)
    return places


def as_bytes(data) -> np.ndarray:
    """Words u[K, W] as u8[K, bytes], without a copy where the memory is the host's."""
    data = np.asarray(data)
    if data.ndim != 2 or data.dtype.kind != "u":
        raise SpecError(f"data: wanted u[K, W], got {data.dtype}{list(data.shape)}")
    return np.ascontiguousarray(data).view(np.uint8)
