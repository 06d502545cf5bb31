"""What all tests share: the platform, hypothesis profiles, and a word where a proof is missing.

The helpers of the tests are modules of their own beside this file.
"""

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

COMPILER = Path(sys.prefix) / "gpu-compiler"  # where `make` puts it: no part of the environment
UNPROVEN = "NOT PROVEN"  # how the reason of a skip begins that leaves a claim without its proof

settings.register_profile(
    "default",
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    print_blob=True,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config):
    """All but the GPU's own tests run on the CPU, and can compile for a GPU that is not there."""
    if "gpu" not in config.option.markexpr.replace("not gpu", ""):
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        if "not slow" in config.option.markexpr:
            # Most of the time goes into compiling what runs once. LLVM's part of that is left out;
            # the slow tests, `make demo` and the acceptance suite have it.
            os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        sys.path.append(str(COMPILER))


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Lets go of compiled programs before the kernel's limit on a process's mappings is near.

    A process has 65,530 by default; LLVM, which takes one or more a program, ends it beyond that.
    """
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > 25_000:
        import jax  # not before `pytest_configure` has said for which platform

        jax.clear_caches()
        gc.collect()


def pytest_terminal_summary(terminalreporter):
    """Says once more, in red, what was skipped although it is a proof."""
    skipped = terminalreporter.stats.get("skipped", ())
    unproven = [str(report.longrepr[-1]) for report in skipped if UNPROVEN in str(report.longrepr)]
    for reason in sorted(set(unproven)):
        terminalreporter.write_sep("!", f"{reason} ({unproven.count(reason)} tests)", red=True)
