"""The cache memory of hybrid language models in JAX.

Bookkeeping is one small immutable pytree, `State`, changed only by pure functions; the blocks are
large arrays, `Storage`, updated in place under donation.
"""

from kvpool.cache import advance, clear_faults, release, reserve
from kvpool.invariants import check
from kvpool.forecast import fits
from kvpool.indices import NULL_BLOCK
from kvpool.plan import Plan, plan
from kvpool.regions import (
    ChunkedLocal,
    Compressed,
    FullAttention,
    LatentAttention,
    RecurrentState,
    Region,
    SharedWith,
    SlidingWindow,
)
from kvpool.retains import drop, retain, snapshot
from kvpool.sharing import Prefix, admit, fork
from kvpool.spec import CacheSpec, Group
from kvpool.state import State, free_blocks, init_state
from kvpool.state import table_of as block_table
from kvpool.status import Fault, InvariantError, Result, SpecError, Status
from kvpool.rewind import truncate
