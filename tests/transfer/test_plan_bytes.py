"""Every byte that a receiver keeps is written once, whatever the degrees: enumerated and moved."""

import itertools

import pytest
from simulation import simulate

import kvpool as kv
from kvpool.transfer import Shards

KINDS = {
    "heads": kv.FullAttention(4, 3, 5, dtype="float16"),
    "few heads": kv.FullAttention(2, 4),
    "window": kv.SlidingWindow(8, 4, 4),
    "chunk": kv.ChunkedLocal(8, 4, 4),
    "latent": kv.LatentAttention(6, 2),
    "compressed": kv.Compressed(8, 5),
    "state": kv.RecurrentState(
        {
            "conv": ((16, 3), "bfloat16", (4, 4, 8)),
            "ssm": ((4, 3, 2), "float32"),
            "n": ((), "int32"),
        }
    ),
    "groups": kv.RecurrentState(  # heads of its own, and groups that several ranks have
        {"conv": ((18, 3), "bfloat16", ((4, 2), (2, 3), (1, 4))), "ssm": ((4, 3, 2), "float32")}
    ),
    "scales": kv.FullAttention(4, 4, dtype="int8", scales="token"),
    "scales of blocks": kv.FullAttention(4, 4, dtype="int8", scales="block"),
    "indexer": kv.Region("all", {"entry": ((6,), "float8_e4m3fn"), "scale": ((1,), "float32")}),
}
DEGREES = [(1, 1), (4, 2), (2, 4), (4, 1), (1, 4), (2, 2), (4, 4)]


@pytest.mark.parametrize("degrees", DEGREES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_is_written_once_for_every_kind_and_pair_of_degrees(kind, degrees):
    spec = kv.CacheSpec.from_layers([KINDS[kind], None, KINDS[kind]], block_size=4)
    for tokens in (3, 21):
        simulate(kv.transfer.plan(spec, tokens, *map(Shards, degrees)))


@pytest.mark.parametrize("contexts", [*itertools.product((1, 2, 3), repeat=2)])
def test_blocks_that_are_dealt_round_robin(contexts):
    kinds = [KINDS[kind] for kind in ("heads", "window", "latent", "state")]
    spec = kv.CacheSpec.from_layers(kinds, block_size=4)
    for heads in ((1, 1), (2, 1), (1, 4)):
        sender, receiver = (Shards(*pair) for pair in zip(heads, contexts, strict=True))
        has = {"full": [True, False, True], "window8": [False] * 4 + [True]}
        for plan in (
            kv.transfer.plan(spec, 21, sender, receiver),
            kv.transfer.plan(spec, 21, sender, receiver, has, snapshots=[4, 16]),
        ):
            simulate(plan)
            assert plan.bytes_sent == plan.bytes_needed


@pytest.mark.parametrize("options", [{"max_bytes": 1}, {"max_bytes": 100}, {"by_layer": True}])
def test_parcels_of_any_size_carry_the_same_bytes(options):
    spec = kv.CacheSpec.from_layers([*KINDS.values()] * 2, block_size=4)
    plan = kv.transfer.plan(spec, 21, Shards(2), Shards(4))
    simulate(plan, **options)


PRESETS = [
    "gemma3-1b", "gpt-oss-20b", "qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "nemotron-h-8b",
    "deepseek-v3.2-fp8", "deepseek-v4-flash-fp8",
]  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_the_geometry_of_models(name):
    """Of each group one layer stands for all: the cuts of every layer are the same."""
    spec = kv.preset(name)
    firsts = {group.layers[0]: None for group in spec.groups}
    spec = kv.CacheSpec.from_layers([spec.layers[layer] for layer in firsts], spec.block_size,
                                    block_sizes=dict(spec.block_sizes))  # fmt: skip
    for degrees in ((4, 2), (1, 8)):
        simulate(kv.transfer.plan(spec, 300, *map(Shards, degrees)))


@pytest.mark.parametrize("packed", [True, False])
def test_draft_layers_are_planned_by_the_same_code(packed):
    main = kv.CacheSpec.from_layers([KINDS["heads"], KINDS["heads"]], block_size=4)
    draft = kv.CacheSpec.from_layers([KINDS["heads"]], block_size=4)
    spec = kv.with_draft(main, draft, packed=packed)
    plan = kv.transfer.plan(spec, 9, Shards(4), Shards(2))
    simulate(plan)
    assert plan.num_items == (3 if packed else 6)
    layers = {key.layer for key in plan.keys("r", 0, 0)}
    assert layers == {0, 1, 2}
