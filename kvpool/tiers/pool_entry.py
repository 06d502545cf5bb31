"""PoolEntry: one kind of host memory of a group, and what must hold among the entries of a group.

One entry is the anchor, the others are sidecars. A sidecar has a pool of its own, or is derived:
then its memory is addressed by the blocks of the entry that it names, and it owns none.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from kvpool.spec import CacheSpec
from kvpool.status import SpecError
from kvpool.tiers.host_pool import HostPool

if TYPE_CHECKING:
    from kvpool.tiers.pool_group import Allocation


@dataclasses.dataclass(frozen=True, eq=False)
class PoolEntry:
    """One kind of host memory.

    Args:
      name: what requests call it.
      pool: whose blocks it hands out. Of a derived entry it only says how much memory there is and
        how many tokens a block covers, and may be left out.
      anchor: whether it is the one that the others accompany.
      source: of a derived entry the name of the entry whose blocks it takes over.
      group: the group of the spec whose blocks it keeps; None for one of its name.
      layers: the layers of the model in a block, in their order.
      draft_layers: how many of those, the last ones, are packed draft layers.
      reclaim: gives the allocations that may go when blocks are short, the first to go first. It
        may be called at any time, must not change anything and must not name one whose bytes are on
        their way. Those that go are told by `Allocation.reclaimed`.
    """

    name: str
    pool: HostPool | None = None
    anchor: bool = False
    source: str | None = None
    group: str | None = None
    layers: tuple[int, ...] = ()
    draft_layers: int = 0
    reclaim: Callable[[], Iterable["Allocation"]] | None = None


def entries_of(
    spec: CacheSpec, num_blocks: dict[str, int], anchor: str, reclaim=None
) -> list[PoolEntry]:
    """An entry for every group of the spec, named as the group.

    Args:
      num_blocks: {group name: host blocks}; 0 where it is left out.
      anchor: a group.
      reclaim: as in `PoolEntry`, for every entry.

    Raises:
      SpecError: for an unknown group.
    """
    for name in (*num_blocks, anchor):
        spec.group_index(name)
    first_draft = len(spec.layers) - sum(draft.layers for draft in spec.drafts)
    return [
        PoolEntry(
            group.name,
            HostPool(
                num_blocks.get(group.name, 0),
                group.bytes_per_block,
                None if group.is_state else group.block_size,
            ),
            anchor=group.name == anchor,
            group=group.name,
            layers=group.layers,
            draft_layers=sum(layer >= first_draft for layer in group.layers),
            reclaim=reclaim,
        )
        for group in spec.groups
    ]


def checked(entries: Iterable[PoolEntry]) -> dict[str, PoolEntry]:
    """{name: entry} of entries that go together.

    Raises:
      SpecError: naming the entry and what is wrong with it.
    """
    entries = tuple(entries)
    by_name: dict[str, PoolEntry] = {}
    for entry in entries:
        if not isinstance(entry, PoolEntry):
            raise SpecError(f"entries: wanted PoolEntry, got {entry!r}")
        if entry.name in by_name:
            raise SpecError(f"entry {entry.name!r}: there are two of this name")
        by_name[entry.name] = entry
    anchors = [entry.name for entry in entries if entry.anchor]
    if len(anchors) != 1:
        got = f"{len(anchors)}: {', '.join(anchors)}" if anchors else "none"
        among = ", ".join(by_name) or "no entries"
        raise SpecError(f"entries: wanted one with anchor=True, got {got} among {among}")
    owners: dict[int, str] = {}
    for entry in entries:
        if entry.source is not None:
            _check_derived(entry, by_name)
        elif not isinstance(entry.pool, HostPool):
            raise SpecError(f"entry {entry.name!r}: wanted a HostPool or a source")
        elif id(entry.pool) in owners:
            raise SpecError(
                f"entry {entry.name!r}: wanted a pool of its own, got that of "
                f"{owners[id(entry.pool)]!r}; a derived entry names a source instead"
            )
        else:
            owners[id(entry.pool)] = entry.name
        _check_layers(entry)
    return by_name


def _check_derived(entry: PoolEntry, by_name: dict[str, PoolEntry]) -> None:
    name, source = f"entry {entry.name!r}", by_name.get(entry.source or "")
    if source is None or source is entry:
        others = ", ".join(other for other in by_name if other != entry.name)
        raise SpecError(f"{name}: no source {entry.source!r}; the other entries are {others}")
    if source.source is not None:
        raise SpecError(
            f"{name}: its source {source.name!r} is itself derived; name {source.source!r}"
        )
    if entry.anchor or entry.reclaim is not None:
        what = "an anchor" if entry.anchor else "something to reclaim"
        raise SpecError(f"{name}: {what} has blocks of its own, but this one has a source")
    pool, theirs = entry.pool, source.pool
    if pool is None or theirs is None:
        return
    if pool.num_blocks < theirs.num_blocks:
        raise SpecError(
            f"{name}: wanted room for the {theirs.num_blocks} blocks of its source "
            f"{source.name!r}, got {pool.num_blocks}"
        )
    if pool.block_tokens != theirs.block_tokens:
        raise SpecError(
            f"{name}: wanted blocks of {theirs.block_tokens} tokens like its source "
            f"{source.name!r}, got {pool.block_tokens}"
        )


def _check_layers(entry: PoolEntry) -> None:
    if not 0 <= entry.draft_layers <= len(entry.layers):
        raise SpecError(
            f"entry {entry.name!r}: wanted at most its {len(entry.layers)} layers as draft_layers, "
            f"got {entry.draft_layers}"
        )
