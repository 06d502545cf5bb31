"""The demo's model gives the same logits however its tokens are cut, and the demo the same text."""

import pathlib
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
sys.path.insert(0, str(EXAMPLES))

from flax import nnx  # noqa: E402

from memories import DenseCache, NoCache  # noqa: E402
from tiny_model import Config, TinyModel  # noqa: E402


@pytest.mark.parametrize("width", [1, 7, 64])
def test_chunks_of_any_width_give_the_logits_of_the_whole(width):
    """To rounding: the sums are the same ones in another order.  Rows are of different lengths."""
    config = Config()
    model = TinyModel(config, nnx.Rngs(0))
    rows, length = 2, 80
    lengths = np.array([length, length - 13])
    tokens = jax.random.randint(jax.random.key(1), (rows, length), 0, 256)
    whole = model.logits(model(tokens, NoCache(config, rows, length)))

    @jax.jit
    def step(arrays, tokens, num_tokens):
        memory = DenseCache(config, arrays, num_tokens, width)
        return model.logits(model(tokens, memory)), memory.arrays

    arrays = DenseCache.zeros(config, rows, length + width, width)
    for start in range(0, length, width):
        counts = np.clip(lengths - start, 0, width).astype(np.int32)
        some = jnp.pad(tokens[:, start : start + width], ((0, 0), (0, width)))[:, :width]
        logits, arrays = step(arrays, some, counts)
        for row, count in enumerate(counts):
            want = whole[row, start : start + count]
            np.testing.assert_allclose(logits[row, :count], want, atol=1e-4)


@pytest.mark.slow
def test_the_demo_writes_the_same_text_with_too_few_blocks(tmp_path):
    def digest(*options):
        command = [sys.executable, EXAMPLES / "decode_loop.py", "--out", tmp_path / "map.png"]
        run = subprocess.run([*command, *options], capture_output=True, text=True, check=True)
        assert "traces: chunk_step 1, decode_steps 1" in run.stdout
        preempted, text = re.search(
            r"preempted: (\d+); digest of all text: (\w+)", run.stdout
        ).groups()
        return int(preempted), text

    few, many = digest("--blocks", "96"), digest()
    assert few[0] > 0
    assert many[0] == 0
    assert few[1] == many[1]
    assert (tmp_path / "map.png").stat().st_size > 10_000


@pytest.mark.slow
def test_rows_that_were_pushed_out_resume_and_write_the_same_text():
    """Also where the host holds some of them only, or none."""
    for ratio, saves in ((2.0, True), (0.0, False)):
        command = [sys.executable, EXAMPLES / "preempt_and_resume.py", "--requests", "24"]
        command += ["--blocks", "64", "--host-ratio", str(ratio)]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert run.stdout.count("24 of 24 requests have the same text") == 2
        (_, whole), (preempted, again), (_, resumed) = (
            (int(pushed), int(tokens.replace(",", "")))
            for pushed, tokens in re.findall(r"(\d+) preempted, +([\d,]+) tokens", run.stdout)
        )
        assert preempted > 0
        assert whole < again
        assert resumed == (whole if saves else again)


@pytest.mark.slow
def test_a_second_run_finds_its_prefixes_in_storage(tmp_path):
    """It computes fewer tokens than the first, and writes the same text."""
    computed = []
    for _ in range(2):
        command = [sys.executable, EXAMPLES / "preempt_and_resume.py", "--requests", "24"]
        command += ["--blocks", "64", "--store", tmp_path / "prefixes"]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert run.stdout.count("24 of 24 requests have the same text") == 3
        line = next(line for line in run.stdout.splitlines() if "with a store" in line)
        computed.append(int(re.search(r"([\d,]+) tokens", line)[1].replace(",", "")))
    assert computed[1] < computed[0]
