"""Regions, grouping, lookup and the stored form of a spec."""

import json
import pickle

import numpy as np
import pytest

import kvpool as kv

FULL = kv.FullAttention(1, 4)
WINDOW = kv.SlidingWindow(16, 1, 4)
STATE = kv.RecurrentState({"ssm": ((2, 3), "float32"), "conv": ((4,), "bfloat16")})


def spec_of(*layers, block_size=4):
    return kv.CacheSpec.from_layers(layers, block_size=block_size)


def names(spec):
    return [group.name for group in spec.groups]


def test_constructors_are_retention_times_payload():
    full = kv.FullAttention(8, 64, v_head_dim=32, dtype="float16")
    payload = {"k": ((8, 64), "float16"), "v": ((8, 32), "float16")}
    assert full == kv.Region("all", payload)
    window = kv.SlidingWindow(7, 8, 64, v_head_dim=32, dtype="float16")
    assert window == kv.Region(("window", 7), payload)
    chunk = kv.ChunkedLocal(7, 8, 64, v_head_dim=32, dtype="float16")
    assert chunk == kv.Region(["chunk", 7], payload)
    latent = {"latent": ((512,), "bfloat16"), "rope": ((64,), "bfloat16")}
    assert kv.LatentAttention(512, 64) == kv.Region("all", latent)
    assert kv.Compressed(4, 512) == kv.Region("all", {"entry": ((512,), "bfloat16")}, 4)
    assert STATE.retention == "state"
    assert kv.Region("all", {"k": ((4,), np.dtype("float32"))}).buffers[0].dtype == "float32"


def test_equal_regions_form_a_group_named_after_what_it_keeps():
    other = kv.FullAttention(2, 4)
    spec = spec_of(
        WINDOW,
        FULL,
        kv.ChunkedLocal(32, 1, 4),
        WINDOW,
        other,
        kv.LatentAttention(8, 4),
        kv.Compressed(4, 4),
        STATE,
        FULL,
        kv.FullAttention(3, 4),
        STATE,
    )
    assert names(spec) == [
        "window16",
        "full",
        "chunk32",
        "full_2",
        "latent",
        "compressed4",
        "state",
        "full_3",
    ]
    assert [group.layers for group in spec.groups][:2] == [(0, 3), (1, 8)]
    assert spec.resolve(8) == ("full", 1)
    assert spec.resolve(np.int64(10)) == ("state", 1)


def test_a_block_rounds_up_to_whole_entries():
    spec = spec_of(kv.Compressed(128, 4), kv.Compressed(3, 4), FULL, block_size=16)
    assert [group.block_size for group in spec.groups] == [128, 18, 16]
    assert [group.entries_per_block for group in spec.groups] == [1, 6, 16]


def test_bytes_of_a_block():
    assert spec_of(*[kv.FullAttention(8, 128)] * 3, block_size=16).groups[0].bytes_per_block == (
        3 * 16 * 8 * 128 * 2 * 2
    )
    odd = kv.FullAttention(1, 5, v_head_dim=3)  # 10 and 6 bytes, each padded to 16
    group = spec_of(odd, odd, odd, block_size=1).groups[0]
    assert (group.buffer_offsets, group.bytes_per_block) == ((0, 16, 32), 96)
    ssm = kv.RecurrentState({"conv": ((8192, 3), "bfloat16"), "ssm": ((32, 128, 128), "float32")})
    group = spec_of(*[ssm] * 36).groups[0]
    assert group.buffer_offsets == (0, 49_152, 2_146_304)
    assert group.bytes_per_block == 77_266_944
    scaled = kv.Region(
        "all",
        {
            "k": ((8, 128), "float8_e4m3fn"),
            "v": ((8, 128), "float8_e4m3fn"),
            "k_scale": ((8,), "float32"),
            "v_scale": ((8,), "float32"),
        },
    )
    assert spec_of(scaled, block_size=16).groups[0].bytes_per_block == 33_792


def test_layers_that_share_cost_nothing_and_resolve_to_the_owner():
    own = [WINDOW, WINDOW, WINDOW, WINDOW, FULL] * 4
    layers = own + [kv.SharedWith(18), kv.SharedWith(19)] * 5
    spec = spec_of(*layers)
    assert [(group.name, len(group.layers)) for group in spec.groups] == [
        ("window16", 16),
        ("full", 4),
    ]
    assert all(spec.resolve(layer) == spec.resolve(18) for layer in range(20, 30, 2))
    assert all(spec.resolve(layer) == spec.resolve(19) for layer in range(21, 30, 2))
    assert [g.bytes_per_block for g in spec.groups] == [
        g.bytes_per_block for g in spec_of(*own).groups
    ]


