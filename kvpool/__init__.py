"""The cache memory of hybrid language models in JAX.

Bookkeeping is one small immutable pytree, `State`, changed only by pure functions; the blocks are
large arrays, `Storage`, updated in place under donation.
"""

from kvpool import tiers
from kvpool.cache import advance, clear_faults, release, reserve
from kvpool.compaction import compact, follow
from kvpool.drafts import draft_layer, origin_of, part_of, project, with_draft
from kvpool.files import load_plan, load_spec
from kvpool.forecast import fits
from kvpool.group import Group
from kvpool.hf import draft_from_hf_config
from kvpool.indices import NULL_BLOCK
from kvpool.invariants import check
from kvpool.plan import Peak, Plan
from kvpool.planning import plan
from kvpool.prefix.match import Hit
from kvpool.prefix_cache import PrefixCache
from kvpool.presets import preset, preset_names
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
from kvpool.rewind import truncate
from kvpool.sharing import Prefix, admit, fork
from kvpool.spec import CacheSpec, Draft
from kvpool.state import State, free_blocks, init_state
from kvpool.state import table_of as block_table
from kvpool.status import Fault, InvariantError, Result, SpecError, Status
from kvpool.step import ragged_view, step_view
from kvpool.storage import (
    Storage,
    copy_blocks,
    export_blocks,
    import_blocks,
    init_storage,
    read,
    read_state,
    write,
    write_state,
)
from kvpool.variants import (
    per_rank,
    with_dtype,
    with_pooling,
    with_window_blocks,
    without_regions,
)


def init(spec: CacheSpec, plan: Plan, device=None) -> tuple[State, Storage]:
    """(state, storage) of a plan, all rows and blocks free, both on `device`.

    Args:
      device: as in `init_state`. For a state and a storage on different devices call `init_state`
        and `init_storage`.

    Raises:
      SpecError: when the plan was made for another spec.
    """
    return init_state(spec, plan, device), init_storage(spec, plan, device)


__all__ = [
    "NULL_BLOCK",
    "CacheSpec",
    "ChunkedLocal",
    "Compressed",
    "Draft",
    "Fault",
    "FullAttention",
    "Group",
    "Hit",
    "InvariantError",
    "LatentAttention",
    "Peak",
    "Plan",
    "Prefix",
    "PrefixCache",
    "RecurrentState",
    "Region",
    "Result",
    "SharedWith",
    "SlidingWindow",
    "SpecError",
    "State",
    "Status",
    "Storage",
    "admit",
    "advance",
    "block_table",
    "check",
    "clear_faults",
    "compact",
    "copy_blocks",
    "draft_from_hf_config",
    "draft_layer",
    "drop",
    "export_blocks",
    "fits",
    "follow",
    "fork",
    "free_blocks",
    "import_blocks",
    "init",
    "init_state",
    "init_storage",
    "load_plan",
    "load_spec",
    "origin_of",
    "part_of",
    "per_rank",
    "plan",
    "preset",
    "preset_names",
    "project",
    "ragged_view",
    "read",
    "read_state",
    "release",
    "reserve",
    "retain",
    "snapshot",
    "step_view",
    "tiers",
    "truncate",
    "with_draft",
    "with_dtype",
    "with_pooling",
    "with_window_blocks",
    "without_regions",
    "write",
    "write_state",
]
