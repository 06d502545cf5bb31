"""The example of chats that share a system prompt."""

import pathlib
import re
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "shared_prompts.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "most"), [((), 3_300), (("--blocks", "144", "--snapshots", "8"), 6_500)]
)
def test_chats_have_the_same_text_with_a_cache_and_compute_less(options, most):
    run = subprocess.run([sys.executable, EXAMPLE, *options], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "checked: 8 of 8 chats have the same text" in run.stdout
    computed = re.search(r"tokens computed: ([\d,]+) instead of ([\d,]+)", run.stdout).groups()
    fewer, all_tokens = (int(number.replace(",", "")) for number in computed)
    assert fewer < most < all_tokens
    evicted = re.search(r"full: \d+ blocks cached, (\d+) evicted", run.stdout).group(1)
    assert (int(evicted) > 0) == bool(options)
