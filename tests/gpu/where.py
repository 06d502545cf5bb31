"""Where the tests of this folder run: on the GPU, or elsewhere to test the tests themselves.

    pytest -m gpu                                        on a Hopper GPU or a later one
    KVPOOL_GPU_TESTS_ON=cpu pytest -m gpu                the XLA implementation, small
    KVPOOL_GPU_TESTS_ON=interpreter pytest -m gpu        the kernels in Mosaic's interpreter, small

Only the first says anything about a GPU.
"""

import contextlib
import os

import jax

from pallas_kernels.mosaic_gpu.versions import interpreted
from shapes import Scale

PLACES = ("gpu", "cpu", "interpreter")
ON = os.environ.get("KVPOOL_GPU_TESTS_ON", "gpu")
if ON not in PLACES:
    raise ValueError(f"KVPOOL_GPU_TESTS_ON: wanted one of {PLACES}, got {ON!r}")

IS_GPU = ON == "gpu"
NAMED = "xla" if ON == "cpu" else "mosaic_gpu"  # the implementation that is asked for by name
SCALE = Scale(pool_bytes=1 << 30, call_bytes=1 << 24) if IS_GPU else Scale.tiny()
ORDERS = {"gpu": 40, "cpu": 4, "interpreter": 2}[ON]  # random ones that a move is repeated in
if not IS_GPU:
    jax.config.update("jax_platforms", "cpu")
running = interpreted if ON == "interpreter" else contextlib.nullcontext
