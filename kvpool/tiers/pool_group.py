"""HostPoolGroup: blocks of several host pools, handed out together or not at all.

A request is planned on values, the pools as they would be, and committed by putting those in the
place of the present ones. A pool that is exhausted or raises, at whatever moment and in whatever
order of names, so leaves every pool as it was.
"""

import dataclasses
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kvpool.buffers import count
from kvpool.status import InvariantError, SpecError
from kvpool.tiers.host_pool import HostPool
from kvpool.tiers.pool_entry import PoolEntry, checked


@dataclasses.dataclass(frozen=True, eq=False)
class Allocation:
    """Blocks that a request got.

    It is the same object that `release` takes back: a copy of it holds nothing.
    """

    owned: Mapping[str, tuple[int, ...]]  # {entry with a pool: its blocks}
    ids: Mapping[str, tuple[int, ...]]  # those, and of derived entries their source's
    reclaimed: tuple["Allocation", ...] = ()  # what went for it, and is stale now

    @property
    def nothing(self) -> bool:
        """Whether no block was asked for, so that there was nothing to do."""
        return not any(self.owned.values())


@dataclasses.dataclass(frozen=True)
class Shortfall:
    """Why a request got nothing: {entry: blocks that lack even if all went that may go}."""

    missing: Mapping[str, int]


