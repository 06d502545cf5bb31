"""Prompts of a real fleet through the policies; skipped where the trace does not lie beside."""

import sys
from pathlib import Path

import pytest

from kvpool.prefix.eviction import LRU

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from prefix_cache import BLOCK, requests_of
from prefix_policies import Books, belady

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "mooncake_conversation.jsonl"


@pytest.fixture(scope="module")
def requests():
    if not TRACE.exists():
        pytest.skip(f"no {TRACE.name} beside the repository")
    return requests_of(str(TRACE), 0)


def as_full_blocks(requests):
    return [(ids, len(ids) * BLOCK) for ids, _ in requests]


def found(requests, capacity, evictor):
    """Share of the blocks that are found, those at the end that are not full included."""
    books = Books(1, 0, capacity, evictor, None)
    for ids, tokens in as_full_blocks(requests):
        books.serve(ids, tokens)
    return books.found / sum(len(ids) for ids, _ in requests)


def test_an_infinite_cache_finds_all_that_came_before(requests):
    books = Books(1, 0, None, LRU(), None)
    for ids, tokens in requests:
        books.serve(ids, tokens)
    assert round(books.hit / books.tokens, 4) == 0.3734


def test_lru_of_few_blocks(requests):
    assert round(found(requests, 5859, LRU()), 3) == 0.136


def test_the_best_possible_eviction(requests):
    share, _ = belady(as_full_blocks(requests), 1000)
    assert round(share, 4) == 0.1907
    _, tokens = belady(requests, 10_000)
    assert round(tokens, 4) == 0.3734


def test_the_best_possible_eviction_by_hand():
    """Room for two: 3 goes at once, since 2 comes sooner. A whole prompt is no hit of itself."""
    prompts = [([1], 512), ([2], 512), ([1, 3], 1024), ([2], 512), ([1, 3], 1025)]
    blocks, tokens = belady(prompts, 2)
    assert blocks == 3 / 7  # 1, 2 and 1
    assert tokens == (512 + 0 + 512) / (3 * 512 + 1024 + 1025)
