"""Regions with scales: what they store and cost, their stored form, and what is refused."""

import dataclasses
import json
import pathlib
import pickle

import numpy as np
import pytest

import kvpool as kv
from kvpool import schema

FP8 = "float8_e4m3fn"
FIXTURES = pathlib.Path(__file__).parent / "stored"


def only_group(region, layers=1, block_size=16):
    return kv.CacheSpec.from_layers([region] * layers, block_size=block_size).groups[0]


def test_scales_are_buffers_behind_the_payload():
    region = kv.FullAttention(8, 128, v_head_dim=64, dtype=FP8, scales="token")
    stored = [(b.name, b.shape, b.dtype, b.scale_of, b.per_block) for b in region.buffers]
    assert stored == [
        ("k", (8, 128), FP8, None, False),
        ("v", (8, 64), FP8, None, False),
        ("k_scale", (8,), "float32", "k", False),
        ("v_scale", (8,), "float32", "v", False),
    ]
    assert [(b.name, b.dtype) for b in region.values] == [("k", "bfloat16"), ("v", "bfloat16")]
    per_block = kv.FullAttention(8, 128, dtype="int8", scales="block", compute_dtype=np.float32)
    assert [b.per_block for b in per_block.buffers] == [False, False, True, True]
    assert per_block.compute_dtype == "float32"
    latent = kv.LatentAttention(512, 64, dtype="int8", scales="token")
    assert [(b.name, b.shape) for b in latent.buffers[2:]] == [
        ("latent_scale", ()),
        ("rope_scale", ()),
    ]
    entry = kv.Compressed(4, 32, dtype="int8", scales="block")
    assert [b.name for b in entry.buffers] == ["entry", "entry_scale"]


def test_only_buffers_of_code_dtypes_are_quantised():
    payload = {"latent": ((512,), FP8), "rope": ((64,), "bfloat16")}
    region = kv.Region("all", payload, scales="token")
    assert [b.name for b in region.buffers] == ["latent", "rope", "latent_scale"]
    assert [b.dtype for b in region.values] == ["bfloat16", "bfloat16"]


def test_bytes_of_a_block():
    """2 * (16,384 codes + 512 bytes of scales a token and head, or 32 of scales a block)."""
    for dtype in (FP8, "int8"):
        for scales, size in (("token", 33_792), ("block", 32_832)):
            region = kv.FullAttention(8, 128, dtype=dtype, scales=scales)
            assert only_group(region, layers=3).bytes_per_block == 3 * size
    group = only_group(kv.FullAttention(1, 5, dtype="int8", scales="block"), block_size=3)
    assert group.buffer_offsets == (0, 16, 32, 48, 64)  # each padded to 16 bytes
    spec = kv.CacheSpec.from_layers([kv.FullAttention(8, 128, dtype=FP8, scales="token")] * 2)
    plan = kv.plan(spec, budget_bytes=10 * 67_584 + 67_583, max_seqs=1, max_seq_len=1 << 16)
    assert plan.num_blocks == {"full": 10}
    assert plan.total_bytes == 675_840
    assert "67,584" in str(plan)


def test_regions_that_differ_in_scales_are_different_groups():
    layers = [
        kv.FullAttention(1, 4, dtype="int8"),
        kv.FullAttention(1, 4, dtype="int8", scales="token"),
        kv.FullAttention(1, 4, dtype="int8", scales="block"),
        kv.FullAttention(1, 4, dtype="int8", scales="block", compute_dtype="float32"),
        {"a": kv.FullAttention(1, 4, dtype="int8", scales="token"), "b": kv.SharedWith(2)},
        kv.SharedWith(1),
    ]
    spec = kv.CacheSpec.from_layers(layers)
    names = [spec.resolve(layer)[0] for layer in range(4)]
    assert names == ["full", "full_2", "full_3", "full_4"]
    assert spec.resolve(4, "a") == ("full_2", 1)
    assert spec.resolve(4, "b") == ("full_3", 0)
    assert spec.resolve(5) == ("full_2", 0)


def test_a_region_is_changed_as_a_dataclass():
    region = kv.FullAttention(1, 4, dtype="int8", scales="token")
    assert dataclasses.replace(region) == region
    plain = dataclasses.replace(region, scales=None, compute_dtype=None)
    assert plain == kv.FullAttention(1, 4, dtype="int8")
    windowed = dataclasses.replace(region, retention=("window", 8))
    assert windowed == kv.SlidingWindow(8, 1, 4, dtype="int8", scales="token")
    chunked = dataclasses.replace(region, retention=("chunk", 8))
    assert chunked == kv.ChunkedLocal(8, 1, 4, dtype="int8", scales="token")


