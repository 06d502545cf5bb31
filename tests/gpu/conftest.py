"""Fails where there is no GPU to prove anything on, and says what a run elsewhere is worth."""

import sys
from pathlib import Path

import jax
import pytest

TESTS = Path(__file__).parents[1]
for folder in ("tests/pallas_kernels", "benchmarks", "examples"):
    sys.path.insert(0, str(TESTS.parent / folder))

from where import IS_GPU, ON  # noqa: E402

from pallas_kernels import target  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def _a_gpu():
    if IS_GPU and target.target() != "gpu":
        pytest.fail(
            "NOTHING WAS PROVEN: these tests want a Hopper GPU or a later one, and jax has "
            f"{jax.devices()[0].device_kind}",
            pytrace=False,
        )


def pytest_terminal_summary(terminalreporter):
    if not IS_GPU:
        terminalreporter.section(f"GPU tests on: {ON}")
        terminalreporter.line("This tests the tests. Nothing was proven about a GPU.")
