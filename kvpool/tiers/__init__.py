"""The tiers behind device memory: host memory of several pools, and storage behind it."""

from kvpool.tiers.host_pool import HostPool
from kvpool.tiers.pending import Counts, Prefetch, Put
from kvpool.tiers.pool_entry import PoolEntry, entries_of
from kvpool.tiers.pool_group import Allocation, HostPoolGroup, Shortfall
from kvpool.tiers.store import Store
from kvpool.tiers.trouble import StoreWarning

__all__ = [
    "Allocation",
    "Counts",
    "HostPool",
    "HostPoolGroup",
    "PoolEntry",
    "Prefetch",
    "Put",
    "Shortfall",
    "Store",
    "StoreWarning",
    "entries_of",
]
