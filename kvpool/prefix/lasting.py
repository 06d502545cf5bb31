"""Lasting: what is told to stay longer than its use would keep it."""

from kvpool.prefix import keys, match
from kvpool.prefix.holdings import Holdings
from kvpool.prefix.keys import Salt
from kvpool.prefix.tree import Kept


class Lasting:
    """Pins of what hits of given tokens use."""

    def __init__(self, holdings: Holdings):
        self._holdings = holdings
        self._pinned: dict[tuple, set[Kept]] = {}

    def pin(self, raw: bytes, salt: Salt) -> int:
        """Pins the longest hit, however little it leaves to compute; its length in tokens."""
        if (salt, raw) in self._pinned:
            raise ValueError("tokens: wanted some that are not pinned, got some that are")
        length, guards = self._longest(raw, salt)
        if length:
            self._holdings.pin(guards, 1)
            self._pinned[salt, raw] = guards
        return length

    def unpin(self, raw: bytes, salt: Salt) -> None:
        """Takes back one `pin`."""
        if (salt, raw) not in self._pinned:
            raise ValueError("tokens: wanted some that are pinned, got some that are not")
        self._holdings.pin(self._pinned.pop((salt, raw)), -1)

    def forget(self) -> None:
        """Nothing is cached any more."""
        self._pinned.clear()

    def _longest(self, raw: bytes, salt: Salt) -> tuple[int, set[Kept]]:
        places, tree = self._holdings.places, self._holdings.tree
        units = len(raw) // keys.TOKEN_BYTES // places.unit
        chain = tree.walk(salt, raw, units)
        length, _ = match.longest(places, chain, units * places.unit)
        return length, self._holdings.guards(match.used_by(places, chain, length))
