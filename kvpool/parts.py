"""Parts: blocks that are divided among the devices of a mesh axis, under one bookkeeping for all.

Of a pool of N blocks the device at place d of the axis has blocks d*N/count .. (d+1)*N/count - 1.
Ids are those of the whole pool. A device turns them into its own, where those of the others are
absent: it writes only its own blocks, and what it reads of the others' is zero bits, so that the
sum of the words over the axis is what the one device that has the block read.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kvpool import indices
from kvpool.indices import NULL_BLOCK
from kvpool.plan import Plan
from kvpool.status import SpecError


@dataclasses.dataclass(frozen=True)
class Part:
    """An equal share of every pool for each of the `count` devices along a mesh axis."""

    axis: str
    count: int

    def own(self, plan: Plan, group: int, ids: jax.Array, each: int = 1) -> jax.Array:
        """The ids of a group's blocks i32[...] as this device counts them, NULL for the others'.

        Args:
          each: slots of a block, where `ids` are slots.

        Raises:
          SpecError: outside of a shard_map over the axis.
        """
        share = plan.pool_sizes[plan.pool_of[group]] // self.count * each
        ids = jnp.where(ids >= 0, ids - self._place() * share, NULL_BLOCK)
        return jnp.where(indices.is_valid(ids, share), ids, NULL_BLOCK)

    def whole(self, values: jax.Array) -> jax.Array:
        """What the devices read together, where at most one of them has bits that are not zero."""
        word = np.dtype(f"uint{8 * values.dtype.itemsize}")
        # A sum of floats would lose the sign of a zero, and the bits of a NaN.
        bits = lax.psum(lax.bitcast_convert_type(values, word), self.axis)
        return lax.bitcast_convert_type(bits, values.dtype)

    def _place(self) -> jax.Array:
        try:
            return lax.axis_index(self.axis)
        except NameError as error:
            raise SpecError(
                f"storage: its blocks are divided over the mesh axis {self.axis!r}; "
                "call its verbs in a function given to `on_mesh`"
            ) from error
