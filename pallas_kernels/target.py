"""Which implementation an operation takes, by what was asked for and what the device is."""

from collections.abc import Callable

import jax
from jax import lax
from jax._src import config  # the interpreter's switch has no public name

IMPLEMENTATIONS = ("xla", "mosaic_gpu")
HOPPER = 9.0  # the first compute capability with bulk copies
CONSUMER = 12.0  # from here on programs have less shared memory than the kernels take


def run(implementation: str | None, xla: Callable, mosaic_gpu: Callable, *arrays):
    """The result of one of the two, which take the arrays.

    Raises:
      ValueError: for an unknown implementation.
      NotImplementedError: for "mosaic_gpu" where there is no GPU that has it.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation: wanted None, {', '.join(map(repr, IMPLEMENTATIONS))}, "
            f"got {implementation!r}"
        )
    device = None if implementation == "xla" else target()
    if implementation == "mosaic_gpu" and device is None:
        raise NotImplementedError(
            "mosaic_gpu: wanted a Hopper GPU or a later one, got "
            f"{jax.local_devices()[0].device_kind}; None takes what this device supports"
        )
    if device is None:
        return xla(*arrays)
    if device == "interpreter" or implementation == "mosaic_gpu":
        return mosaic_gpu(*arrays)
    # The arrays of a process with a GPU may still live on its CPU.
    return lax.platform_dependent(*arrays, cuda=mosaic_gpu, default=xla)


def target() -> str | None:
    """What GPU kernels traced now would run on: "interpreter", "gpu", or None for neither.

    A mesh in the context decides before the devices of this process do, so that a machine without
    a GPU can compile for one.
    """
    if interpreting():
        return "interpreter"
    device = _device()
    if device is None or device.platform not in ("gpu", "cuda") or _is_divided():
        return None
    return "gpu" if HOPPER <= _capability(device) < CONSUMER else None


def _is_divided() -> bool:
    """Whether XLA divides arrays over a mesh here; a kernel is not divided, but by a shard_map."""
    mesh = jax.sharding.get_abstract_mesh()
    manual = jax.sharding.AxisType.Manual
    sizes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 and kind != manual for size, kind in sizes)


def _capability(device) -> float:
    """Compute capability; 0 for a GPU that has none, such as one of another vendor.

    An abstract device does not say it: a device of its kind in this process does, and where there
    is none it is taken to be recent enough.
    """
    alike = [d for d in jax.local_devices() if d.device_kind == device.device_kind]
    told = [d.compute_capability for d in (device, *alike) if hasattr(d, "compute_capability")]
    try:
        return float(told[0]) if told else HOPPER
    except ValueError:
        return 0.0


def interpreting() -> bool:
    """Whether the context asks for Mosaic's interpreter in the place of a GPU."""
    asked = getattr(config, "pallas_tpu_interpret_mode_context_manager", _OFF).value
    return "GPU" in type(asked).__name__  # one switch for both: a TPU's interpreter is not ours


def num_cores() -> int:
    """Streaming multiprocessors of the target."""
    device = _device()
    cores = getattr(device, "num_cores", None) or getattr(device, "core_count", None)
    return cores or 132  # of an H100


def _device():
    """The device of the mesh in the context, else of this process: abstract, or one of many."""
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return jax.local_devices()[0] if abstract is None else abstract


class _OFF:
    value = None
