"""Moves of bits between block arrays and values: arrays in, arrays out, no knowledge of a cache.

A block array is `blocks` u[N, W]: N blocks of W unsigned words. Values of any dtype are cast to
and from words on the way, bit for bit. An id outside `0..N-1` is absent: a write to it is skipped,
a read of it gives 0.

Every operation takes `implementation`: None takes the fastest that the device supports, "xla" is
the one for every device, "mosaic_gpu" names the GPU kernels, which do not exist yet.
"""

from pallas_kernels.copy_blocks import copy_blocks, copy_blocks_reference
from pallas_kernels.paged_gather import paged_gather, paged_gather_reference
from pallas_kernels.paged_scatter import paged_scatter, paged_scatter_reference
from pallas_kernels.state_gather import state_gather, state_gather_reference
from pallas_kernels.state_scatter import state_scatter, state_scatter_reference

__all__ = [
    "copy_blocks",
    "copy_blocks_reference",
    "paged_gather",
    "paged_gather_reference",
    "paged_scatter",
    "paged_scatter_reference",
    "state_gather",
    "state_gather_reference",
    "state_scatter",
    "state_scatter_reference",
]
