"""Plan: what of a sequence goes from which rank to which, a pure function that both sides compute.

A block of tokens, or a recurrent state, is an item. `plan` chooses the items; the shards' lanes say
which bytes of each go from whom to whom. No device is needed, and nothing is listed block by block:
a group has the columns to send as one array, and a pair of ranks the same cuts for all of them.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvpool.buffers import positive
from kvpool.group import Group
from kvpool.regions import token_count
from kvpool.spec import CacheSpec
from kvpool.status import SpecError
from kvpool.transfer.agreement import Agreement, agreement
from kvpool.transfer.keys import Key, checked_request
from kvpool.transfer.shards import Lane, Shards, check_degrees, lanes, rank_groups

LACKS, TAIL, STATE, SNAPSHOT = "receiver lacks", "live tail", "state at the end", "snapshot asked"


class Span(NamedTuple):
    """Items [start, stop) of a group, and why they are sent.

    Columns of the block table. A recurrent state is named by the tokens it is the state of, and
    has a span for itself.
    """

    start: int
    stop: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one rank sends another of one group: the same lane of every item.

    `items` i64[K] are columns, or the lengths of states; `source` and `target` i64[K] the places of
    the items in the two ranks' own tables, for a state its place among the plan's states.
    """

    group: int
    items: np.ndarray
    source: np.ndarray
    target: np.ndarray
    lane: Lane

    @property
    def num_bytes(self) -> int:
        """Bytes that are sent."""
        return len(self.items) * self.lane.block_bytes


