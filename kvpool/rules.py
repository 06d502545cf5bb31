"""Rules: which axis of a mesh divides what; see `kvpool.mesh`."""

import dataclasses

from jax.sharding import Mesh, PartitionSpec

from kvpool.status import SpecError

PER_SHARD, REPLICATED = "per_shard", "replicated"


@dataclasses.dataclass(frozen=True)
class Rules:
    """What is divided over which axis of a mesh; None for an axis that there is not.

    Args:
      blocks: the axis over which the blocks are divided.
      heads: the axis over which heads, and the channels of recurrent states, are divided as
        `per_rank` does.
      bookkeeping: "per_shard" or "replicated", over the blocks axis.
    """

    blocks: str | None = "data"
    heads: str | None = "model"
    bookkeeping: str = PER_SHARD

    @property
    def state(self) -> PartitionSpec:
        """Of a state, and of every other array that a shard has."""
        return PartitionSpec(self.blocks) if self.bookkeeping == PER_SHARD else PartitionSpec()

    @property
    def storage(self) -> PartitionSpec:
        """Of the block arrays."""
        return PartitionSpec(self.blocks, self.heads)

    def sizes(self, mesh: Mesh) -> tuple[int, int]:
        """(shards, ranks): the devices along the two axes.

        Raises:
          SpecError: for what is no mesh, naming an axis that it lacks, one that is to divide both,
            or an unknown bookkeeping.
        """
        if not isinstance(mesh, Mesh):
            raise SpecError(f"mesh: wanted a jax.sharding.Mesh, got {mesh!r}")
        for name in ("blocks", "heads"):
            axis = getattr(self, name)
            if axis is not None and axis not in mesh.axis_names:
                there = ", ".join(map(repr, mesh.axis_names))
                raise SpecError(
                    f"rules: {name}={axis!r} is no axis of the mesh, which has {there}; name one "
                    "of them, or None where nothing is to be divided"
                )
        if self.blocks is not None and self.blocks == self.heads:
            raise SpecError(
                f"rules: wanted two axes for blocks and heads, got {self.heads!r} twice"
            )
        if self.bookkeeping not in (PER_SHARD, REPLICATED):
            raise SpecError(
                f"rules: wanted bookkeeping {PER_SHARD!r} or {REPLICATED!r}, "
                f"got {self.bookkeeping!r}"
            )
        sizes = {None: 1, **mesh.shape}
        return sizes[self.blocks], sizes[self.heads]