def test_tags_are_shared_one_by_one_or_all():
    indexer = kv.Compressed(4, 8)
    spec = spec_of(
        {"csa": kv.Compressed(4, 16), "indexer": indexer},
        {"csa": kv.Compressed(4, 16), "indexer": kv.SharedWith(0)},
        {"csa": kv.Compressed(4, 16), "keys": kv.SharedWith(1, "indexer")},
        kv.SharedWith(0, "indexer"),
        kv.SharedWith(0),
    )
    assert spec.resolve(1, "indexer") == spec.resolve(0, "indexer") == ("compressed4_2", 0)
    assert spec.resolve(2, "keys") == spec.resolve(3) == spec.resolve(3, "indexer")
    assert spec.resolve(4, "csa") == ("compressed4", 0)
    assert spec.resolve(2, "csa") == ("compressed4", 2)
    assert spec.tags(4) == ("csa", "indexer")


def test_two_tags_of_one_layer_may_keep_the_same_region():
    spec = spec_of({"a": FULL, "b": FULL})
    assert spec.groups[0].layers == (0, 0)
    assert [spec.resolve(0, tag)[1] for tag in ("a", "b")] == [0, 1]


def test_an_unknown_pair_names_the_pairs_that_exist():
    spec = spec_of({"full": FULL}, {"swa": WINDOW, "csa": kv.Compressed(4, 4)}, None)
    assert spec.resolve(0)[0] == "full"
    assert spec.resolve(1, "csa")[0] == "compressed4"
    for pair in (
        (1, None),
        (0, "swa"),
        (2, None),
        (3, None),
        (-1, None),
        ("0", None),
        (1.0, "swa"),
    ):
        with pytest.raises(
            kv.SpecError, match=r"layer 0: 'full'; layer 1: 'swa', 'csa'; layer 2: no cache"
        ):
            spec.resolve(*pair)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: kv.FullAttention(0, 4), "num_kv_heads: wanted an integer of at least 1, got 0"),
        (lambda: kv.FullAttention(1, 4.0), "head_dim: .* got 4.0"),
        (lambda: kv.FullAttention(1, 4, v_head_dim=0), "v_head_dim: .* got 0"),
        (lambda: kv.FullAttention(True, 4), "num_kv_heads: .* got True"),
        (lambda: kv.SlidingWindow(0, 1, 4), "window: .* at least 1, got 0"),
        (lambda: kv.ChunkedLocal(-1, 1, 4), "chunk: .* at least 1, got -1"),
        (lambda: kv.Compressed(0, 4), "ratio: .* got 0"),
        (lambda: kv.SlidingWindow(2**40, 1, 4), "window: wanted at most 2.30 tokens"),
        (lambda: kv.Compressed(2**33, 4), "tokens_per_entry: wanted at most 2.30 tokens"),
        (lambda: kv.Region("all", ["a"]), "buffers: wanted"),
        (lambda: spec_of(FULL, kv.SharedWith(True)), "layer 1: .* got True"),
        (lambda: kv.FullAttention(1, 4, dtype="float99"), "no dtype 'float99'; there are float32,"),
        (lambda: kv.Region("all", {"k": ((4,), "float64")}), "no dtype 'float64'"),
        (lambda: kv.Region("all", {}), "at least one, got \\[\\]"),
        (lambda: kv.Region("all", {"k": ((4, 0), "int8")}), r"buffer 'k': size in shape \(4, 0\)"),
        (lambda: kv.Region("all", {"k": (4, "int8")}), "wanted a shape as a tuple, got 4"),
        (
            lambda: kv.Region("all", {"k": "int8"}),
            r"wanted \(shape of an entry, dtype\), got 'int8'",
        ),
        (lambda: kv.Region("all", {"": ((4,), "int8")}), "non-empty name"),
        (lambda: kv.Region("some", {"k": ((4,), "int8")}), "wanted \"all\".* got 'some'"),
        (lambda: kv.Region(("window",), {"k": ((4,), "int8")}), "retention: wanted"),
        (lambda: kv.Region("state", {"k": ((4,), "int8")}, 2), "tokens_per_entry.* got 2"),
        (lambda: spec_of(FULL, block_size=0), "block_size: .* got 0"),
        (lambda: spec_of(FULL, block_size="16"), "block_size: .* got '16'"),
        (lambda: spec_of(), "a layer with a cache, got none in 0"),
        (lambda: spec_of(None, None), "a layer with a cache, got none in 2"),
        (lambda: spec_of({}), "a layer with a cache, got none in 1"),
        (lambda: spec_of("full"), "layer 0: wanted Region"),
        (lambda: spec_of(FULL, {"a": None}), "layer 1, tag 'a': wanted Region"),
        (lambda: spec_of({3: FULL}), "layer 0: wanted non-empty strings as tags, got 3"),
        (lambda: kv.CacheSpec.from_layers(FULL), "layers: wanted a sequence"),
        (lambda: kv.CacheSpec.from_layers([FULL], pooling="poled"), "pooling: .* got 'poled'"),
        (lambda: spec_of(kv.SharedWith(0)), "layer 0: there is no earlier layer"),
        (lambda: spec_of(FULL, kv.SharedWith(1)), "layer 1: .* 0 to 0, got 1"),
        (lambda: spec_of(FULL, kv.SharedWith(2), FULL), "layer 1: .* 0 to 0, got 2"),
        (lambda: spec_of(FULL, kv.SharedWith(-1)), "layer 1: .* got -1"),
        (lambda: spec_of(None, FULL, kv.SharedWith(0)), "layer 2: .* layer 0, which has no cache"),
        (
            lambda: spec_of({"a": FULL}, kv.SharedWith(0, "b")),
            "layer 1: layer 0 has no tag 'b'; it has 'a'",
        ),
        (
            lambda: spec_of({"a": FULL, "b": WINDOW}, {"c": kv.SharedWith(0)}),
            "no tag 'c'; it has 'a', 'b'",
        ),
    ],
)
def test_specs_that_contradict_themselves_are_refused(make, message):
    with pytest.raises(kv.SpecError, match=message):
        make()


