"""HostTier: host memory for the blocks of every group of a spec."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

from kvpool import regions
from kvpool.buffers import count
from kvpool.plan import Plan
from kvpool.spec import CacheSpec
from kvpool.status import SpecError
from kvpool.tiers.copies import CHUNK_BYTES
from kvpool.tiers.host_blocks import BLOCK_FIRST, HostBlocks
from kvpool.tiers.pool_entry import entries_of
from kvpool.tiers.pool_group import Allocation, HostPoolGroup

# Given a group that is short of blocks, the allocations that may go for it, the first to go first.
Reclaimer = Callable[[str], Iterable[Allocation]]


class HostTier:
    """The pools of host memory, and the memory itself.

    Args:
      spec: of the storages whose blocks come here.
      num_blocks: {group: host blocks}; 0 where it is left out.
      anchor: a group; None for the first that keeps all positions.
      layout: of the host memory, `host_blocks.BLOCK_FIRST` or `LAYER_FIRST`.
      device: whose pinned memory to take, as in `HostBlocks`.
      chunk_bytes: of device memory for one chunk of a copy; two are on their way at a time.
      reclaim: what may go for a request that does not fit, as in `PoolEntry`.
      simulated: whether there is no memory behind the pools, where storages are None.

    Raises:
      SpecError: for an unknown group, a number that is none, no group to be the anchor.
    """

    def __init__(
        self,
        spec: CacheSpec,
        num_blocks: Mapping[str, int],
        *,
        anchor: str | None = None,
        layout: str = BLOCK_FIRST,
        device=None,
        chunk_bytes: int = CHUNK_BYTES,
        reclaim: Callable[[], Iterable[Allocation]] | None = None,
        simulated: bool = False,
    ):
        if anchor is None:
            anchor = next((g.name for g in spec.groups if g.region.kind == regions.ALL), None)
        if anchor is None:
            names = ", ".join(group.name for group in spec.groups)
            raise SpecError(f"anchor: no group keeps all positions; name one of {names}")
        self.spec, self.chunk_bytes = spec, count("chunk_bytes", chunk_bytes, 1)
        self.reclaimers: list[Reclaimer] = [lambda group: reclaim()] if reclaim else []
        entries = entries_of(spec, dict(num_blocks), anchor)
        self.pools = HostPoolGroup(
            dataclasses.replace(entry, reclaim=functools.partial(self._offered, entry.name))
            for entry in entries
        )
        behind = {} if simulated else num_blocks
        self.memory = {
            group.name: HostBlocks(group, behind.get(group.name, 0), layout, device)
            for group in spec.groups
        }

    @classmethod
    def of_ratio(cls, plan: Plan, ratio: float, **options) -> "HostTier":
        """So many blocks for each one of the plan, rounded down; `options` as in the class."""
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not ratio >= 0:
            raise SpecError(f"ratio: wanted a number of at least 0, got {ratio!r}")
        blocks = {name: int(number * ratio) for name, number in plan.num_blocks.items()}
        return cls(plan.spec, blocks, **options)

    def _offered(self, group: str) -> Iterator[Allocation]:
        for reclaimer in self.reclaimers:
            yield from reclaimer(group)

    def check_plan(self, plan: Plan) -> None:
        """SpecError unless it is a plan of this spec."""
        if plan.spec != self.spec:
            raise SpecError(
                f"host tier: made for the spec {self.spec.digest[:12]}, got a state or storage of "
                f"the spec {plan.spec.digest[:12]}"
            )
