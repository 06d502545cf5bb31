"""What a prefix cache holds, as a dictionary of token tuples."""

import numpy as np

from kvpool.prefix import keys


class Model:
    """What is cached: {(salt, tokens to the end of a unit): {(group, place)}}, from the events."""

    def __init__(self, cache):
        self.spec, self.unit = cache._plan.spec, cache.unit
        self.cache = cache
        self.held: dict[tuple, set] = {}
        self.meaning: dict[bytes, tuple] = {}  # of a key

    def hear_of(self, tokens, salt):
        key = keys.namespace(self.spec, "", salt)
        for end in range(self.unit, len(tokens) + 1, self.unit):
            unit = np.asarray(tokens[end - self.unit : end], "<i4").tobytes()
            key = keys.digest(key + unit)
            self.meaning[key] = (salt, tuple(tokens[:end]))

    def listen(self):
        for event in self.cache.events():
            places = self.held.setdefault(self.meaning[event.key], set())
            place = (event.group, event.place)
            assert (place in places) == (event.kind == "removed")
            (places.add if event.kind == "stored" else places.remove)(place)

    def has(self, tokens, salt, group, column) -> bool:
        per_unit = self.unit // group.block_size
        unit, place = divmod(column, per_unit)
        end = (unit + 1) * self.unit
        return (group.name, place) in self.held.get((salt, tuple(tokens[:end])), ())

    def serves(self, tokens, salt, length) -> bool:
        """Whether each group has what a hit of this length needs."""
        for group in self.spec.groups:
            kind, size = group.region.kind, group.block_size
            if kind == "state":
                if (group.name, 0) not in self.held.get((salt, tuple(tokens[:length])), ()):
                    return False
                continue
            span = group.region.span
            first = {"window": max(0, length - span + 1), "chunk": length - length % (span or 1)}
            needed = {position // size for position in range(first.get(kind, 0), length)}
            if not all(self.has(tokens, salt, group, column) for column in needed):
                return False
        return True

    def longest(self, tokens, salt, most) -> int:
        lengths = range(most // self.unit * self.unit, 0, -self.unit)
        return next((h for h in lengths if self.serves(tokens, salt, h)), 0)