class HostPoolGroup:
    """Host pools whose blocks are allocated and released together.

    Threads may share it.

    Raises:
      SpecError: naming the entry, when they are not exactly one anchor and sidecars with distinct
        names, pools of their own and proper sources.
    """

    def __init__(self, entries: Iterable[PoolEntry]):
        self._lock = threading.Lock()
        self._entries = checked(entries)
        self._pools = _pools(self._entries)
        self._live: set[Allocation] = set()

    @property
    def anchor(self) -> str:
        """The name of the anchor."""
        return next(entry.name for entry in self._entries.values() if entry.anchor)

    @property
    def entries(self) -> tuple[PoolEntry, ...]:
        """All entries, in the order in which they came."""
        return tuple(self._entries.values())

    def add_entry(self, entry: PoolEntry) -> None:
        """One more entry, under the same checks: SpecError and no change where they fail."""
        with self._lock:
            entries = checked((*self._entries.values(), entry))
            self._pools = {**self._pools, **_pools({entry.name: entry})}
            self._entries = entries

    def available(self) -> dict[str, int]:
        """{entry with a pool: free blocks}; a derived one has none of its own."""
        return {name: pool.free for name, pool in self._pools.items()}

    def used_bytes(self) -> int:
        """Bytes of the blocks that are handed out, each entry's at its own size."""
        pools = self._pools.values()
        return sum((pool.num_blocks - pool.free) * pool.block_bytes for pool in pools)

    def holds(self, allocation: Allocation) -> bool:
        """Whether the blocks are still this allocation's: neither released nor reclaimed."""
        return allocation in self._live

    def allocate(self, request: Mapping[str, int]) -> Allocation | Shortfall:
        """Blocks for every entry of the request, or for none.

        Where blocks are short, allocations go that the entries' `reclaim` offers: as few as the
        order allows, the same ones whatever the order of the request, and none where the request
        does not fit even so.

        Args:
          request: {entry: blocks}. A derived entry comes along with its source; named itself, it
            must ask for as many.

        Returns:
          An Allocation, `nothing` where no block was asked for, or a Shortfall.

        Raises:
          SpecError: for an unknown entry, or a number of blocks that it cannot hand out.
        """
        counts = self._counts(request)
        with self._lock:
            victims = self._victims(counts)
            pools = dict(self._pools)
            for victim in victims:
                _give(pools, victim)
            missing = {name: number - pools[name].free for name, number in counts.items()}
            missing = {name: lacks for name, lacks in missing.items() if lacks > 0}
            if missing:
                return Shortfall(MappingProxyType(missing))
            owned: dict[str, tuple[int, ...]] = {}
            for name, number in counts.items():
                pools[name], owned[name] = pools[name].take(number)
            ids = dict(owned)
            for entry in self._entries.values():
                if entry.source in owned:
                    ids[entry.name] = owned[entry.source]
            allocation = Allocation(MappingProxyType(owned), MappingProxyType(ids), tuple(victims))
            self._live.add(allocation)
            self._live.difference_update(victims)
            self._pools = pools
        return allocation

    def release(self, allocation: Allocation) -> None:
        """Gives all its blocks back.

        Raises:
          SpecError: for an allocation that was released or reclaimed before, or is none of this
            group's; nothing changes then.
        """
        with self._lock:
            if not isinstance(allocation, Allocation) or allocation not in self._live:
                raise SpecError(
                    "allocation: wanted one that this group holds, got one that was released or "
                    f"reclaimed before, or another's: {allocation!r}"
                )
            pools = dict(self._pools)
            _give(pools, allocation)
            self._live.discard(allocation)
            self._pools = pools

    def check(self) -> None:
        """InvariantError unless every block is free once, or in one allocation."""
        for name, pool in self._pools.items():
            places = Counter(pool.free_ids())
            if len(pool.free_ids()) != pool.free:
                raise InvariantError(f"entry {name!r}: counts {pool.free} free blocks")
            for allocation in self._live:
                places.update(allocation.owned.get(name, ()))
            for block in {*range(pool.num_blocks), *places}:
                if places[block] != 1 or not 0 <= block < pool.num_blocks:
                    raise InvariantError(f"entry {name!r}: block {block} is {places[block]} times")

    def _counts(self, request: Mapping[str, int]) -> dict[str, int]:
        """{entry with a pool: blocks}, in the order of the entries."""
        if not isinstance(request, Mapping):
            raise SpecError(f"request: wanted {{entry: blocks}}, got {request!r}")
        unknown = [name for name in request if name not in self._entries]
        if unknown:
            raise SpecError(
                f"request: no entry {', '.join(map(repr, unknown))}; the entries are "
                f"{', '.join(self._entries)}"
            )
        asked = {name: count(f"request[{name!r}]", number) for name, number in request.items()}
        for name, number in asked.items():
            source = self._entries[name].source
            if source is not None and number != asked.get(source, 0):
                raise SpecError(
                    f"request[{name!r}]: it takes the blocks of {source!r}, of which "
                    f"{asked.get(source, 0)} are asked, got {number}"
                )
            if source is None and number % self._pools[name].multiple:
                raise SpecError(
                    f"request[{name!r}]: wanted a multiple of {self._pools[name].multiple} "
                    f"blocks, got {number}"
                )
        return {
            name: asked[name] for name in self._entries if name in asked and name in self._pools
        }

    def _victims(self, counts: dict[str, int]) -> list[Allocation]:
        """The allocations that have to go, found in the order of the entries."""
        short = {name: number - self._pools[name].free for name, number in counts.items()}
        gained: Counter[str] = Counter()
        victims: list[Allocation] = []
        for name, lacks in short.items():
            reclaim = self._entries[name].reclaim
            if reclaim is None or lacks <= gained[name]:
                continue
            for candidate in reclaim():
                helps = candidate in self._live and candidate.owned.get(name)
                if helps and candidate not in victims:
                    victims.append(candidate)
                    gained.update({name: len(ids) for name, ids in candidate.owned.items()})
                if lacks <= gained[name]:
                    break
        for victim in tuple(victims):  # one chosen early may be more than is needed in the end
            without = {name: gained[name] - len(victim.owned.get(name, ())) for name in short}
            if all(short[name] <= max(without[name], 0) for name in short):
                victims.remove(victim)
                gained.subtract({name: len(ids) for name, ids in victim.owned.items()})
        return victims


def _pools(entries: Mapping[str, PoolEntry]) -> dict[str, HostPool]:
    owning = {name: entry.pool for name, entry in entries.items() if entry.source is None}
    return {name: pool for name, pool in owning.items() if pool is not None}


def _give(pools: dict[str, HostPool], allocation: Allocation) -> None:
    for name, ids in allocation.owned.items():
        pools[name] = pools[name].give(ids)
