"""A row that begins with a hit holds, bit for bit, what a row that computed everything holds."""

import pytest
from serving import Serving

import kvpool as kv

FULL = kv.FullAttention(1, 4, dtype="float32")
WINDOW = kv.SlidingWindow(6, 2, 4, dtype="bfloat16")
STATE = kv.RecurrentState({"ssm": ((2, 3), "float32"), "conv": ((4,), "bfloat16")})
LENGTH = 29


def hit_at_every_length(serving, length=LENGTH):
    """Row 0 computes all; row 1 goes on from a hit of every possible length."""
    tokens = [(7 * p) % 11 for p in range(length)]
    serving.fill(tokens)
    serving.admit(0, tokens, hit=False)
    serving.run(0, length)
    unit = serving.cache.unit
    for wanted in range(unit, length + 1, unit):
        hit = serving.cache.match([*tokens[:wanted], 99])
        assert (hit.length, set(hit.missed.values())) == (wanted, {None})
        serving.admit(1, tokens, hit=hit)
        if wanted < length:
            serving.run(1, min(wanted + 1, length))  # a query just behind the hit
            serving.run(1, length)
        serving.same_content(0, 1)
        serving.release(1)


def test_full_attention_and_a_window():
    hit_at_every_length(Serving([WINDOW, FULL]))


def test_full_attention_and_states():
    hit_at_every_length(Serving([STATE, FULL]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layers",
    [
        [FULL],
        [WINDOW],
        [kv.SlidingWindow(1, 1, 4), FULL],
        [kv.SlidingWindow(8, 1, 4)],
        [STATE],
        [kv.ChunkedLocal(8, 1, 4), FULL],
        [kv.ChunkedLocal(6, 1, 4), FULL],
        [kv.ChunkedLocal(3, 1, 4), STATE],
        [kv.LatentAttention(8, 4), kv.SlidingWindow(5, 1, 4)],
        [kv.FullAttention(1, 4, dtype="int8", scales="token"), WINDOW],
        [kv.SlidingWindow(6, 1, 4, dtype="float8_e4m3fn", scales="block"), FULL],
    ],
)
def test_every_kind_of_region(layers):
    hit_at_every_length(Serving(layers))


@pytest.mark.slow
def test_compressed_caches_with_rings_of_compressor_state():
    """Blocks of 8 tokens of one entry each, of 4, and rings of 4 tokens in blocks of 2."""
    ring = kv.Region(("window", 4), {"ring": ((3,), "float32")})
    layers = [{"c": kv.Compressed(8, 4), "ring": ring}, {"c": kv.Compressed(2, 4), "swa": WINDOW}]
    serving = Serving(layers, sizes={"window4": 2})
    assert [group.block_size for group in serving.spec.groups] == [8, 2, 4, 4]
    assert serving.cache.unit == 8
    hit_at_every_length(serving)


@pytest.mark.slow
def test_blocks_of_different_sizes_and_everything_at_once():
    layers = [FULL, WINDOW, STATE, kv.ChunkedLocal(8, 1, 4), kv.Compressed(6, 4)]
    serving = Serving(layers, sizes={"full": 6, "window6": 2, "chunk8": 3})
    assert serving.cache.unit == 6
    hit_at_every_length(serving)
