"""Storage: the block arrays of all groups, and the moves of values into and out of them.

The verbs work eagerly and under jit, and never copy a donated storage. XLA orders a read before a
later write only where the write depends on what was read, and else copies the whole array: in a
step, write a layer's tokens first and read them then. A recurrent state is read first, and every
buffer that was read has to take part in what is written.

Where groups share an array this holds across them: what one group's write brings must depend on
what was read of the others before. Where it does not, as for attention and state heads side by
side, the CPU's compiler needs the option `xla_cpu_copy_insertion_use_region_analysis`; a GPU's does
not.
"""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

import pallas_kernels
from kvpool import entries, indices, layers, plan_checks, step, words
from kvpool.arguments import int32
from kvpool.indices import NULL_BLOCK
from kvpool.parts import Part
from kvpool.plan import Plan
from kvpool.spec import CacheSpec
from kvpool.state import check_plan
from kvpool.status import SpecError
from kvpool.step import StepView


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Storage:
    """The block arrays: one a group, or one for the groups that share it, as the plan says.

    A block is one contiguous run of bytes, laid out as `Group` says. A row of an array is a block,
    or a slab of several. With a `part` the arrays have a device's share of the rows; the ids that
    the verbs take stay those of all.
    """

    blocks: tuple[jax.Array, ...]  # u[N, W] each
    plan: Plan = dataclasses.field(metadata={"static": True})
    part: Part | None = dataclasses.field(default=None, metadata={"static": True})


