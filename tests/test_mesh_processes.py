"""A cache on the devices of two processes, which meet on the loopback interface."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "mesh" / "one_of_two_processes.py"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "pairs",
    [
        ["shards", "replicated", "ranks", "per_shard"],
        ["shards", "per_shard", "ranks", "replicated"],
    ],
)
def test_two_processes_of_four_devices(pairs):
    port = str(free_port())
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    runs = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(number), port, *pairs],
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        for number, run in enumerate(runs):
            told, _ = run.communicate(timeout=300)
            assert f"process {number} compared all" in told, told
    finally:
        for run in runs:
            run.kill()
