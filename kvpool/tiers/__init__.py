"""The tiers behind device memory: host memory of several pools, and storage behind it."""

from kvpool.tiers.host_pool import HostPool
from kvpool.tiers.pool_entry import PoolEntry, entries_of
from kvpool.tiers.pool_group import Allocation, HostPoolGroup, Shortfall

__all__ = ["Allocation", "HostPool", "HostPoolGroup", "PoolEntry", "Shortfall", "entries_of"]
