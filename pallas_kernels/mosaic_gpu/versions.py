"""What the kernels ask of jax, and all that differs between its versions."""

import contextlib
import inspect

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import target

WARPGROUP = 128  # CUDA threads of one program
MOST_LOADED = 8 * WARPGROUP  # words that `load` takes at once
MOST_PER_CORE = 16  # programs on a core at a time: 2,048 threads
_AXIS = "program"
# jax 0.10 takes the index by itself, later versions a ref that is indexed.
_LOAD_TAKES_INDEX = "idx" in inspect.signature(plgpu.load).parameters


def num_programs(items: int, per_core: int = MOST_PER_CORE) -> int:
    """Programs of a persistent grid for so many items of work, by the cores of the device."""
    most = 2 if target.interpreting() else per_core * target.num_cores()
    return min(items, most)


def in_place(
    kernel, blocks: jax.Array, *operands: jax.Array, programs: int, name: str
) -> jax.Array:
    """`blocks` as `kernel(blocks ref, *operand refs)`, run by each program, leaves it."""
    mesh = plgpu.Mesh(grid=(programs,), grid_names=(_AXIS,), kernel_name=name)
    params = plgpu.CompilerParams(
        # Unlike the older semantics, these take copies of any multiple of 16 bytes.
        lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
        reduction_scratch_bytes=0,  # nothing is reduced, and two programs have to share a core
    )
    call = pl.kernel(kernel, mesh=mesh, compiler_params=params, name=name)
    ref = jax.new_ref(_varying_as(operands, blocks), memory_space=plgpu.GMEM)
    with jax.enable_x64(False):  # indices are of 32 bits, whatever a Python int is outside
        call(ref, *operands)
    return jax.freeze(ref)


def _varying_as(others: tuple, array: jax.Array) -> jax.Array:
    """The array, which within a shard_map varies over all axes that the others vary over."""

    def axes_of(x) -> frozenset:
        return jax.typeof(x).manual_axis_type.varying

    axes = frozenset().union(*map(axes_of, others)) - axes_of(array)
    return lax.pcast(array, tuple(sorted(axes)), to="varying") if axes else array


def my_items(items: int, programs: int):
    """(count, item of) of this program of a grid: its items are item(0) .. item(count - 1)."""
    program = lax.axis_index(_AXIS)
    count = lax.div(items - program + (programs - 1), programs)
    return count, lambda i: program + i * programs


def load(ref, *index) -> jax.Array:
    """The words at `index`, of which the last is a slice of a power of two up to MOST_LOADED."""
    if target.interpreting():
        return ref[index]  # the interpreter has registers of any layout, and no `plgpu.load`
    layout = _layout(index[-1].size)
    if _LOAD_TAKES_INDEX:
        return plgpu.load(ref, index, layout=layout, optimized=False)
    return plgpu.load(ref.at[index], layout=layout, optimized=False)  # type: ignore[call-arg]


def store(ref, index: tuple, words: jax.Array) -> None:
    """Writes what `load` returned, or zeros, to `index`."""
    if target.interpreting() or not hasattr(plgpu, "store"):
        ref[index] = words
    else:  # later versions refuse words of less than 4 bytes, unless told
        plgpu.store(ref.at[index], words, optimized=False)


def zeros(size: int, dtype) -> jax.Array:
    """Zeros as `load` would return them."""
    value = jnp.zeros((size,), dtype)
    return value if target.interpreting() else plgpu.layout_cast(value, _layout(size))


def _layout(size: int):
    """Word by word, at any alignment; of fewer words than threads, several threads hold each."""
    if size > WARPGROUP:
        return plgpu.Layout.WG_STRIDED((size,), vec_size=1)

    def held_by(times: int) -> tuple:
        return (plgpu.Replicated(times),) if times > 1 else ()

    lanes, warps = min(size, 32), max(size // 32, 1)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((size,), *[(32,)] * (warps > 1), (1,))),
        warp_dims=(*[-3] * (warps > 1), *held_by(WARPGROUP // 32 // warps)),
        lane_dims=(*held_by(32 // lanes), -2),
        vector_dim=-1,
    )


@contextlib.contextmanager
def interpreted():
    """Runs the kernels called in this context in Mosaic's interpreter, on any machine.

    Raises:
      RuntimeError: where the last of them had a race, or there was none to run.
    """
    # Not public before jax 0.12, and there only in part.
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, params

    gpu_callbacks.reset_gpu_interpret_mode_state()
    with params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=True)):
        yield
        jax.effects_barrier()
    if gpu_callbacks._races is None:
        raise RuntimeError("no kernel was run")
    if gpu_callbacks.get_races().races_found:
        raise RuntimeError("the kernel has a race; the interpreter printed where")
