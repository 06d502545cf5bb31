"""The demo's serving loop on the GPU: its bookkeeping is the CPU's, its text that of no cache."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lockstep import leaves_equal
from where import IS_GPU, ON, running

import decode_loop
import kvpool as kv
import paged_memory
from tiny_model import END, load

pytestmark = pytest.mark.gpu
REQUESTS, ROWS, BLOCKS, STEPS, CONTEXT = 10, 4, 26, 8, 192


class Watched:
    """Takes the picture's place in the loop and keeps the bookkeeping of every dispatch."""

    def __init__(self):
        self.states = []

    def record(self, server):
        self.states.append(jax.device_get(server.state))


def served():
    """(bookkeeping after every dispatch, tokens of every request, storage, preemptions)."""
    model = load()
    spec = paged_memory.cache_spec(model.config)
    plan = decode_loop.plan_of(spec, ROWS, BLOCKS, CONTEXT)
    server = decode_loop.Server(model, spec, plan, 0, 0.0)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 256, rng.integers(3, 120)).tolist() for _ in range(REQUESTS)]
    requests = [
        decode_loop.Request(i, len(p), min(len(p) + 60, CONTEXT), p) for i, p in enumerate(prompts)
    ]
    watched = Watched()
    decode_loop.serve(server, requests, STEPS, watched)
    texts = [request.tokens for request in requests]
    return watched.states, texts, jax.device_get(server.storage), server.preemptions


@pytest.fixture
def _chosen_beforehand(monkeypatch):
    """Tokens hang on the request and the position alone, unless a logit is NaN.

    Devices round differently, so the best of two tokens that are nearly as good may change; where
    a text ends decides what is released.
    """
    texts = np.random.default_rng(1).integers(0, 256, (REQUESTS, CONTEXT + 1)).astype(np.int32)
    texts[::3, 130:] = END

    def choose(logits, positions, requests, seed, temperature):
        spoiled = jnp.isnan(logits).any(axis=-1)
        return jnp.where(spoiled, END, jnp.asarray(texts)[requests, positions])

    jax.clear_caches()
    monkeypatch.setattr(paged_memory, "choose", choose)
    yield
    jax.clear_caches()


@pytest.mark.skipif(ON == "interpreter", reason="hours in the interpreter")
@pytest.mark.usefixtures("_chosen_beforehand")
def test_the_serving_loop_keeps_the_books_of_the_cpu():
    with jax.default_matmul_precision("highest"):
        with running():
            states, texts, storage, preemptions = served()
        with jax.default_device(jax.devices("cpu")[0]):
            wanted_states, wanted_texts, wanted_storage, _ = served()
    assert preemptions > 0
    assert texts == wanted_texts
    assert len(states) == len(wanted_states) > 20
    assert all(leaves_equal(*pair) for pair in zip(states, wanted_states, strict=True))
    for got, wanted in zip(storage.blocks, wanted_storage.blocks, strict=True):
        got, wanted = got.view(np.float32), wanted.view(np.float32)
        assert np.count_nonzero(wanted) > 10_000
        np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-2)
    kv.check(states[-1])


@pytest.mark.skipif(ON == "interpreter", reason="hours in the interpreter")
def test_the_demo_writes_the_text_of_a_run_without_a_cache(tmp_path):
    """The demo fails by itself where a token differs; full precision leaves no near ties."""
    examples = Path(decode_loop.__file__).parent
    command = [sys.executable, "decode_loop.py", "--requests", "8", "--rows", "4"]
    command += ["--blocks", "96", "--sample", "8", "--out", str(tmp_path / "map.png")]
    platform = {} if IS_GPU else {"JAX_PLATFORMS": "cpu"}
    environment = {**os.environ, **platform, "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    # The process that runs the tests holds most of the GPU's memory.
    environment["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    run = subprocess.run(command, cwd=examples, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "checked: 8 of 8 requests equal" in run.stdout
