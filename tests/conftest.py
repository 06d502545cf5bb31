"""What all tests share: the platform, hypothesis profiles, and a word where a proof is missing.

The helpers of the tests are modules of their own beside this file.
"""

import os
import sys
from pathlib import Path

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
        sys.path.append(str(COMPILER))


def pytest_terminal_summary(terminalreporter):
    """Says once more, in red, what was skipped although it is a proof."""
    skipped = terminalreporter.stats.get("skipped", ())
    unproven = [str(report.longrepr[-1]) for report in skipped if UNPROVEN in str(report.longrepr)]
    for reason in sorted(set(unproven)):
        terminalreporter.write_sep("!", f"{reason} ({unproven.count(reason)} tests)", red=True)
