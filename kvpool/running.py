"""Running sums that stay on one core."""

import jax
import jax.numpy as jnp
import numpy as np

RUN = 16


def running_sum(values: jax.Array) -> jax.Array:
    """Inclusive sums of i32[..., n] along the last axis.

    On the CPU `jnp.cumsum` of a few hundred numbers becomes operations that XLA spreads over
    threads, which costs more than the sums. This is a product with a triangle for runs of 16, then
    the same over the runs; and as a product is not fused with what makes its input, that is
    computed once.
    """
    size, padding = values.shape[-1], [(0, 0)] * (values.ndim - 1)
    if size <= RUN:
        return values @ np.tri(size, dtype=np.int32).T
    runs = jnp.pad(values, [*padding, (0, -size % RUN)]).reshape(*values.shape[:-1], -1, RUN)
    within = running_sum(runs)
    before = jnp.pad(running_sum(within[..., -1]), [*padding, (1, 0)])[..., :-1, None]
    return (within + before).reshape(*values.shape[:-1], -1)[..., :size]