@dataclasses.dataclass(frozen=True)
class TransferPlan:
    """The items of every group, and how both sides are divided.  Made by `plan`."""

    spec: CacheSpec
    num_tokens: int
    sender: Shards
    receiver: Shards
    spans: tuple[tuple[Span, ...], ...]  # of each group, in order

    @functools.cached_property
    def agreement(self) -> Agreement:
        """What the two sides must have alike."""
        return agreement(self.spec, self.sender, self.receiver)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of all that this plan follows from and chooses."""
        chosen = [self.num_tokens, *self.spans]
        text = self.agreement.digest + json.dumps(chosen)
        return hashlib.sha256(text.encode()).hexdigest()

    @functools.cached_property
    def _items(self) -> tuple[np.ndarray, ...]:
        none = np.zeros(0, np.int64)
        return tuple(
            np.concatenate([none, *(np.arange(s.start, s.stop) for s in spans)])
            for spans in self.spans
        )

    @property
    def snapshots(self) -> tuple[int, ...]:
        """The lengths whose states are sent besides the one at the end."""
        states = (spans for spans in self.spans if spans and spans[0].reason == SNAPSHOT)
        return tuple(span.start for span in next(states, ()) if span.reason == SNAPSHOT)

    def given(self, receiver_has: Mapping[str, Any] | None) -> "TransferPlan":
        """The same plan for a receiver that holds this."""
        sides = self.sender, self.receiver
        return plan(self.spec, self.num_tokens, *sides, receiver_has, self.snapshots)

    def items(self, group: str) -> np.ndarray:
        """The items i64[K] of a group in order: columns, or the lengths of states."""
        return self._items[self.spec.group_index(group)]

    def reason(self, group: str, item: int) -> str | None:
        """Why an item is sent; None where it is not."""
        spans = self.spans[self.spec.group_index(group)]
        return next((span.reason for span in spans if span.start <= item < span.stop), None)

    @property
    def num_items(self) -> int:
        """Items of all groups."""
        return sum(map(len, self._items))

    @functools.cached_property
    def _lanes(self) -> tuple[dict[tuple[int, int], Lane], ...]:
        return lanes(self.spec, self.sender.heads, self.receiver.heads)

    @functools.cached_property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The (sender, receiver) ranks with something to send, sorted."""
        heads = sorted({pair for of_group in self._lanes for pair in of_group})
        ways = sorted({way for ways in self._ways for way in ways})
        every = (
            (way[0] * self.sender.heads + s, way[1] * self.receiver.heads + r)
            for way in ways
            for s, r in heads
        )
        return tuple(sorted(pair for pair in every if any(True for _ in self.pieces(*pair))))

    @functools.cached_property
    def _ways(self) -> tuple[dict[tuple[int, int], np.ndarray], ...]:
        """For each group {(sender's context rank, receiver's): places of the items in `_items`}."""
        return tuple(
            self._ways_of(group, items)
            for group, items in zip(self.spec.groups, self._items, strict=True)
        )

    def _ways_of(self, group: Group, items: np.ndarray) -> dict[tuple[int, int], np.ndarray]:
        senders, receivers = self.sender.context, self.receiver.context
        if not len(items):
            return {}
        if group.is_state:
            every = np.arange(len(items))
            return {(r * senders // receivers, r): every for r in range(receivers)}
        way = items % senders * receivers + items % receivers
        order = np.argsort(way, kind="stable")
        ways, starts = np.unique(way[order], return_index=True)
        return {
            divmod(int(number), receivers): places
            for number, places in zip(ways, np.split(order, starts[1:]), strict=True)
        }

    def pieces(self, sender: int, receiver: int) -> Iterator[Piece]:
        """What rank `sender` sends rank `receiver`, group by group; SpecError for no such rank."""
        ends = []
        for name, rank, side in (
            ("sender", sender, self.sender), ("receiver", receiver, self.receiver),
        ):  # fmt: skip
            side.check_rank(rank, name)
            ends.append(divmod(rank, side.heads))
        (way_out, head), (way_in, receiving) = ends
        for index, group in enumerate(self.spec.groups):
            lane = self._lanes[index].get((head, receiving))
            places = self._ways[index].get((way_out, way_in))
            if lane is None or places is None:
                continue
            items = self._items[index][places]
            if group.is_state:
                yield Piece(index, items, places, places, lane)
            else:
                source, target = items // self.sender.context, items // self.receiver.context
                yield Piece(index, items, source, target, lane)

    @property
    def bytes_sent(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.num_bytes for pair in self.pairs for piece in self.pieces(*pair))

    @property
    def bytes_needed(self) -> int:
        """Bytes that the receivers keep of the items, without padding; replicated heads count."""
        total = 0
        ranks = rank_groups(self.spec, self.receiver.heads)
        for group, items in zip(ranks, self._items, strict=True):
            entries = group.entries_per_block
            block = sum(buffer.bytes_in_block(entries) for buffer in group.region.buffers)
            copies = self.receiver.context if group.is_state else 1
            total += len(items) * len(group.layers) * block * self.receiver.heads * copies
        return total

    def keys(self, request: int | str, sender: int, receiver: int) -> Iterator[Key]:
        """The key of every layer of every item that one rank sends another, in order."""
        request, number = checked_request(request), sender * self.receiver.ranks + receiver
        for piece in self.pieces(sender, receiver):
            for item in piece.items:
                for layer, tag in owners(self.spec)[piece.group]:
                    yield Key(request, layer, tag, int(item), number)


@functools.lru_cache(maxsize=256)
def owners(spec: CacheSpec) -> tuple[tuple[tuple[int, str | None], ...], ...]:
    """For each group the (layer, tag) whose region each of its layers is."""
    found: list[dict[int, tuple]] = [{} for _ in spec.groups]
    for layer in range(len(spec.layers)):
        for tag in spec.tags(layer):
            name, index = spec.resolve(layer, tag)
            found[spec.group_index(name)].setdefault(index, (layer, tag))  # the first one owns it
    return tuple(tuple(of_group[index] for index in sorted(of_group)) for of_group in found)


def plan(
    spec: CacheSpec,
    num_tokens: int,
    sender: Shards = Shards(),  # noqa: B008
    receiver: Shards = Shards(),  # noqa: B008
    receiver_has: Mapping[str, Any] | None = None,
    snapshots: Sequence[int] = (),
) -> TransferPlan:
    """What of a sequence of num_tokens settled tokens is sent.

    Groups that keep the whole past send the blocks that the receiver lacks, a window or chunk those
    of them that a query at num_tokens reads, a recurrent state the one after num_tokens.

    Args:
      spec: of the whole cache, the same on both sides.
      num_tokens: at least 1.
      sender, receiver: how the two sides are divided.
      receiver_has: {group: bool[M]}, the columns that the receiver holds already; a mask that ends
        early, or a group left out, lacks the rest. For a recurrent state bool[1].
      snapshots: lengths below num_tokens whose recurrent states are wanted as well, as a prefix
        cache asks for them.

    Raises:
      SpecError: for degrees that do not divide each other or the spec's heads, an unknown group, a
        mask that is none, a snapshot that is not below num_tokens.
    """
    num_tokens = _checked(spec, num_tokens, sender, receiver, receiver_has)
    lengths = sorted({positive("snapshots", length) for length in snapshots})
    if lengths and lengths[-1] >= num_tokens:
        raise SpecError(f"snapshots: wanted lengths from 1 to {num_tokens - 1}, got {lengths}")
    spans = tuple(
        _states(group, num_tokens, receiver_has, lengths)
        if group.is_state
        else _columns(group, num_tokens, receiver_has)
        for group in spec.groups
    )
    return TransferPlan(spec, num_tokens, sender, receiver, spans)


def _checked(spec, num_tokens, sender, receiver, receiver_has) -> int:
    """num_tokens, once all that `plan` was given is found right."""
    if not isinstance(spec, CacheSpec):
        raise SpecError(f"spec: wanted a CacheSpec, got {type(spec).__name__}")
    for name, side in (("sender", sender), ("receiver", receiver)):
        if not isinstance(side, Shards):
            raise SpecError(f"{name}: wanted Shards, got {side!r}")
    check_degrees(sender, receiver)
    for side in (sender, receiver):
        rank_groups(spec, side.heads)
    for name in receiver_has or {}:
        spec.group(name)
    return token_count("num_tokens", num_tokens)


def _columns(group: Group, num_tokens: int, receiver_has) -> tuple[Span, ...]:
    """The columns that a query at num_tokens reads and the receiver lacks, as runs."""
    first, stop = int(group.dead_columns(num_tokens)), int(group.ceil_columns(num_tokens))
    lacks = np.ones(max(0, stop - first), bool)
    mask = _mask(group, receiver_has)[first:stop]
    lacks[: len(mask)] &= ~mask
    edges = np.flatnonzero(np.diff(np.concatenate([[False], lacks, [False]]))) + first
    reason = TAIL if group.region.span else LACKS
    return tuple(Span(int(a), int(b), reason) for a, b in edges.reshape(-1, 2))


def _states(group: Group, num_tokens: int, receiver_has, lengths) -> tuple[Span, ...]:
    spans = [Span(length, length + 1, SNAPSHOT) for length in lengths]
    if not _mask(group, receiver_has)[:1].any():
        spans.append(Span(num_tokens, num_tokens + 1, STATE))
    return tuple(spans)


def _mask(group: Group, receiver_has) -> np.ndarray:
    mask = np.asarray((receiver_has or {}).get(group.name, np.zeros(0, bool)))
    if mask.ndim != 1 or (mask.dtype != bool and len(mask)):
        raise SpecError(
            f"receiver_has[{group.name!r}]: wanted bool[M], got {mask.dtype}{list(mask.shape)}"
        )
    return mask.astype(bool)
