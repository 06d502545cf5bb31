"""StoreLimit: which values are in a store, how large, and which of them are over its limit."""

import threading
from collections import OrderedDict


class StoreLimit:
    """Keys in the order of their last use here, and the bytes of their values.

    Several processes may share a store, so it is counted anew from time to time. What others put
    there, or an earlier run did, counts as unused for longest.

    Args:
      limit: bytes, None for no limit; then nothing is counted.
    """

    def __init__(self, limit: int | None):
        self.limit = limit
        self._lock = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()
        self._total = 0
        self._since = 0

    @property
    def total(self) -> int:
        """Bytes of all values known of."""
        return self._total

    def counts_anew(self) -> bool:
        """Whether enough was written that others may have filled the store meanwhile."""
        return self.limit is not None and (not self._since or self._since > self.limit // 8)

    def recount(self, sizes: dict[bytes, int]) -> None:
        """What the store holds now; what is unknown here goes to the front, as the oldest."""
        with self._lock:
            known = OrderedDict((key, sizes[key]) for key in self._sizes if key in sizes)
            fresh = {key: sizes[key] for key in sorted(sizes) if key not in known}
            self._sizes = OrderedDict(fresh) | known
            self._total = sum(self._sizes.values())
            self._since = 1

    def used(self, key: bytes, size: int) -> None:
        """A value was read or written."""
        if self.limit is None:
            return
        with self._lock:
            if key not in self._sizes:
                self._total += size
            self._sizes[key] = size
            self._sizes.move_to_end(key)

    def gone(self, key: bytes) -> None:
        """A value is not there any more."""
        with self._lock:
            self._total -= self._sizes.pop(key, 0)

    def doubt(self) -> None:
        """What was counted may be wrong, e.g. since a value did not go: count anew."""
        self._since = 0

    def make_room(self, size: int) -> list[bytes]:
        """The keys that have to go before a value of `size` bytes comes, the oldest first."""
        if self.limit is None:
            return []
        with self._lock:
            self._since += size
            goes = []
            while self._sizes and self._total + size > self.limit:
                key, its_size = self._sizes.popitem(last=False)
                self._total -= its_size
                goes.append(key)
        return goes
