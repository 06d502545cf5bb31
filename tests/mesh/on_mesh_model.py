"""On eight devices: the demo's model writes what it writes on one."""

import dataclasses
import functools
import sys
from pathlib import Path

import numpy as np
import pytest
from twins import mesh_of

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import prompts
from decode_on_mesh import RULES, alone, on_mesh, padded
from tiny_model import load

NEW_TOKENS = 24


@functools.cache
def expected():
    model, (tokens, counts) = load(), padded(prompts.prompts(4, longest=100))
    return model, tokens, counts, alone(model, tokens, counts, NEW_TOKENS)


@pytest.mark.parametrize(
    ("shards", "ranks", "bookkeeping"),
    [
        (2, 2, "per_shard"),
        pytest.param(2, 2, "replicated", marks=pytest.mark.slow),
        pytest.param(1, 4, "per_shard", marks=pytest.mark.slow),  # fewer heads than ranks
        pytest.param(4, 2, "per_shard", marks=pytest.mark.slow),
        pytest.param(2, 4, "replicated", marks=pytest.mark.slow),
    ],
)
def test_the_same_tokens(shards, ranks, bookkeeping):
    model, tokens, counts, want = expected()
    rules = dataclasses.replace(RULES, bookkeeping=bookkeeping)
    got, _, _ = on_mesh(model, tokens, counts, NEW_TOKENS, mesh_of(shards, ranks), rules)
    assert np.array_equal(got, want)
    assert len(np.unique(want)) > 10
