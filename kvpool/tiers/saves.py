"""Saves: blocks of prompts on their way from the device to the host.

Those that a cache evicts are waited for. Those that are copied while they stay on the device are
held, and move on by a chunk whenever they are told to.
"""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable

from kvpool.prefix import publish
from kvpool.prefix.places import Places
from kvpool.prefix.tree import Kept
from kvpool.state import State
from kvpool.status import InvariantError
from kvpool.storage import Storage
from kvpool.tiers.copies import Saving, pieces_of
from kvpool.tiers.host_prefixes import HostBlock, HostPrefixes
from kvpool.tiers.host_tier import HostTier
from kvpool.tiers.trouble import Trouble


@dataclasses.dataclass(eq=False)
class _Flight:
    blocks: list[HostBlock]  # the deepest first
    held: list[Kept]  # on the device
    saving: Saving


class Saves:
    """What is copied to the host, and what became of it.

    Args:
      arrived: called with each block whose bytes have come.
    """

    def __init__(
        self,
        tier: HostTier,
        places: Places,
        host: HostPrefixes,
        trouble: Trouble,
        arrived: Callable[[HostBlock], None],
    ):
        self._tier, self._places, self._host = tier, places, host
        self._trouble, self._arrived = trouble, arrived
        self._flights: deque[_Flight] = deque()
        self.saved = self.lost = 0  # blocks that came; for which there was no room, or no copy

    @property
    def under_way(self) -> bool:
        """Whether blocks of the device are held."""
        return bool(self._flights)

    def now(self, storage: Storage | None, kept: Iterable[Kept]) -> None:
        """Copies blocks that are leaving the device, and waits for them.

        They leave it whatever happens, since somebody needs the room. Where a copy raises all of
        them are lost: the host has nothing of them, and not any more what had to go for them.
        """
        flight = self._flight(kept)
        if flight is not None:
            self._move(flight, storage, wait=True)

    def start(self, state: State, kept: Iterable[Kept]) -> State:
        """The state that holds blocks until `move_on` has copied them."""
        flight = self._flight(kept)
        if flight is None:
            return state
        self._flights.append(flight)
        return publish.retain(state, self._places, flight.held)

    def move_on(self, state: State, storage: Storage | None, wait: bool = False) -> State:
        """One chunk more, or all; the state that no longer holds what has come."""
        while self._flights and self._move(self._flights[0], storage, wait):
            state = self._landed(state)
        return state

    def give_up(self, state: State) -> State:
        """The state that holds nothing any more; what has not come is lost."""
        while self._flights:
            self._fail(self._flights[0])
            state = self._landed(state)
        return state

    def held(self) -> list[Kept]:
        """The blocks of the device that are held."""
        return [one for flight in self._flights for one in flight.held]

    def check(self, state: State) -> None:
        """InvariantError unless the state knows what is held."""
        for one in self.held():
            group = self._places.of_place[one.place]
            if state.pool.retained[state.pool.offsets[group.pool] + one.block] < 1:
                raise InvariantError(f"group {group.name}: block {one.block} is sent, not retained")

    def _landed(self, state: State) -> State:
        return publish.drop(state, self._places, self._flights.popleft().held)

    def _flight(self, kept: Iterable[Kept]) -> _Flight | None:
        """Room on the host for what it lacks of these: from the root on, as far as it goes."""
        pairs = []
        for one in sorted(kept, key=lambda one: one.node.depth):
            name = one.node.key, one.place
            if not self._host.knows(*name):
                block = self._host.add(name)
                self.lost += block is None
                if block is not None:
                    pairs.append((block, Kept(one.node, one.place, one.block)))
        if not pairs:
            return None
        blocks, held = [list(part)[::-1] for part in zip(*pairs, strict=True)]
        self._host.touch(blocks)
        device_ids: dict[str, list[int]] = {}
        host_ids: dict[str, list[int]] = {}
        for block, one in zip(blocks, held, strict=True):
            group = self._host.group_of(block.name)
            device_ids.setdefault(group, []).append(one.block)
            host_ids.setdefault(group, []).append(block.block)
        pieces = pieces_of(self._tier.memory, device_ids, host_ids, self._tier.chunk_bytes)
        return _Flight(blocks, held, Saving(self._tier.memory, pieces))

    def _move(self, flight: _Flight, storage: Storage | None, wait: bool) -> bool:
        """Whether it has ended, well or not."""
        try:
            if storage is not None and not flight.saving.send(storage, wait):
                return False
        except Exception as error:
            self._trouble.note("save", f"blocks cannot be copied to the host: {error}")
            self._fail(flight)
            return True
        except BaseException:
            self._fail(flight)
            raise
        for block in flight.blocks:
            block.ready = True
            if storage is not None:
                self._tell(block)
        self.saved += len(flight.blocks)
        return True

    def _tell(self, block: HostBlock) -> None:
        try:
            self._arrived(block)
        except Exception as error:
            self._trouble.note("arrived", f"blocks cannot go on to the store: {error}")

    def _fail(self, flight: _Flight) -> None:
        self.lost += len(flight.blocks)
        while flight.blocks:
            self._host.drop(flight.blocks.pop())
