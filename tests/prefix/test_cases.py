"""Situations reported of other prefix caches, as numbers."""

import numpy as np
import pytest
from serving import Serving, i32

import kvpool as kv
from kvpool.prefix import keys

FULL = kv.FullAttention(1, 4, dtype="float32")
STATE = kv.RecurrentState({"sum": ((2,), "float32")})


def window(size):
    return kv.SlidingWindow(size, 1, 4, dtype="float32")


def columns(bits):
    return [column for column, bit in enumerate(bits) if bit == "0"]


WINDOW_HITS = [
    ("11010", 4),
    ("00011", 10),
    ("110100110111", 24),
    ("11010011000", 16),
    ("110100110001", 16),
    ("0110", 6),
    ("01", 0),
    ("001", 0),
    ("1", 2),
    ("10", 2),
]


def test_the_longest_hit_of_a_window_with_holes():
    serving = Serving([window(4)], block=2)
    for number, (bits, length) in enumerate(WINDOW_HITS):
        tokens = [1000 + number] * (2 * len(bits))
        serving.fill(tokens)
        serving.lose("window4", tokens, columns(bits))
        assert serving.cache.match([*tokens, 0, 0, 0]).length == length


@pytest.mark.parametrize(("cached", "length"), [(5, 10), (4, 0)])
def test_a_window_and_full_attention_hit_together(cached, length):
    """A window of 4 has columns 3 and 4 only; full attention has 0 to 4, or to 3."""
    serving = Serving([FULL, window(4)], block=2)
    tokens = list(range(2 * cached))
    serving.fill(tokens)
    serving.lose("window4", tokens, range(min(3, cached)))
    hit = serving.cache.match([*tokens, 50, 51, 52])
    assert hit.length == length
    assert (hit.missed["window4"] is None) == (length == 10)
    assert hit.missed["full"] == f"tokens {2 * cached} to {2 * cached + 1} are not cached"


@pytest.mark.parametrize(
    ("snapshots", "prompt", "length"),
    [([48], 97, 48), ([64], 97, 0), ([], 97, 0), ([48, 96], 97, 96), ([48, 96], 96, 48)],
)
def test_full_attention_a_window_and_snapshots_hit_together(snapshots, prompt, length):
    """Blocks of 16: all to 96, of a window of 32 the columns 1, 2, 4 and 5."""
    serving = Serving([FULL, window(32), STATE], block=16, blocks=24, max_len=112)
    tokens = list(range(96))
    serving.fill(tokens)
    serving.lose("window32", tokens, [0, 3])
    serving.lose("state", tokens, [u for u in range(6) if 16 * (u + 1) not in snapshots])
    hit = serving.cache.match([*tokens, 96][:prompt])
    assert hit.length == length
    assert hit.missed["full"] is None
    if snapshots == [64]:
        assert hit.missed["window32"] == "length 64 reads tokens 48 to 63, which are not cached"
        assert hit.missed["state"] == "no snapshot at length 96"


RESENT = [(31, 16), (32, 16), (33, 32), (48, 32)]


@pytest.mark.parametrize(("length", "reused"), RESENT)
def test_a_prompt_sent_again_leaves_a_token_to_compute(length, reused):
    serving = Serving([FULL, STATE], block=16, max_len=48)
    tokens = list(range(length))
    serving.serve(0, tokens, stops=range(16, length, 16))
    assert serving.cache.match(tokens).length == reused


@pytest.mark.parametrize(("length", "reused"), RESENT)
def test_the_only_snapshot_of_a_prompt_is_where_a_repetition_can_use_it(length, reused):
    serving = Serving([FULL, STATE], block=16, max_len=48)
    tokens = list(range(length))
    hit = serving.admit(0, tokens)
    assert hit.stops == (reused,)
    for stop in hit.stops:
        serving.run(0, stop)
        serving.insert(0)
    assert serving.cache.match(tokens).length == reused
    assert serving.cache.stats().held["state"] == 1


def test_a_window_keeps_its_tail_only():
    serving = Serving([window(4)], block=2, blocks=8, max_len=16)
    tokens = list(range(13))
    serving.admit(0, tokens, hit=False)
    serving.run(0, 12)
    serving.insert(0)
    serving.release(0)
    assert serving.cache.match(tokens).length == 12
    assert serving.cache.match(tokens[:9]).length == 0
    assert serving.free() == {"window4": 6}
    assert serving.evict({"window4": 8}) == {"window4": 2}
    assert serving.free() == {"window4": 8}
    assert serving.cache.match(tokens).length == 0


