"""The example of two processes: one prefills, the other decodes."""

import pathlib
import subprocess
import sys

import pytest

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "prefill_decode.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(4, 2), (1, 4)])
def test_two_processes_of_unequal_degrees_write_the_text_of_one(ranks):
    options = ["--requests", "2", "--max-new-tokens", "16"]
    options += ["--prefill-ranks", str(ranks[0]), "--decode-ranks", str(ranks[1])]
    run = subprocess.run([sys.executable, EXAMPLE, *options], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "checked: 2 of 2 requests have the text of one process" in run.stdout
    assert "bytes sent / needed: 1.00" in run.stdout
