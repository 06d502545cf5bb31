"""The stored form of specs and plans: every version that there was, files, pickles, refusals."""

import copy
import json
import pathlib
import pickle

import pytest
from test_drafts import composed
from test_spec import all_kinds

import kvpool as kv
from kvpool import schema

SLABS = ("slabs", "slab_bytes", "per_slab")
STORED = pathlib.Path(__file__).parent / "stored"
FULL = kv.FullAttention(1, 4)


def full_plan(**options):
    spec = kv.CacheSpec.from_layers([FULL, kv.SlidingWindow(16, 1, 4)])
    limits = {"max_seqs": 2, "max_seq_len": 64, "max_step_tokens": 8, "snapshots": 3, **options}
    return kv.plan(spec, num_blocks={"full": 9, "window16": 5}, **limits)


def scaled():
    token = kv.FullAttention(2, 8, dtype="int8", scales="token")
    block = kv.SlidingWindow(16, 2, 8, 4, "float8_e4m3fn", scales="block", compute_dtype="float32")
    return kv.CacheSpec.from_layers([token, block])


def elastic():
    """A window with blocks of its own, and slabs for the others: 3 and 2 blocks in each."""
    layers = [kv.SlidingWindow(16, 1, 4), FULL, kv.RecurrentState({"s": ((96,), "float32")})]
    spec = kv.CacheSpec.from_layers(layers, pooling="elastic")
    limits = {"max_seqs": 2, "max_seq_len": 64, "max_step_tokens": 8, "keep_free": 0.1}
    count = {"num_blocks": {"window16": 9}, "charge_explicit": False}
    return kv.plan(spec, 10 * 768, slab_bytes=768, **count, **limits)


def shared():
    """Blocks of 16 and 80 tokens that have the same bytes."""
    layers = [kv.SlidingWindow(32, 5, 4), FULL, kv.RecurrentState({"s": ((96,), "float32")})]
    return kv.CacheSpec.from_layers(layers, pooling="shared")


TODAY = {
    "spec_v1": all_kinds,
    "spec_v2": lambda: composed()[1],
    "spec_scales_v2": scaled,
    "plan_v2": lambda: full_plan(keep_free=0.3),
    "spec_v3": shared,
    "plan_v3": elastic,
}


@pytest.mark.parametrize("name", TODAY)
def test_every_version_is_read_and_equals_what_is_built_today(name):
    data = json.loads((STORED / f"{name}.json").read_text())
    assert data["schema_version"] == int(name[-1])
    read = kv.CacheSpec if name.startswith("spec") else kv.Plan
    assert read.from_dict(data) == TODAY[name]()
    assert read.from_dict(data).to_dict() == TODAY[name]().to_dict()


def test_there_is_a_fixture_of_every_version():
    versions = {path.stem for path in STORED.glob("*.json")}
    assert versions == set(TODAY)
    assert {f"spec_v{version}" for version in range(1, schema.VERSION + 1)} <= versions


@pytest.mark.parametrize("name", TODAY)
def test_what_is_written_today_is_the_newest_fixture(name):
    data = json.loads((STORED / f"{name}.json").read_text())
    if data["schema_version"] == schema.VERSION:
        assert json.loads(json.dumps(TODAY[name]().to_dict())) == data


def test_fields_that_a_plan_lacks_take_their_defaults():
    written = full_plan(max_step_tokens=64, snapshots=0)
    data = written.to_dict()
    for name in ("max_step_tokens", "snapshots", "pool_of", "kept", *SLABS):
        del data[name]
    assert kv.Plan.from_dict(data) == written


@pytest.mark.parametrize("value", [lambda: composed()[1], all_kinds, full_plan])
def test_pickles_and_copies_survive(value):
    value = value()
    for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert again == value
        assert hash(again) == hash(value)


def on_one_pool(**options):
    """A window and a full group whose blocks have the same bytes, and a state apart: 9, 9 and 2."""
    limits = {"max_seqs": 2, "max_seq_len": 64, "max_step_tokens": 8, **options}
    return kv.plan(shared(), 9 * 1280 + 2 * 384, **limits)


def test_a_plan_with_groups_on_one_pool_is_stored_as_it_is():
    plan = on_one_pool(keep_free=0.1)
    assert (plan.pool_of, plan.kept) == ((0, 0, 1), (1, 1))
    assert kv.Plan.from_dict(plan.to_dict()) == plan


TOML = """
schema_version = 2
block_size = 4

layers = [
  {retention = "all", buffers = [{name = "k", shape = [1, 4], dtype = "bfloat16"},
                                 {name = "v", shape = [1, 4], dtype = "bfloat16"}]},
  "none",
  {shared_with = 0},
  {tags = [{tag = "swa", region = {retention = ["window", 8], buffers = [
      {name = "k", shape = [2, 4], dtype = "int8"}]}}]},
]

[block_sizes]
window8 = 2
"""


