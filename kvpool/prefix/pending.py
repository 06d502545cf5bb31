"""Pending: prompts that rows are computing now, which others may wait for."""

import numpy as np

from kvpool.prefix.keys import TOKEN_BYTES, Salt
from kvpool.prefix.match import Hit
from kvpool.prefix.places import Places


class Pending:
    """The hits with which rows were announced."""

    def __init__(self, places: Places):
        self.places = places
        self.of_row: dict[int, Hit] = {}

    def settled(self, row: int, length: int) -> None:
        """Forgets a row that has published all that others may wait for."""
        hit = self.of_row.get(row)
        if hit and length >= self._ends_by(hit, len(hit.raw) // TOKEN_BYTES):
            del self.of_row[row]

    def longest(self, salt: Salt, raw: bytes, hit: int, limit: int) -> int:
        """The longest hit of `raw` beyond `hit` that an announced row makes possible, else 0."""
        begin = raw[: (hit + self.places.unit) * TOKEN_BYTES]
        ends = [
            self._ends_by(other, min(limit, _common(other.raw, raw)))
            for other in self.of_row.values()
            if other.salt == salt and other.raw.startswith(begin)
        ]
        return max((end for end in ends if end > hit), default=0)

    def _ends_by(self, hit: Hit, length: int) -> int:
        """The longest hit up to `length` that the row with this hit makes possible."""
        if self.places.windows or self.places.states:
            return max((stop for stop in hit.stops if stop <= length), default=0)
        most = self.places.last_hit(len(hit.raw) // TOKEN_BYTES)
        return min(length // self.places.unit * self.places.unit, most)


def _common(one: bytes, other: bytes) -> int:
    """Tokens that both begin with."""
    tokens = min(len(one), len(other)) // TOKEN_BYTES
    differ = np.frombuffer(one, "<i4", tokens) != np.frombuffer(other, "<i4", tokens)
    return int(differ.argmax()) if differ.any() else tokens