def init_storage(spec: CacheSpec, plan: Plan, device=None) -> Storage:
    """Block arrays of the plan's sizes, all zero.

    Args:
      device: a jax Device or Sharding; None takes jax's default device.

    Raises:
      SpecError: when the plan was made for another spec, or a group has 2^31 entries or more.
    """
    check_plan(spec, plan)
    plan_checks.check_entries(plan)
    arrays = [words.word_of(plan, array) for array in range(len(plan.array_rows))]
    return Storage(
        tuple(
            jnp.zeros((rows, size // word.itemsize), word, device=device)
            for rows, size, word in zip(plan.array_rows, plan.array_bytes, arrays, strict=True)
        ),
        plan,
    )


def write(
    storage: Storage, view: StepView, layer, values: Mapping, tag: str | None = None
) -> Storage:
    """Writes the step's tokens of one layer.

    Args:
      view: of this step; only positions that it covers, in blocks that the row holds, are written.
      layer: an int, or a traced i32[] under a scan, for which `tag` must mean one group.
      values: every buffer of the region: [S, T, *entry] for a rectangular view, [T, *entry] for a
        flat one, in the payload's dtype. A compressed region takes one value a token and keeps
        those at the last position of an entry. A region with scales takes them without the scales,
        the quantised ones in its compute_dtype: float32, bfloat16 or float16. With scales per
        block, several calls for one block must bring its tokens in order: the one with the first
        begins the block anew.
      tag: which of the layer's regions; may be left out where there is one.

    Returns:
      The storage written to. A traced layer without such a region writes nothing.

    Raises:
      SpecError: for an unknown layer or tag, or a region of recurrent state.
      ValueError: for missing or unknown buffers, wrong shapes or dtypes.
    """
    group, layer = _locate(storage, view, layer, tag, state=False)
    lead = view.seq_lens.shape if view.rows is None else view.rows.shape
    payload = layers.payload(
        storage.plan.spec.groups[group], values, lead, any_width=view.rows is None
    )
    blocks = entries.write(_array(storage, group), view, layer, payload, group, storage.part)
    return _with_blocks(storage, group, blocks)


def read(
    storage: Storage,
    view: StepView,
    layer,
    tag: str | None = None,
    rows=None,
    max_blocks: int | None = None,
    own: bool = False,
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Gathers what the rows keep of one layer, this step's tokens included, in position order.

    The keys of an `all` group begin at position 0, those of a window or chunk at the block of the
    first position that a query at n reads; n is the row's settled length.

    Args:
      layer, tag: as for `write`.
      rows: i32[R], which rows to read; None reads all S. A row outside 0..S-1 is all masked.
      max_blocks: at least 1; reads no more than so many blocks a row, counted from the first.
      own: of blocks divided over a mesh axis under one bookkeeping, read those of this device only,
        which takes no collective; the mask says which. For attention that merges what the devices
        found. Elsewhere a device has all blocks.

    Returns:
      ({buffer: [R, Lk, *entry]}, mask bool[R, Lk]). The mask holds where the position is one that
      a query at n or later may read, lies before the end of this step's tokens and in a block that
      the row holds; causality within the step is the caller's, from `view.key_positions`. Masked
      places are exactly 0. A compressed entry is shown once all its tokens are there. A traced
      layer without such a region is all masked. Quantised values come back in the region's
      compute_dtype, within the bounds that `kvpool.scales` states.

    Raises:
      SpecError: for an unknown layer or tag, or a region of recurrent state.
      ValueError: for a wrong `rows` or `max_blocks`.
    """
    group, layer = _locate(storage, view, layer, tag, state=False)
    places = step.places_of(view, group, rows, max_blocks)
    part = storage.part
    return entries.read(_array(storage, group), places, layer, storage.plan, group, part, bool(own))


def read_state(
    storage: Storage, view: StepView, layer, tag: str | None = None
) -> dict[str, jax.Array]:
    """The recurrent state of one layer: {buffer: [S, *shape]}.

    It is 0 for a row with n = 0 settled tokens or without a state block.

    Raises:
      SpecError: for an unknown layer or tag, or a region that is no recurrent state.
    """
    group, layer = _locate(storage, view, layer, tag, state=True)
    return entries.read_state(_array(storage, group), view, layer, group, storage.part)


def write_state(
    storage: Storage, view: StepView, layer, values: Mapping, tag: str | None = None
) -> Storage:
    """Writes the recurrent state of one layer, for the rows that have tokens in this step.

    Args:
      layer, tag: as for `write`.
      values: every buffer of the region, [S, *shape], whatever the view, in the payload's dtype.

    Returns:
      The storage written to; rows without tokens or without a state block are skipped.

    Raises:
      SpecError: for an unknown layer or tag, or a region that is no recurrent state.
      ValueError: for missing or unknown buffers, wrong shapes or dtypes.
    """
    group, layer = _locate(storage, view, layer, tag, state=True)
    payload = layers.payload(storage.plan.spec.groups[group], values, view.seq_lens.shape)
    blocks = entries.write_state(_array(storage, group), view, layer, payload, group, storage.part)
    return _with_blocks(storage, group, blocks)


def copy_blocks(storage: Storage, copies: Mapping[str, tuple]) -> Storage:
    """Does the block copies that one result owes, all layers of a block at once.

    Args:
      copies: {group: (src, dst)}, i32[K] each; a pair with an absent source or target is skipped.
        A target must be no other pair's source, which the targets of one result, fresh blocks,
        never are: copy for each result by itself, before any write of the step.

    Raises:
      SpecError: for an unknown group.
      ValueError: for ids of a wrong shape or dtype.
    """
    spec = storage.plan.spec
    for name, (src, dst) in copies.items():
        group = spec.group_index(name)
        src = int32(f"copies[{name!r}] source", src, (None,))
        dst = int32(f"copies[{name!r}] target", dst, src.shape)
        if storage.part is not None:
            there = indices.is_valid(src, storage.plan.pool_sizes[storage.plan.pool_of[group]])
            dst = jnp.where(there, dst, NULL_BLOCK)
            storage = import_blocks(storage, name, dst, export_blocks(storage, name, src))
            continue
        slab = words.words_of(storage.plan, group).slab
        blocks = pallas_kernels.copy_blocks(_array(storage, group), src, dst, slab=slab)
        storage = _with_blocks(storage, group, blocks)
    return storage


def export_blocks(storage: Storage, group: str, ids) -> jax.Array:
    """The bytes of blocks, for another storage of the same spec.

    Args:
      ids: i32[K]; an absent id gives zeros.

    Returns:
      u[K, W], K * bytes_per_block bytes: each block one contiguous run.

    Raises:
      SpecError: for an unknown group.
      ValueError: for ids of a wrong shape or dtype.
    """
    index, own, ids = _own_blocks(storage, group, ids)
    data = pallas_kernels.state_gather(
        _array(storage, index), ids, shape=(own.block,), dtype=own.word, slab=own.slab
    )
    return data if storage.part is None else storage.part.whole(data)


def import_blocks(storage: Storage, group: str, ids, data) -> Storage:
    """Puts bytes that `export_blocks` gave into blocks.

    Args:
      ids: i32[K], no block twice; an absent id is skipped.
      data: u[K, W], as `export_blocks` returns it, also in the words of another plan.

    Raises:
      SpecError: for an unknown group.
      ValueError: for ids or data of a wrong shape or dtype.
    """
    index, own, ids = _own_blocks(storage, group, ids)
    data = layers.checked(
        "data", layers.as_words(data, own.word), (*ids.shape, own.block), own.word
    )
    blocks = pallas_kernels.paged_scatter(_array(storage, index), ids, data, slab=own.slab)
    return _with_blocks(storage, index, blocks)


def import_layer(storage: Storage, group: str, ids, layer, data) -> Storage:
    """Puts one layer's part of what `export_blocks` gave into blocks.

    Args:
      ids: as for `import_blocks`.
      layer: index in the group, an int or i32[].
      data: u[K, w], w words of a layer: those of `export_blocks` from word layer * w on.

    Raises:
      SpecError: for an unknown group.
      ValueError: for ids or data of a wrong shape or dtype.
    """
    index, own, ids = _own_blocks(storage, group, ids)
    data = layers.checked("data", data, (*ids.shape, own.layer), own.word)
    blocks = pallas_kernels.state_scatter(
        _array(storage, index), ids, (data,), starts=(0,), offset=layer * own.layer, slab=own.slab
    )
    return _with_blocks(storage, index, blocks)


def _own_blocks(storage: Storage, group: str, ids):
    """(index of the group, its words, ids i32[K] as this device counts them)."""
    index = storage.plan.spec.group_index(group)
    ids = int32("ids", ids, (None,))
    if storage.part is not None:
        ids = storage.part.own(storage.plan, index, ids)
    return index, words.words_of(storage.plan, index), ids


def _array(storage: Storage, group: int) -> jax.Array:
    """The array that a group's blocks lie in."""
    blocks = storage.blocks[storage.plan.array_of[group]]
    if blocks.ndim != 2:
        raise SpecError(
            f"storage: wanted one device's u[N, W], got {blocks.ndim} axes, those of a mesh; "
            "call its verbs in a function given to `on_mesh`"
        )
    return blocks


def _with_blocks(storage: Storage, group: int, blocks: jax.Array) -> Storage:
    array = storage.plan.array_of[group]
    before, after = storage.blocks[:array], storage.blocks[array + 1 :]
    return dataclasses.replace(storage, blocks=(*before, blocks, *after))


def _locate(storage, view, layer, tag, state: bool):
    """(group index, index in the group i32[], NULL for a traced layer without the region)."""
    spec = storage.plan.spec
    if view.plan != storage.plan:
        raise SpecError("view: made from a state of another plan than the storage's")
    group, layer = layers.locate(spec, layer, tag)
    if spec.groups[group].is_state != state:
        kept = "recurrent state; use read_state and write_state"
        kept = "tokens; use read and write" if state else kept
        raise SpecError(f"group {spec.groups[group].name!r} keeps {kept}")
    return group, layer
