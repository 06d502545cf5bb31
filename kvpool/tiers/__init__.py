"""The tiers behind device memory: host memory of several pools, and storage behind it."""

from kvpool.tiers.copies import Loading, Piece, Saving, pieces_of
from kvpool.tiers.host_blocks import BLOCK_FIRST, LAYER_FIRST, HostBlocks, convert
from kvpool.tiers.host_pool import HostPool
from kvpool.tiers.host_prefixes import PrefixCounts
from kvpool.tiers.host_tier import HostTier
from kvpool.tiers.joint import Found
from kvpool.tiers.pending import Counts, Prefetch, Put
from kvpool.tiers.pool_entry import PoolEntry, entries_of
from kvpool.tiers.pool_group import Allocation, HostPoolGroup, Shortfall
from kvpool.tiers.prefix_tier import SECOND_USE, WRITE_BACK, WRITE_THROUGH, PrefixTier
from kvpool.tiers.promotion import Promotion
from kvpool.tiers.rows import (
    Backup,
    Restore,
    backup,
    discard,
    finish_backup,
    finish_restore,
    restore,
    start_backup,
    start_restore,
)
from kvpool.tiers.store import Store
from kvpool.tiers.trouble import StoreWarning

__all__ = [
    "BLOCK_FIRST",
    "LAYER_FIRST",
    "SECOND_USE",
    "WRITE_BACK",
    "WRITE_THROUGH",
    "Allocation",
    "Backup",
    "Counts",
    "Found",
    "HostBlocks",
    "HostPool",
    "HostPoolGroup",
    "HostTier",
    "Loading",
    "Piece",
    "PoolEntry",
    "Prefetch",
    "PrefixCounts",
    "PrefixTier",
    "Promotion",
    "Put",
    "Restore",
    "Saving",
    "Shortfall",
    "Store",
    "StoreWarning",
    "backup",
    "convert",
    "discard",
    "entries_of",
    "finish_backup",
    "finish_restore",
    "pieces_of",
    "restore",
    "start_backup",
    "start_restore",
]