def test_files_of_both_formats_load(tmp_path):
    swa = kv.Region(("window", 8), {"k": ((2, 4), "int8")})
    spec = kv.CacheSpec.from_layers(
        [FULL, None, kv.SharedWith(0), {"swa": swa}], 4, block_sizes={"window8": 2}
    )
    (tmp_path / "spec.toml").write_text(TOML)
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_dict()))
    assert kv.load_spec(tmp_path / "spec.toml") == spec
    assert kv.load_spec(str(tmp_path / "spec.json")) == spec
    (tmp_path / "plan.json").write_text(json.dumps(full_plan().to_dict()))
    assert kv.load_plan(tmp_path / "plan.json") == full_plan()
    limits = "schema_version = 2\nmax_seqs = 2\nmax_seq_len = 8\nnum_blocks.full = 4\n"
    nested = "num_blocks.window8 = 8\n[spec]" + TOML.replace("[block", "[spec.block")
    (tmp_path / "plan.toml").write_text(limits + nested)
    plan = kv.plan(spec, num_blocks={"full": 4, "window8": 8}, max_seqs=2, max_seq_len=8)
    assert kv.load_plan(tmp_path / "plan.toml") == plan


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.yaml", "", r"a\.yaml: wanted a file named \.json or \.toml"),
        ("a.json", "{", r"a\.json: not JSON: Expecting property name"),
        ("a.toml", "x = ", r"a\.toml: not TOML: Invalid value"),
        ("a.json", "[]", r"a\.json: wanted an object, got list"),
        ("a.json", '{"schema_version": 99}', r"a\.json: spec: schema_version: got 99, the newest"),
        ("a.json", '{"layers": []}', r"a\.json: spec: schema_version: got None"),
    ],
)
def test_files_that_are_not_understood_are_refused_by_name(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(kv.SpecError, match=message):
        kv.load_spec(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 99}, "plan: schema_version: got 99, the newest known here is 3"),
        ({"pool_ratio": "4:1"}, "plan of version 3: unknown key pool_ratio; known are"),
        ({"spec": 3}, "spec: wanted an object, got 3"),
        ({"spec": {"schema_version": 99}}, "spec: schema_version: got 99"),
        ({"num_blocks": {"full": 3}}, "num_blocks: no window16 in"),
        ({"num_blocks": {"full": 3, "window16": 3, "x": 1}}, "num_blocks: unknown key x"),
        ({"num_blocks": {"full": 3, "window16": 0}}, r"num_blocks\['window16'\]: .* got 0"),
        ({"num_blocks": 7}, "num_blocks: wanted an object of full, window16, got 7"),
        ({"max_seqs": None}, "max_seqs: wanted an integer of at least 1, got None"),
        ({"snapshots": -1}, "snapshots: wanted an integer of at least 0, got -1"),
        ({"pool_of": [0]}, r"pool_of: wanted a pool for each of full, window16, .* got \(0,\)"),
        ({"pool_of": [0, 2]}, r"pool_of: .* in the order of the groups, got \(0, 2\)"),
        ({"pool_of": [1, 0]}, r"pool_of: .* in the order of the groups, got \(1, 0\)"),
        (
            {"pool_of": [0, 0]},
            r"pool_of: wanted \(0, 1\) for pooling 'independent' and .* \(0, 0\)",
        ),
        ({"pool_of": "01"}, "pool_of: wanted a list, got '01'"),
        ({"kept": [1]}, r"kept: wanted a count for each of 2 pools, got \(1,\)"),
        ({"kept": [9, 6]}, r"kept for keep_free: got \(9, 6\), more than the pools \(9, 5\)"),
        (
            {"schema_version": 2},
            "plan of version 2: unknown key per_slab, slab_bytes, slabs; known",
        ),
        ({"per_slab": [0, 0]}, r"per_slab: wanted counts above 0 for 0 slabs .* got \(0, 0\)"),
        ({"slabs": 3}, r"per_slab: wanted counts above 0 for 3 slabs of 0 bytes, got \(\)"),
        ({"slab_bytes": 512}, "wanted counts above 0 for 0 slabs of 512 bytes"),
        (
            {"slabs": 1, "slab_bytes": 2304, "per_slab": [9, 0]},
            "per_slab: no group here has slabs; pooling is 'independent'",
        ),
        ({"max_seqs": 1 << 29}, r"wanted less than 2\^31 table entries, got 4,294,967,296"),
        (
            {"num_blocks": {"full": (1 << 31) - 5, "window16": 5}},
            r"wanted less than 2\^31 blocks in all, got 2,147,483,648",
        ),
        ({"kept": [1, 1.5]}, "kept: wanted an integer of at least 0, got 1.5"),
    ],
)
def test_plans_that_are_not_understood_are_refused_by_name(change, message):
    with pytest.raises(kv.SpecError, match=message):
        kv.Plan.from_dict({**full_plan().to_dict(), **change})


BLOCKS = {"window16": 9, "full": 12, "state": 8}


