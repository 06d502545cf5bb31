"""Host pools of three entries, and everything about a group of them that may change."""

import itertools

from kvpool.tiers import HostPool, PoolEntry

KV = {"kv": 4, "swa": 2, "mamba": 2}
ORDERS = list(itertools.permutations(KV))


def entries(sizes, anchor="kv", **options):
    return [
        PoolEntry(name, HostPool(size), anchor=name == anchor, **options)
        for name, size in sizes.items()
    ]


def books(group):
    """Everything that may change: free counts, free blocks, who holds what."""
    group.check()
    pools = {name: pool.free_ids() for name, pool in group._pools.items()}
    return group.available(), pools, {id(held): dict(held.owned) for held in group._live}
