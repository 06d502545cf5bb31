"""Fetch: what a store has of a prompt comes to the host, as far as that makes a longer hit.

A store is asked for what a hit of the longest length still lacks; what it does not have shortens
the length, and so on, until nothing is missing or time is over.
"""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvpool.prefix import match
from kvpool.prefix.places import Places
from kvpool.prefix.tree import Node
from kvpool.tiers.host_prefixes import HostBlock, HostPrefixes, Name, let_go
from kvpool.tiers.host_tier import HostTier
from kvpool.tiers.joint import following, joined, lacks_whole
from kvpool.tiers.store import Store
from kvpool.tiers.trouble import Trouble

BATCH_BYTES = 16 << 20  # of what is read at a time
_MAYBE = object()  # in the place of a block that the store may have


def digest_of(places: Places, name: Name) -> bytes:
    """What a store calls a block of its group: the key of the tokens, and its place among them."""
    key, place = name
    return key + (place - places.of_place[place].first).to_bytes(4, "little")


class Fetch:
    """One prompt's blocks on their way from a store to the host.

    Args:
      chain: what device and host have of it (`joint.chain_of`); goes on with what may come.
      deadline_s: from now; None: each batch may take the store's timeout.
    """

    def __init__(
        self,
        store: Store,
        tier: HostTier,
        host: HostPrefixes,
        places: Places,
        chain: list[Node],
        deadline_s: float | None,
    ):
        self._store, self._tier, self._host, self._places = store, tier, host, places
        self._chain = chain
        self._deadline = None if deadline_s is None else time.monotonic() + deadline_s
        self.reading: list[HostBlock] = []  # what came; its `readers` are one more

    def run_or_note(self, trouble: Trouble, *args) -> list[HostBlock]:
        """As `run`; what came, held. What is raised makes it less, and is noted."""
        try:
            self.run(*args)
        except Exception as error:
            trouble.note("fetch", f"blocks cannot be fetched: {error}")
        except BaseException:
            let_go(self.reading)
            raise
        return self.reading

    def run(self, key: bytes, raw: bytes, units: int) -> None:
        """Fetches what makes the longest hit up to so many units.

        Args:
          key: of the chain's last unit.
        """
        num_places = len(self._places.of_place)
        for after in following(self._places, key, raw, len(self._chain), units):
            kept = [self._host.get(after, place) for place in range(num_places)]
            self._chain.append(joined(after, kept))
        for node in self._chain:
            node.kept = [_MAYBE if one is None else one for one in node.kept]  # type: ignore
        while self._left() > 0:
            self._end_at_hole()
            length, _ = match.longest(self._places, self._chain, units * self._places.unit)
            wanted = list(self._wanted(length))
            if not wanted:
                return
            for batch in self._batches(wanted):
                if not self._take(batch):
                    break

    def _wanted(self, length: int) -> Iterator[tuple[Node, int]]:
        """What a hit reads and only the store may have: of groups that keep all, and the rest."""
        units = length // self._places.unit
        for group in (*self._places.whole, *self._places.windows, *self._places.states):
            stop = units * group.count
            first = stop - 1 if group.is_state else group.needed(length).start
            for column in range(max(first, 0), stop):
                unit, place = divmod(column, group.count)
                if self._chain[unit].kept[group.first + place] is _MAYBE:
                    yield self._chain[unit], group.first + place

    def _end_at_hole(self) -> None:
        """Shortens the chain to what has all that keeps all, or may have it."""
        for unit, node in enumerate(self._chain):
            if lacks_whole(self._places, node.kept):
                del self._chain[unit:]
                return

    def _batches(self, wanted: list) -> Iterator[list[tuple[Node, int]]]:
        batch: list[tuple[Node, int]] = []
        size = 0
        for node, place in wanted:
            batch.append((node, place))
            size += self._places.of_place[place].group.bytes_per_block
            if size >= BATCH_BYTES:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch

    def _take(self, batch: list[tuple[Node, int]]) -> bool:
        """Reads a batch; whether all of it came."""
        named = {
            (self._host.group_of((node.key, place)), digest_of(self._places, (node.key, place))): (
                node,
                place,
            )
            for node, place in batch
        }
        left = None if self._deadline is None else self._left()
        blocks = self._store.prefetch(named, left).result()
        came = True
        for name, (node, place) in named.items():
            block = self._keep((node.key, place), blocks[name])
            kept: list[Any] = node.kept
            kept[place] = block
            came &= block is not None
        return came

    def _keep(self, name: Name, payload: np.ndarray | None) -> HostBlock | None:
        if payload is None or self._host.knows(*name):  # it is on its way from the device
            return None
        block = self._host.add(name)
        if block is None:
            return None
        try:
            self._tier.memory[self._host.group_of(name)].put_one(block.block, payload)
        except BaseException:
            self._host.drop(block)
            raise
        block.ready, block.readers = True, 1
        self.reading.append(block)
        return block

    def _left(self) -> float:
        return 1.0 if self._deadline is None else self._deadline - time.monotonic()
