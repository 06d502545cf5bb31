"""What comes back to the device is bit for bit what left it, for every region and pooling."""

import jax
import pytest
from tiered import Tiered

import kvpool as kv

FULL = kv.FullAttention(1, 4, dtype="float32")
WINDOW = kv.SlidingWindow(6, 2, 4, dtype="bfloat16")
STATE = kv.RecurrentState({"ssm": ((2, 3), "float32"), "conv": ((4,), "bfloat16")})
LENGTH = 29
TOKENS = [(7 * p) % 11 for p in range(LENGTH)]


def promoted_at_every_length(serving):
    """Row 0 computes all; row 1 goes on from a hit that was away, of every possible length."""
    serving.fill(TOKENS)
    if serving.prefixes.policy != "write_back":
        serving.send(wait=True)
    serving.admit(0, TOKENS, hit=False)
    serving.run(0, LENGTH)
    unit = serving.cache.unit
    for wanted in range(unit, LENGTH + 1, unit):
        serving.evict_all()
        assert not any(serving.cache.stats().held.values())
        before = serving.prefixes.counts().promoted
        hit = serving.match([*TOKENS[:wanted], 99])
        assert (hit.length, set(hit.missed.values())) == (wanted, {None})
        used = sum(len(some) for some in hit.used)
        assert serving.prefixes.counts().promoted - before == used
        serving.admit(1, TOKENS, hit=hit)
        if wanted < LENGTH:
            serving.run(1, LENGTH)
        serving.same_content(0, 1)
        serving.release(1)


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_full_attention_a_window_and_states(policy):
    promoted_at_every_length(Tiered([WINDOW, FULL, STATE], policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["block_first", "layer_first"])
@pytest.mark.parametrize(
    "layers",
    [
        [FULL, FULL],
        [WINDOW],
        [kv.SlidingWindow(1, 1, 4), FULL],
        [STATE],
        [kv.ChunkedLocal(8, 1, 4), kv.ChunkedLocal(6, 1, 4), FULL],
        [kv.ChunkedLocal(3, 1, 4), STATE],
        [kv.LatentAttention(8, 4), kv.SlidingWindow(5, 1, 4)],
        [kv.FullAttention(1, 4, dtype="int8", scales="token"), WINDOW],
        [kv.SlidingWindow(6, 1, 4, dtype="float8_e4m3fn", scales="block"), FULL],
        [kv.Compressed(2, 4), {"c": kv.Compressed(8, 4), "swa": WINDOW}],
    ],
)
def test_every_kind_of_region(layers, layout):
    promoted_at_every_length(Tiered(layers, tier={"layout": layout}))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_groups_that_share_slabs(policy):
    layers = [FULL, WINDOW, STATE, kv.ChunkedLocal(8, 1, 4)]
    serving = Tiered(layers, budget=1 << 16, policy=policy)
    assert any(serving.plan.pool_per_slab)
    promoted_at_every_length(serving)


@pytest.mark.slow
def test_blocks_of_different_sizes():
    layers = [FULL, WINDOW, STATE, kv.ChunkedLocal(8, 1, 4), kv.Compressed(6, 4)]
    promoted_at_every_length(Tiered(layers, sizes={"full": 6, "window6": 2, "chunk8": 3}))


def test_a_promotion_between_the_steps_of_others():
    """Its blocks are held at both ends, layer by layer, and no hit sees them before it is done."""
    serving = Tiered([FULL, FULL, WINDOW, STATE])
    serving.fill(TOKENS)
    serving.evict_all()
    prefixes = serving.prefixes
    before = serving.free()
    serving.state, coming = prefixes.start(serving.state, serving.storage, TOKENS)
    assert coming.found.length == 28
    assert {g: before[g] - n for g, n in serving.free().items()} == {
        "full": 7, "window6": 2, "state": 1,
    }  # fmt: skip
    assert coming.layers_to_come == {0, 1, 2, 3}
    steps = 0
    while not coming.done:
        assert prefixes.cache.match(TOKENS, touch=False).length == 0
        serving.storage = jax.block_until_ready(coming.receive(serving.storage, donate=True))
        steps += 1
        if 0 not in coming.layers_to_come:
            assert steps > 1
    assert steps > 4
    serving.state = prefixes.finish(serving.state, coming)
    hit = serving.match(TOKENS)
    assert (hit.length, prefixes.counts().promoted) == (28, 10)
    serving.admit(0, TOKENS, hit=False)
    serving.run(0, LENGTH)
    serving.admit(1, TOKENS, hit=hit)
    serving.run(1, LENGTH)
    serving.same_content(0, 1)


def test_a_promotion_that_is_given_up_or_overtaken():
    serving = Tiered([FULL, WINDOW, STATE])
    serving.fill(TOKENS)
    serving.evict_all()
    prefixes, before = serving.prefixes, serving.free()
    serving.state, coming = prefixes.start(serving.state, serving.storage, TOKENS)
    serving.state = prefixes.finish(serving.state, coming)
    assert (serving.free(), prefixes.counts().promoted) == (before, 0)
    serving.state, coming = prefixes.start(serving.state, serving.storage, TOKENS)
    serving.coming, serving.storage = coming, coming.receive(serving.storage, wait=True)
    assert serving.match(TOKENS).length == 28  # another request brought the same back meanwhile
    serving.state = prefixes.finish(serving.state, coming)
    serving.settle()
    assert prefixes.counts().promoted == 10
    assert {g: before[g] - n for g, n in serving.free().items()} == {
        "full": 7, "window6": 2, "state": 1,
    }  # fmt: skip