def is_read(plan, change, message):
    """A stored plan with a change is read as it stands, or refused with a message."""
    data = {**plan.to_dict(), **change}
    if message is None:
        assert kv.Plan.from_dict(data).to_dict() == data
        return
    with pytest.raises(kv.SpecError, match=message):
        kv.Plan.from_dict(data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"per_slab": [0, 3]}, r"per_slab: wanted a count for each of .*, got \(0, 3\)"),
        ({"per_slab": [0, 4, 2]}, "wanted 3 blocks of 'full', .* bytes, in a slab of 768, got 4"),
        ({"per_slab": [0, 2, 2]}, "wanted 3 blocks of 'full', .* bytes, in a slab of 768, got 2"),
        ({"slab_bytes": 767}, "slab_bytes: wanted a multiple of 16, got 767; .* 752 and 768"),
        ({"slab_bytes": 368}, "slab_bytes: got 368, but a block of 'state' is 384"),
        ({"slab_bytes": 784}, None),
        ({"slabs": 9}, r"\['full'\]: wanted 3 in each of 9 slabs of 768 bytes, got 12 of 256"),
        ({"num_blocks": {**BLOCKS, "state": 9}}, r"\['state'\]: wanted 2 .* 4 slabs .* got 9"),
        ({"slabs": -1}, "slabs: wanted an integer of at least 0, got -1"),
        ({"slab_bytes": "768"}, "slab_bytes: wanted an integer of at least 0, got '768'"),
        ({"kept": [0, 12, 0]}, None),
        ({"kept": [9, 10, 1]}, r"kept .* got \(9, 10, 1\), in 5 slabs of 4"),
        ({"pool_of": [0, 1, 1]}, r"pool_of: wanted \(0, 1, 2\) .* full 256, state 384 bytes"),
        (
            {"slabs": 2, "slab_bytes": 256 * 1025, "per_slab": [0, 1025, 683],
             "num_blocks": {"window16": 9, "full": 2050, "state": 1366}},
            "wanted 1,024 blocks of 'full', of 256 bytes, in a slab of 262,400, got 1,025",
        ),
        (
            {"slabs": 1 << 30, "num_blocks": {"window16": 9, "full": 3 << 30, "state": 2 << 30}},
            r"wanted less than 2\^31 blocks in all, got 5,368,709,129",
        ),
    ],
)  # fmt: skip
def test_only_slabs_that_planning_could_have_made_are_read(change, message):
    is_read(elastic(), change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pool_of": [0, 1, 2]}, None),
        ({"pool_of": [0, 0, 0]}, r"pool_of: wanted \(0, 0, 1\) for pooling 'shared' and blocks of"),
        ({"pool_of": [0, 1, 1]}, r"pool_of: wanted \(0, 1, 2\) for pooling 'shared' and blocks of"),
        (
            {"num_blocks": {"window32": 9, "full": 8, "state": 2}},
            r"num_blocks\['full'\]: wanted 9 like 'window32', which draws from the same .* got 8",
        ),
    ],
)
def test_only_pools_that_planning_could_have_made_are_read(change, message):
    is_read(on_one_pool(), change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drafts": [{"layers": 1}]}, "drafts: no packed in"),
        ({"drafts": [{"layers": 1, "packed": True, "x": 1}]}, "drafts: unknown key x"),
        ({"drafts": {}}, "drafts: wanted a list of objects, got {}"),
        ({"block_sizes": {"full9": 4}}, "no group 'full9'; the groups are"),
        ({"block_sizes": {"full": "4"}}, r"block_sizes\['full'\]: .* got '4'"),
        ({"block_sizes": {"state": 4}}, "'state' has one state a row, not blocks of tokens"),
        ({"block_sizes": 4}, "block_sizes: wanted {group name: tokens}, got 4"),
        ({5: 1}, "unknown key 5"),
    ],
)
def test_new_fields_of_a_spec_are_checked(change, message):
    with pytest.raises(kv.SpecError, match=message):
        kv.CacheSpec.from_dict({**all_kinds().to_dict(), **change})


def test_block_sizes_round_up_to_whole_entries_and_the_usual_size_is_not_stored():
    layers = [kv.Compressed(4, 4), FULL]
    spec = kv.CacheSpec.from_layers(layers, block_sizes={"compressed4": 6, "full": 16})
    assert [group.block_size for group in spec.groups] == [8, 16]
    assert spec.block_sizes == (("compressed4", 8),)
    assert spec == kv.CacheSpec.from_layers(layers, block_sizes={"compressed4": 8})


def test_a_shared_spec_of_before_keeps_its_block_sizes():
    layers = [kv.FullAttention(2, 8), kv.SlidingWindow(64, 1, 8)]
    spec = kv.CacheSpec.from_layers(layers, 8, "shared")
    assert [group.block_size for group in spec.groups] == [8, 16]
    old = {**spec.to_dict(), "schema_version": 2, "block_sizes": {}}
    assert [group.block_size for group in kv.CacheSpec.from_dict(old).groups] == [8, 8]
    assert kv.CacheSpec.from_dict(spec.to_dict()) == spec
