"""The small server of `serving`, with a host tier and a store behind its cache."""

from __future__ import annotations

import numpy as np
from serving import Serving, i32

import kvpool as kv
from kvpool import tiers
from kvpool.tiers.joint import following

FULL = kv.FullAttention(1, 4, dtype="float32")
WINDOW = kv.SlidingWindow(6, 1, 4, dtype="float32")
STATE = kv.RecurrentState({"sum": ((2,), "float32")})
LAYERS = [FULL, WINDOW, STATE]
TOKENS = [(7 * p) % 11 for p in range(29)]


class DictStore:
    """A store in a dictionary."""

    def __init__(self, spec):
        self.blocks = {}
        self.reads = 0
        self.fails = False

    def put(self, group, digest, block):
        self.blocks[group, digest] = np.array(block).reshape(-1)

    def prefetch(self, names, deadline_s=None):
        if self.fails:
            raise OSError("the store is gone")
        self.reads += len(names)
        self.found = {name: self.blocks.get(name) for name in names}
        return self

    def result(self):
        return self.found

    def flush(self, timeout_s=None):
        return True


class Tiered(Serving):
    """A server whose cache is asked through a PrefixTier.

    Args:
      host: blocks of every group, or {group: blocks}; None for as many as the device has.
      store: as a PrefixTier takes it, given the spec.
      tier: options of the HostTier.
    """

    def __init__(self, *args, host=None, store=None, policy="write_back", tier=None, **options):
        self.prefixes = None
        self.coming = None  # a promotion under way
        super().__init__(*args, **options)
        names = [group.name for group in self.spec.groups]
        counts = dict.fromkeys(names, host) if isinstance(host, int) else host
        self.tier = tiers.HostTier(self.spec, counts or self.plan.num_blocks, **{
            "anchor": names[0], "chunk_bytes": 256, **(tier or {})
        })  # fmt: skip
        self.prefixes = tiers.PrefixTier(
            self.cache, self.tier, store and store(self.spec), policy=policy
        )

    def match(self, tokens, salt=None, **options):
        """The joint hit, on the device by now."""
        self.state, self.storage, hit = self.prefixes.match(
            self.state, self.storage, tokens, salt, **options
        )
        self.settle()
        return hit

    def admit(self, row, tokens, salt=None, hit=True):
        hit = self.match(tokens, salt) if hit is True else hit
        return super().admit(row, tokens, salt, hit)

    def insert(self, row, salt=None, **options):
        self.state, self.storage = self.prefixes.insert(
            self.state, self.storage, self.tokens[row], row, salt, **options
        )
        self.settle()

    def evict(self, need=(), **options):
        self.state, freed = self.prefixes.evict(self.state, self.storage, dict(need), **options)
        self.settle()
        return freed

    def send(self, wait=False):
        self.state = self.prefixes.send(self.state, self.storage, wait)
        self.settle()

    def evict_all(self):
        """Everything leaves the device that no row holds."""
        return self.evict({g.name: self.plan.num_blocks[g.name] for g in self.spec.groups})

    def lose_on_host(self, group, tokens, columns):
        """Makes a hole on the host, as another's request would."""
        of_group = next(g for g in self.cache._places.groups if g.name == group)
        keys = self.keys(tokens)
        for column in columns:
            unit, place = divmod(column, of_group.count)
            block = self.prefixes._host.get(keys[unit], of_group.first + place)
            self.tier.pools.release(block.allocation)
        self.settle()

    def keys(self, tokens):
        """The key of each unit of the tokens."""
        raw = i32(tokens).tobytes()
        places, tree = self.cache._places, self.cache._tree
        return list(following(places, tree.namespace(None), raw, 0, len(tokens) // places.unit))

    def settle(self):
        super().settle()
        if self.prefixes:
            self.prefixes.check(self.state)

    def cached_blocks(self, group):
        found = super().cached_blocks(group)
        if self.prefixes:
            of_place = self.cache._places.of_place
            others = self.prefixes._saves.held()
            others += [one for _, one in self.coming.fresh] if self.coming else []
            found += [one.block for one in others if of_place[one.place].name == group]
        return found