def all_kinds():
    return spec_of(
        {"swa": WINDOW, "mla": kv.LatentAttention(8, 4)},
        FULL,
        STATE,
        None,
        kv.ChunkedLocal(8, 1, 4, v_head_dim=8, dtype="float8_e4m3fn"),
        kv.SharedWith(0, "mla"),
        kv.Compressed(4, 4),
        {"swa": kv.SharedWith(0)},
        block_size=8,
    )


def test_the_dictionary_round_trips_through_json_and_pickle():
    spec = all_kinds()
    again = kv.CacheSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.to_dict() == spec.to_dict()
    assert again.groups == spec.groups
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert spec_of(FULL) != spec_of(FULL, block_size=8)
    assert spec_of(FULL) != "spec"


def test_a_dictionary_of_version_1_without_what_has_defaults():
    layer = {
        "retention": "all",
        "buffers": [
            {"name": "k", "shape": [1, 4], "dtype": "bfloat16"},
            {"name": "v", "shape": [1, 4], "dtype": "bfloat16"},
        ],
    }
    old = {"schema_version": 1, "layers": [layer, {"shared_with": 0}, None]}
    assert kv.CacheSpec.from_dict(old) == spec_of(FULL, kv.SharedWith(0), None, block_size=16)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "got 99, the newest known here is 3"),
        ({"schema_version": None}, "got None"),
        ({"schema_version": True}, "got True"),
        ({"pool_ratio": 2}, "unknown key pool_ratio"),
        ({"layers": [{"retention": "all", "buffer": []}]}, "layer 0: unknown key buffer"),
        ({"layers": [{"shared_with": 0, "of": 1}]}, "layer 0: unknown key of"),
        ({"layers": [{"tags": [], "of": 1}]}, "layer 0: unknown key of"),
        ({"layers": None}, "layers: wanted a list, got None"),
        ({"layers": [{"tags": [{"tag": "a"}]}]}, "layer 0, tags: no region in"),
        ({"layers": [{"tags": [{"tag": "a", "region": None, "zz": 1}]}]}, "unknown key zz"),
        ({"layers": [{"tags": [{"tag": "a", "region": None}] * 2}]}, "two regions of the tag 'a'"),
        ({"layers": [{"retention": "all", "buffers": [{"name": "k"}]}]}, "no dtype, shape in"),
        ({"layers": [7]}, "layer 0: wanted an object or null, got 7"),
        (
            {
                "layers": [
                    {
                        "retention": "all",
                        "buffers": [{"name": "k", "shape": [4], "dtype": "int8", "stride": 1}],
                    }
                ]
            },
            "unknown key stride",
        ),
    ],
)
def test_dictionaries_that_are_not_understood_are_refused_by_name(change, message):
    with pytest.raises(kv.SpecError, match=message):
        kv.CacheSpec.from_dict({**all_kinds().to_dict(), **change})
