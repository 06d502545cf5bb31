"""The cache memory of hybrid language models in JAX.

Bookkeeping is one small immutable pytree, `State`, changed only by pure functions; the blocks are
large arrays, `Storage`, updated in place under donation.
"""

from kvpool import tiers, transfer
from kvpool.cache import advance, clear_faults, release, reserve
from kvpool.compaction import compact, follow
from kvpool.drafts import draft_layer, origin_of, part_of, project, with_draft
from kvpool.files import load_plan, load_spec
from kvpool.forecast import fits
from kvpool.group import Group
from kvpool.hf import draft_from_hf_config
from kvpool.indices import NULL_BLOCK
from kvpool.invariants import check
from kvpool.mesh import init as init_on_mesh
from kvpool.mesh import on_mesh, own_heads
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
from kvpool.rules import Rules
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


def init(
    spec: CacheSpec, plan: Plan, device=None, mesh=None, rules: Rules | None = None
) -> tuple[State, Storage]:
    """(state, storage) of a plan, all rows and blocks free.

    Args:
      device: both are put on it, as in `init_state`. For a state and a storage on different devices
        call `init_state` and `init_storage`.
      mesh: a jax Mesh in the place of a device: blocks are divided over one of its axes and heads
        over another. The plan is for `per_rank(spec, ranks)`; `kvpool.mesh` says what the arrays
        then look like, and `on_mesh` makes the verbs work on them.
      rules: which axes those are; by default "data" and "model", with bookkeeping per shard.

    Raises:
      SpecError: when the plan was made for another spec, or does not fit the mesh.
      ValueError: for a device and a mesh, or rules without a mesh.
    """
    if mesh is None:
        if rules is not None:
            raise ValueError("rules: they are for a mesh, got none")
        return init_state(spec, plan, device), init_storage(spec, plan, device)
    if device is not None:
        raise ValueError(f"device: wanted a device or a mesh, got both, {device} and {mesh}")
    return init_on_mesh(spec, plan, mesh, rules)


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
    "Rules",
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
    "on_mesh",
    "origin_of",
    "own_heads",
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
    "transfer",
    "truncate",
    "with_draft",
    "with_dtype",
    "with_pooling",
    "with_window_blocks",
    "without_regions",
    "write",
    "write_state",
]
