"""Caches on a mesh of eight CPU devices, which only a process of its own can have."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "mesh"
LATER = {"on_mesh_bookkeeping", "on_mesh_content"}  # the model's run does all of it too
RUN_LONG = {"on_mesh_model"}  # the programs of the others compile for longer than they run
MODULES = sorted(path.stem for path in FOLDER.glob("on_mesh_*.py"))


def on_eight_devices(module: str, marked: str) -> None:
    flags = "--xla_force_host_platform_device_count=8"
    if module not in RUN_LONG:
        flags += " --xla_backend_optimization_level=0"
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-m", marked]
    done = subprocess.run(
        [*command, str(FOLDER / f"{module}.py")],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    nothing_to_run = done.returncode == 5 and "deselected" in done.stdout
    assert done.returncode == 0 or nothing_to_run, done.stdout + done.stderr


@pytest.mark.parametrize(
    "module",
    [pytest.param(m, marks=pytest.mark.slow) if m in LATER else m for m in MODULES],
)
def test_on_eight_devices(module):
    on_eight_devices(module, "not slow")


@pytest.mark.slow
@pytest.mark.parametrize("module", MODULES)
def test_more_on_eight_devices(module):
    on_eight_devices(module, "slow")
