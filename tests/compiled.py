"""Compiling for a GPU that is not there: XLA and Mosaic, down to machine code."""

import contextlib
import dataclasses
import functools
import math
import os
import re
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import topologies

TARGETS = Path(__file__).parent / "gpu_targets"
# One a process: Mosaic keeps the first architecture that it compiled for.
CARD = os.environ.get("KVPOOL_CARD", "h200")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What came out; of each kernel the assembly, and what the assembler said."""

    temporary: int  # bytes
    aliased: int  # bytes
    program: str  # XLA's, optimised
    has_machine_code: bool
    kernels: tuple[str, ...]  # PTX
    remarks: tuple[str, ...]
    passes: tuple[str, ...]  # Mosaic's own program, pass by pass

    def copies(self, shape: tuple[int, ...]) -> int:
        """Copies of arrays of a shape, in whatever form XLA writes them."""
        array = rf"\w+\[{','.join(map(str, shape))}\]"
        return len(re.findall(rf"= \(?{array}\S*.* copy(-start)?\(", self.program))

    @property
    def launches(self) -> int:
        """Kernels of ours in the program, each counted where it is called."""
        return self.program.count('custom_call_target="mosaic_gpu')

    @property
    def spilled(self) -> int:
        """Bytes of registers that did not fit, over all kernels."""
        found = re.findall(r"(\d+) bytes (?:spill|stack)", "".join(self.remarks))
        return sum(map(int, found))

    @property
    def shared_memory(self) -> int:
        """Most bytes that a program of a kernel takes."""
        sizes = [re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", log) for log in self.passes]
        return max(int(size) for found in sizes for size in (*found, 0))

    @property
    def registers(self) -> int:
        """Most registers that a thread of a kernel takes."""
        return max(map(int, re.findall(r"Used (\d+) registers", "".join(self.remarks))))


@functools.cache
def gpu_mesh(**axes: int) -> jax.sharding.Mesh:
    """A mesh of so many GPUs of the kind CARD, one by default; skips without a compiler for it."""
    axes = axes or {"gpu": 1}
    description = (TARGETS / f"{CARD}.txtpb").read_text()
    try:
        topology = topologies.get_topology_desc(
            platform="cuda",
            topology=f"1x1x{math.prod(axes.values())}",
            target_config=description,
        )
    except Exception as error:
        pytest.skip(f"NOT PROVEN: no kernel was compiled for a GPU, since {error!r:.150}")
    devices = np.array(topology.devices).reshape(*axes.values())
    return jax.sharding.Mesh(devices, tuple(axes))


def compiled(function, *arrays, donate=(), mesh=None, **static) -> Compiled:
    """`function` compiled, for arrays of which only shapes, dtypes and divisions of a `mesh` count.

    A function that is jitted already may have `static` arguments. A kernel that this process has
    compiled before says nothing the second time.
    """
    mesh = gpu_mesh() if mesh is None else mesh
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def shaped(leaf):
        if not hasattr(leaf, "dtype"):
            return leaf
        sharding = getattr(leaf, "sharding", None) if mesh.size > 1 else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding or everywhere)

    shapes = jax.tree.map(shaped, arrays)
    jitted = function if hasattr(function, "lower") else jax.jit(function, donate_argnums=donate)
    with jax.set_mesh(mesh), _dumped() as dump:
        program = jitted.lower(*shapes, **static).compile()
        kernels, remarks, passes = (
            tuple(path.read_text() for path in sorted(dump.glob(ending)))
            for ending in ("*.ptx", "*.ptxas", "*.mlir-passes.log")
        )
    memory = program.memory_analysis()
    return Compiled(
        temporary=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        program=program.as_text(),
        has_machine_code=b"\x7fELF" in program.runtime_executable().serialize(),
        kernels=kernels,
        remarks=remarks,
        passes=passes,
    )


@contextlib.contextmanager
def _dumped():
    """A folder into which Mosaic writes what it generates."""
    with tempfile.TemporaryDirectory() as folder:
        wanted = {"TO": folder, "PTX": "1", "PTXAS": "1"}
        os.environ.update({f"MOSAIC_GPU_DUMP_{name}": value for name, value in wanted.items()})
        try:
            yield Path(folder)
        finally:
            for name in wanted:
                del os.environ[f"MOSAIC_GPU_DUMP_{name}"]
