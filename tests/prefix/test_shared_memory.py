"""A prefix cache of groups that share slabs."""

import pytest
from serving import Serving, i32

import kvpool as kv

FULL = kv.FullAttention(1, 4, dtype="float32")
WINDOW = kv.SlidingWindow(4, 1, 4, dtype="float32")
STATE = kv.RecurrentState({"sum": ((40,), "float32")})


def sharing():
    return Serving([FULL, WINDOW, STATE], block=2, max_len=12, step=6, budget=6_000)


@pytest.fixture
def crowded():
    """Prompts were served until the slabs were full of what is cached of them."""
    serving = sharing()
    for number in range(12):
        serving.admit_or_evict(0, [number] * 11)
        for length in (6, 10):
            serving.run_or_evict(0, length)
            serving.insert(0)
        serving.verify(0)
        serving.release(0)
    return serving


def test_what_a_hit_reads_goes_together(crowded):
    """The two blocks of a window's tail lie on two units; a hole in one makes the other useless."""
    hits = [crowded.cache.match([number] * 11, touch=False).length for number in range(12)]
    assert hits == [0] * 9 + [10] * 3


def test_a_need_takes_from_all_groups_until_it_is_met(crowded):
    assert sum(crowded.cache.stats().removed.values()) > 0
    need = crowded.free()["full"] + 8
    crowded.evict({"full": need})
    assert crowded.free()["full"] >= need
    assert sum(crowded.cache.stats().held.values()) > 0
    crowded.evict({"state": 1000})
    assert sum(crowded.cache.stats().held.values()) == 0


def test_the_cache_follows_what_compact_moves(crowded):
    prompts = [[number] * 11 for number in range(12)]
    crowded.evict({"state": crowded.free()["state"] + 2})
    hits = [crowded.cache.match(tokens, touch=False).length for tokens in prompts]
    crowded.state, crowded.storage, moves = kv.compact(crowded.state, crowded.storage)
    crowded.cache.follow(moves)
    crowded.settle()
    assert [crowded.cache.match(tokens, touch=False).length for tokens in prompts] == hits
    assert 10 in hits
    for tokens in prompts:
        crowded.admit_or_evict(1, tokens)
        crowded.verify(1)
        crowded.release(1)


def test_moves_rename_what_is_cached():
    serving = Serving([FULL], block=2, blocks=24, max_len=12)
    serving.serve(0, [1, 2, 3, 4])
    one, two = serving.cached_blocks("full")
    serving.cache.follow({"full": (i32([one, -1]), i32([9, -1]))})
    assert serving.cached_blocks("full") == [9, two]
    serving.cache.follow({"full": (i32([9, -1]), i32([one, -1]))})
    serving.settle()