def with_scales():
    return kv.CacheSpec.from_layers(
        [
            kv.FullAttention(1, 4, dtype="int8", scales="token", compute_dtype="float16"),
            {"swa": kv.SlidingWindow(8, 1, 4, dtype=FP8, scales="block"), "x": kv.SharedWith(0)},
            kv.FullAttention(1, 4),
        ],
        block_size=8,
    )


def test_the_dictionary_round_trips():
    spec = with_scales()
    data = json.loads(json.dumps(spec.to_dict()))
    assert data["schema_version"] == schema.VERSION
    again = kv.CacheSpec.from_dict(data)
    assert again == pickle.loads(pickle.dumps(spec)) == spec
    assert again.groups == spec.groups
    assert (data["layers"][0]["scales"], data["layers"][0]["compute_dtype"]) == ("token", "float16")
    assert [b["name"] for b in data["layers"][0]["buffers"]] == ["k", "v"]
    without = {"scales": None, "compute_dtype": None}
    for change in ({"scales": "block"}, {"compute_dtype": "float32"}, without):
        layers = [{**data["layers"][0], **change}, *data["layers"][1:]]
        assert kv.CacheSpec.from_dict({**data, "layers": layers}).digest != spec.digest


def test_a_dictionary_of_version_1_is_read_with_defaults():
    data = json.loads((FIXTURES / "spec_v1.json").read_text())
    assert data["schema_version"] == 1
    layers = [
        {"swa": kv.SlidingWindow(16, 1, 4), "mla": kv.LatentAttention(8, 4)},
        kv.FullAttention(1, 4),
        kv.RecurrentState({"ssm": ((2, 3), "float32"), "conv": ((4,), "bfloat16")}),
        None,
        kv.ChunkedLocal(8, 1, 4, v_head_dim=8, dtype=FP8),
        kv.SharedWith(0, "mla"),
        kv.Compressed(4, 4),
        {"swa": kv.SharedWith(0)},
    ]
    assert kv.CacheSpec.from_dict(data) == kv.CacheSpec.from_layers(layers, block_size=8)


INT8 = {"k": ((2, 4), "int8")}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kv.FullAttention(1, 4, dtype="int8", scales="head"), "scales: .* got 'head'"),
        (lambda: kv.FullAttention(1, 4, dtype="int8", scales=True), "scales: .* got True"),
        (lambda: kv.FullAttention(1, 4, scales="token"), "scales: .* int8.* got k of bfloat16, v"),
        (
            lambda: kv.FullAttention(1, 4, dtype="float8_e4m3fnuz", scales="token"),
            "scales: wanted a dtype of int8, float8_e4m3fn, float8_e5m2, got k of float8_e4m3fnuz",
        ),
        (
            lambda: kv.FullAttention(1, 4, dtype="int8", scales="token", compute_dtype="int8"),
            "compute_dtype: wanted float32, bfloat16, float16, got 'int8'",
        ),
        (
            lambda: kv.FullAttention(1, 4, dtype="int8", scales="token", compute_dtype=3.5),
            "compute_dtype: .* got '3.5'",
        ),
        (
            lambda: kv.FullAttention(1, 4, dtype="int8", compute_dtype="float32"),
            "compute_dtype: wanted None without scales, got 'float32'",
        ),
        (lambda: kv.Region("state", INT8, scales="token"), "a \"state\" has none, got 'token'"),
        (
            lambda: kv.Region("all", {"k": ((), "int8")}, scales="token"),
            "scales: wanted an axis to scale, buffer 'k' has none",
        ),
        (
            lambda: kv.Region("all", {**INT8, "k_scale": ((2,), "float32")}, scales="token"),
            "scales: wanted the name 'k_scale', got it in the buffers",
        ),
        (
            lambda: only_group(kv.ChunkedLocal(24, 1, 4, dtype="int8", scales="block")),
            'scales "block": wanted chunks of whole blocks of 16 tokens, got 24',
        ),
        (
            lambda: only_group(kv.SlidingWindow(1, 1, 4, dtype="int8", scales="block")),
            "wanted a window of at least 2 tokens, got 1",
        ),
    ],
)
def test_regions_that_cannot_be_quantised_are_refused(make, message):
    with pytest.raises(kv.SpecError, match=message):
        make()


def test_chunks_of_whole_blocks_and_scales_per_token_are_not():
    only_group(kv.ChunkedLocal(32, 1, 4, dtype="int8", scales="block"))
    only_group(kv.ChunkedLocal(24, 1, 4, dtype="int8", scales="token"))
    only_group(kv.SlidingWindow(1, 1, 4, dtype="int8", scales="token"))
