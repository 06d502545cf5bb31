"""Shards: how a cache is divided among ranks, and which bytes of a block go from one to another.

`Group` says how the bytes of a block lie. A rank has the same groups with smaller entries, as
`per_rank` makes them, and of every layer of a block a receiver needs a few runs of bytes that
repeat regularly: the heads of every token that the sender has and it wants. Such a repetition is a
`Cut`, and the same cuts serve every block and every layer of a group.
"""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from kvpool.buffers import Buffer, heads_and_rows, positive
from kvpool.group import Group
from kvpool.regions import Region
from kvpool.spec import CacheSpec
from kvpool.status import SpecError
from kvpool.variants import is_divided, of_rank, per_rank


@dataclasses.dataclass(frozen=True)
class Shards:
    """A cache over heads * context ranks; rank r has head shard r % heads of the rest r // heads.

    Args:
      heads: ranks that divide keys and values by heads and recurrent states by their first axis;
        of fewer heads than ranks several ranks have the same, and what has no heads all have whole.
      context: ranks that the blocks are dealt to, column i to rank i % context. A recurrent state
        is on all of them.

    Raises:
      SpecError: for a number below 1.
    """

    heads: int = 1
    context: int = 1

    def __post_init__(self):
        positive("Shards: heads", self.heads)
        positive("Shards: context", self.context)

    @property
    def ranks(self) -> int:
        """Of the whole cache."""
        return self.heads * self.context

    def check_rank(self, rank, name: str = "rank") -> None:
        """SpecError unless there is such a rank."""
        if not isinstance(rank, (int, np.integer)) or not 0 <= rank < self.ranks:
            raise SpecError(f"{name}: wanted a rank from 0 to {self.ranks - 1}, got {rank!r}")

    def place(self, column):
        """(context rank, column there) of a block table's column >= 0, an int or array."""
        return column % self.context, column // self.context

    def columns(self, columns: int) -> int:
        """Columns that a rank has room for when the whole table has `columns`."""
        return -(-columns // self.context)

    def __str__(self) -> str:
        return f"{self.heads} x {self.context}"


class Cut(NamedTuple):
    """`repeats` runs of `run` bytes of a layer; offsets count from the layer's start.

    On the way they lie one after the other from `wire` on.
    """

    source: int
    source_stride: int
    target: int
    target_stride: int
    run: int
    repeats: int
    wire: int


@dataclasses.dataclass(frozen=True)
class Lane:
    """What one head shard sends of every block of a group to another: the cuts of each layer."""

    cuts: tuple[Cut, ...]
    layers: int
    source_layer: int  # bytes from one layer to the next at the sender
    target_layer: int

    @functools.cached_property
    def layer_bytes(self) -> int:
        """Bytes sent of a layer of a block."""
        return sum(cut.run * cut.repeats for cut in self.cuts)

    @property
    def block_bytes(self) -> int:
        """Bytes sent of a block with all its layers."""
        return self.layers * self.layer_bytes

    @functools.cached_property
    def sent_as_it_lies(self) -> bool:
        """Whether all of a sender's block goes, in the order in which it lies there."""
        return self.layer_bytes == self.source_layer and all(
            cut.source == cut.wire and (cut.repeats == 1 or cut.source_stride == cut.run)
            for cut in self.cuts
        )

    @functools.cached_property
    def kept_as_it_comes(self) -> bool:
        """Whether what comes is all of a receiver's block, in the order in which it lies there."""
        return self.layer_bytes == self.target_layer and all(
            cut.target == cut.wire and (cut.repeats == 1 or cut.target_stride == cut.run)
            for cut in self.cuts
        )

    @property
    def whole(self) -> bool:
        """Whether both sides have the same bytes in the same order, so that a block is one run."""
        return self.sent_as_it_lies and self.kept_as_it_comes

    @property
    def runs(self) -> int:
        """Contiguous runs of bytes in a block."""
        return 1 if self.whole else self.layers * sum(cut.repeats for cut in self.cuts)


def check_degrees(sender: Shards, receiver: Shards) -> None:
    """SpecError unless one side's number of head shards is a multiple of the other's."""
    small, large = sorted((sender.heads, receiver.heads))
    if large % small:
        raise SpecError(
            f"shards: {sender.heads} head shards at the sender and {receiver.heads} at the "
            "receiver; one has to be a multiple of the other"
        )


def _segments(spec: CacheSpec) -> tuple[tuple, ...]:
    """Those of all buffers: what a cache by spec has to tell apart, and its equality leaves out."""
    return tuple(buffer.segments for group in spec.groups for buffer in group.region.buffers)


def rank_groups(spec: CacheSpec, heads: int) -> tuple[Group, ...]:
    """The groups of a rank in a spec's order.

    Raises:
      SpecError: where a region cannot be divided, or groups that differ in heads alone become one.
    """
    return _rank_groups(_segments(spec), spec, heads)


@functools.lru_cache(maxsize=256)
def _rank_groups(segments, spec: CacheSpec, heads: int) -> tuple[Group, ...]:
    groups = tuple(
        dataclasses.replace(group, region=of_rank(group.region, heads)) if heads > 1 else group
        for group in spec.groups
    )
    regions = [group.region for group in groups]
    # Cheap where no two are equal, which is nearly always; else only per_rank knows.
    if len(set(regions)) < len(regions) != len(per_rank(spec, heads).groups):
        names = ", ".join(group.name for group in spec.groups)
        raise SpecError(
            f"shards: over {heads} ranks groups of {names} become one, with another block table"
        )
    return groups


def lanes(spec: CacheSpec, sender: int, receiver: int) -> tuple[dict[tuple[int, int], Lane], ...]:
    """For each group {(sender's head shard, receiver's): Lane}, of pairs with something to send."""
    return _lanes(_segments(spec), spec, sender, receiver)


@functools.lru_cache(maxsize=256)
def _lanes(segments, spec: CacheSpec, sender: int, receiver: int):
    pairs = zip(spec.groups, rank_groups(spec, sender), rank_groups(spec, receiver), strict=True)
    found = []
    for group, source, target in pairs:
        of_group = {}
        for receiving in range(receiver):
            # Whoever sends has a part of the same stretch when the heads are laid out in a line.
            first = receiving * sender // receiver
            for sending in range(first, max(first, ((receiving + 1) * sender - 1) // receiver) + 1):
                cuts = _cuts(group, (source, sender, sending), (target, receiver, receiving))
                if cuts:
                    strides = source.buffer_offsets[-1], target.buffer_offsets[-1]
                    of_group[sending, receiving] = Lane(cuts, len(group.layers), *strides)
        found.append(of_group)
    return tuple(found)


def _cuts(group: Group, sender: tuple, receiver: tuple) -> tuple[Cut, ...]:
    """The cuts of one pair; both sides are (its group, number of shards, which of them)."""
    (source, *sending), (target, *receiving) = sender, receiver
    cuts: list[Cut] = []
    wire = 0
    for index, buffer in enumerate(group.region.buffers):
        entries = 1 if buffer.per_block else group.entries_per_block
        ends = [
            (side.buffer_offsets[index], side.region.buffers[index].entry_bytes)
            for side in (source, target)
        ]
        for begins, run in _shared(group.region, buffer, sending, receiving):
            (start, stride), (goal, goal_stride) = ends
            cut = Cut(start + begins[0], stride, goal + begins[1], goal_stride, run, entries, wire)
            wire += run * entries
            _append(cuts, cut)
    return tuple(cuts)


def _append(cuts: list[Cut], cut: Cut) -> None:
    """Adds a cut, joined with the one before it where both are one run of bytes on both sides."""
    if cut.run == cut.source_stride == cut.target_stride or cut.repeats == 1:
        cut = cut._replace(run=cut.run * cut.repeats, repeats=1, source_stride=0, target_stride=0)
    last = cuts[-1] if cuts else None
    if (
        last and last.repeats == cut.repeats == 1
        and last.source + last.run == cut.source
        and last.target + last.run == cut.target
    ):  # fmt: skip
        cuts[-1] = last._replace(run=last.run + cut.run)
    else:
        cuts.append(cut)


def _shared(
    region: Region, buffer: Buffer, sender, receiver
) -> Iterator[tuple[tuple[int, int], int]]:
    """((byte of an entry at the sender, at the receiver), bytes) of the parts that a pair shares.

    Args:
      sender, receiver: (number of shards, which of them) each.
    """
    if not is_divided(region, buffer):
        if _sends(1, sender, receiver):
            yield (0, 0), buffer.entry_bytes
        return
    row = buffer.entry_bytes // buffer.shape[0]
    source = target = 0
    for heads, rows in map(heads_and_rows, buffer.segments or buffer.shape[:1]):
        (a, b), (c, d) = owned(heads, *sender), owned(heads, *receiver)
        first, last, head = max(a, c), min(b, d), rows * row
        if first < last and _sends(heads, sender, receiver):
            yield (source + (first - a) * head, target + (first - c) * head), (last - first) * head
        source, target = source + (b - a) * head, target + (d - c) * head


def owned(size: int, shards: int, shard: int) -> tuple[int, int]:
    """[first, end) of `size` heads that a shard has; one head where there are fewer."""
    first = shard * size // shards
    return first, max(first + 1, (shard + 1) * size // shards)


def _sends(parts: int, sender, receiver) -> bool:
    """Whether this sender, of those that have the same of `parts` parts, serves this receiver.

    Receivers of one part are dealt evenly to the senders that have it.
    """
    (shards, shard), (receivers, receiving) = sender, receiver
    copies, takers = max(1, shards // parts), max(1, receivers // parts)
    return shard % copies == receiving % takers * copies // takers