def test_what_was_reserved_but_did_not_run_is_not_cached():
    serving = Serving([FULL, STATE], block=16, max_len=48)
    tokens = list(range(40))
    serving.admit(0, tokens)
    serving.run(0, 16)
    serving.insert(0)
    before = serving.state
    serving.state, _ = kv.reserve(serving.state, i32([16, 0, 0]))
    serving.insert(0)
    assert serving.cache.match(tokens).length == 16
    serving.state = before  # the step was dropped
    serving.insert(0)
    assert serving.cache.match(tokens).length == 16
    serving.run(0, 32)
    serving.insert(0)
    assert serving.cache.match(tokens).length == 32


def test_a_block_that_was_given_away_is_not_hit():
    serving = Serving([FULL], block=2, blocks=2, max_len=4)
    tokens = [5, 6, 7]
    serving.serve(0, tokens[:2])
    serving.release(0)
    stale = serving.cache.match(tokens)
    assert stale.length == 2
    assert serving.free() == {"full": 1}
    assert serving.evict({"full": 2}) == {"full": 1}
    assert serving.cache.match(tokens).length == 0
    _, result = kv.admit(serving.state, i32([0]), stale.prefix)
    assert kv.Status(int(result.status[0])) == kv.Status.UNREACHABLE


def test_a_request_does_not_lose_what_it_hits_to_itself():
    serving = Serving([FULL], block=2, blocks=2, max_len=4)
    tokens = [5, 6, 7]
    serving.serve(0, tokens[:2])
    serving.release(0)
    hit = serving.cache.match(tokens)
    assert serving.evict({"full": 2}, protect=hit) == {"full": 0}
    serving.admit(1, tokens, hit=hit)
    assert serving.evict({"full": 2}) == {"full": 0}  # the row holds it
    serving.run(1, 3)
    assert serving.free() == {"full": 0}


def test_the_same_block_after_other_tokens_is_no_hit():
    serving = Serving([FULL], block=2, blocks=24, max_len=12)
    serving.fill([1, 2, 3, 4])
    assert serving.cache.match([8, 9, 3, 4, 0]).length == 0
    assert serving.cache.match([1, 2, 3, 4, 0]).length == 4


def test_salts_share_nothing():
    serving = Serving([FULL], block=2, blocks=24, max_len=12)
    tokens = [1, 2, 3, 4, 0]
    salts = [None, "a", b"a", 1, "1", (), ("bc", "a"), ("c", "ab"), ("b", "ca"), (("bc",), "a")]
    for number, salt in enumerate(salts):
        assert serving.cache.match(tokens, salt).length == 0
        serving.serve(0, tokens, salt=salt)
        serving.release(0)
        assert [serving.cache.match(tokens, s).length for s in salts[: number + 1]] == [4] * (
            number + 1
        )
    assert len({keys.namespace(serving.spec, "m", salt) for salt in salts}) == len(salts)


def test_keys_differ_by_spec_dtype_block_size_and_model():
    specs = [
        kv.CacheSpec.from_layers(layers, block)
        for layers, block in [
            ([FULL], 2),
            ([FULL, FULL], 2),
            ([kv.FullAttention(1, 4, dtype="bfloat16")], 2),
            ([FULL], 4),
        ]
    ]
    spaces = [keys.namespace(spec, model, None) for spec in specs for model in ("", "m")]
    assert len(set(spaces)) == 8
    assert all(len(space) == 16 for space in spaces)


def test_two_rows_with_one_prompt_publish_once():
    serving = Serving([FULL], block=2, blocks=24, max_len=12)
    tokens = [1, 2, 3, 4]
    for row in (0, 1):
        serving.admit(row, tokens, hit=False)
        serving.run(row, 4)
    first = np.asarray(kv.block_table(serving.state, "full"))[0, :2].tolist()
    serving.insert(0)
    serving.insert(1)
    serving.release(0)
    serving.release(1)
    assert serving.free() == {"full": 22}
    assert serving.cached_blocks("full") == first


def test_a_half_full_block_is_not_published():
    serving = Serving([FULL], block=6, max_len=24)
    tokens = list(range(8))
    serving.serve(0, tokens)
    assert serving.cache.match([*tokens, *range(10)]).length == 6


def test_blocks_that_only_the_cache_holds_make_room_in_their_own_group():
    """Full attention has 10 blocks free, the window none and 6 cached; 2 and 3 are needed."""
    blocks = {"full": 16, "window4": 6}
    serving = Serving([FULL, window(4)], block=2, blocks=blocks, max_len=8, step=4)
    for number in (0, 1, 2):
        serving.serve(0, [number] * 4)
        serving.release(0)
    assert serving.free() == {"full": 10, "window4": 0}
    assert serving.evict({"full": 2, "window4": 3}) == {"full": 0, "window4": 3}
    assert serving.free() == {"full": 10, "window4": 3}
    assert serving.cache.stats().held == {"full": 6, "window4": 3}
