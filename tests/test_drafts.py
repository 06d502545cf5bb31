"""Drafts: packed into the main model's blocks or in groups of their own, and the way back."""

import json
import pickle

import numpy as np
import pytest
from world import cells

import kvpool as kv

FULL = kv.FullAttention(1, 4)
OTHER = kv.FullAttention(2, 4)
WINDOW = kv.SlidingWindow(8, 1, 4)


def spec_of(*layers, **options):
    return kv.CacheSpec.from_layers(layers, **{"block_size": 4, **options})


def test_packed_modules_follow_the_main_layers_in_their_group():
    spec = spec_of(FULL, FULL, FULL, FULL)
    for _ in range(2):
        spec = kv.with_draft(spec, spec_of(FULL), packed=True)
    assert spec.resolve(2) == ("full", 2)
    assert [spec.resolve(kv.draft_layer(spec, module)) for module in (0, 1)] == [
        ("full", 4),
        ("full", 5),
    ]
    with pytest.raises(kv.SpecError, match="no draft module 2; there are 2, counted from 0"):
        kv.draft_layer(spec, 2)
    assert [group.layers for group in spec.groups] == [(0, 1, 2, 3, 4, 5)]


def test_shared_layers_take_no_place_before_a_draft():
    main = spec_of(FULL, kv.SharedWith(0), kv.SharedWith(0), FULL, kv.SharedWith(3))
    spec = kv.with_draft(main, spec_of(FULL), packed=True)
    places = [spec.resolve(layer) for layer in (0, 3, kv.draft_layer(spec, 0))]
    assert places == [("full", 0), ("full", 1), ("full", 2)]
    assert len(spec.groups[0].layers) == 3


@pytest.mark.parametrize(("main", "modules", "layers"), [(2, [1], 3), (1, [3], 4), (2, [1, 1], 4)])
def test_one_copy_moves_a_block_with_its_draft_layers(main, modules, layers):
    region = kv.FullAttention(1, 4, dtype="float32")
    spec = spec_of(*[region] * main)
    for count in modules:
        spec = kv.with_draft(spec, spec_of(*[region] * count), packed=True)
    (group,) = spec.groups
    assert group.bytes_per_block == layers * 4 * 32
    plan = kv.plan(spec, num_blocks={"full": 4}, max_seqs=2, max_seq_len=8)
    state, storage = kv.init(spec, plan)
    state, _ = kv.admit(state, np.array([0], np.int32))
    state, _ = kv.reserve(state, np.array([3, 0], np.int32))
    view = kv.step_view(state, np.array([3, 0], np.int32))
    tokens = np.arange(6, dtype=np.float32).reshape(2, 3)
    for layer in range(layers):
        values = cells(tokens + 10 * layer, (1, 4), 0)
        storage = kv.write(storage, view, layer, {"k": values, "v": values})
    state = kv.advance(state, np.array([3, 0], np.int32))
    state, result = kv.fork(state, np.array([0], np.int32), np.array([1], np.int32))
    copied = kv.copy_blocks(storage, result.copies)
    source, target = (int(ids[0]) for ids in result.copies["full"])
    blocks = kv.export_blocks(copied, "full", np.array([source, target], np.int32))
    one, other = (np.asarray(blocks)[i] for i in (0, 1))
    assert one.tobytes() == other.tobytes()
    assert one.nbytes == group.bytes_per_block
    view = kv.step_view(state, np.zeros(2, np.int32))
    for layer in range(layers):  # every layer of the copy reads what was written
        values, mask = kv.read(copied, view, layer)
        assert np.asarray(values["k"])[1][np.asarray(mask)[1]].tolist() == (
            cells(tokens[0] + 10 * layer, (1, 4), 0).tolist()
        )


def test_a_draft_needs_no_rollback_of_its_own():
    """14 settled, 3 drafts and the token itself, 2 accepted, and 4 again."""
    spec = kv.with_draft(spec_of(FULL), spec_of(OTHER), packed=False)
    assert [group.name for group in spec.groups] == ["full", "full_2"]
    plan = kv.plan(spec, num_blocks={"full": 8, "full_2": 8}, max_seqs=1, max_seq_len=32)
    state, _ = kv.admit(kv.init_state(spec, plan), np.array([0], np.int32))
    for num in (14, 4):
        state, result = kv.reserve(state, np.array([num], np.int32))
        assert result.ok
        state = kv.advance(state, np.array([14 if num == 14 else 2], np.int32))
    assert int(state.seq_lens[0]) == 16
    for name in ("full", "full_2"):
        table = np.asarray(kv.block_table(state, name))[0]
        assert (table >= 0).tolist() == [True] * 5 + [False] * 3
    free = {name: int(count) for name, count in kv.free_blocks(state).items()}
    state, result = kv.reserve(state, np.array([4], np.int32))
    assert result.ok
    assert {name: int(count) for name, count in kv.free_blocks(state).items()} == free
    kv.check(state)


def composed():
    """Two tags and a share, a packed module, one with equal regions apart, one with block sizes."""
    main = spec_of({"a": FULL, "b": WINDOW}, kv.SharedWith(0), None, block_sizes={"window8": 2})
    spec = kv.with_draft(main, spec_of(FULL, kv.SharedWith(0)), packed=True)
    spec = kv.with_draft(spec, spec_of(FULL, WINDOW), packed=False)
    return main, kv.with_draft(spec, spec_of(WINDOW, block_size=8), packed=False)


def test_separate_modules_have_groups_of_their_own_and_their_block_sizes():
    _, spec = composed()
    assert [(g.name, g.layers, g.block_size) for g in spec.groups] == [
        ("full", (0, 3), 4),
        ("window8", (0,), 2),
        ("full_2", (5,), 4),
        ("window8_2", (6,), 4),
        ("window8_3", (7,), 8),
    ]
    assert spec.resolve(kv.draft_layer(spec, 0, 1)) == ("full", 1)
    assert spec.drafts == (kv.Draft(2, True), kv.Draft(2, False), kv.Draft(1, False))


def test_layer_numbers_map_both_ways():
    _, spec = composed()
    origins = [kv.origin_of(spec, layer) for layer in range(len(spec.layers))]
    assert origins == [(None, 0), (None, 1), (None, 2), (0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    back = [n if m is None else kv.draft_layer(spec, m, n) for m, n in origins]
    assert back == list(range(8))


def test_projecting_gives_lists_of_exactly_the_parts_own_length():
    main, spec = composed()
    values = [f"layer {number}" for number in range(8)]
    assert kv.project(spec, values) == values[:3]
    assert [kv.project(spec, values, module) for module in range(3)] == [
        values[3:5],
        values[5:7],
        values[7:],
    ]
    assert kv.part_of(spec) == main
    assert kv.part_of(main) == main
    assert [len(kv.part_of(spec, module).layers) for module in range(3)] == [2, 2, 1]
    assert kv.part_of(spec, 1).groups == spec_of(FULL, WINDOW).groups
    assert kv.part_of(spec, 2).groups == spec_of(WINDOW, block_size=8).groups


def test_a_composed_spec_is_stored_and_read_back():
    _, spec = composed()
    again = kv.CacheSpec.from_dict(json.loads(json.dumps(spec.to_dict())))
    assert again == spec
    assert (again.drafts, again.groups) == (spec.drafts, spec.groups)
    assert pickle.loads(pickle.dumps(spec)) == spec
    apart = kv.with_draft(spec_of(FULL), spec_of(FULL), packed=False)
    assert apart != kv.with_draft(spec_of(FULL), spec_of(FULL), packed=True)
    assert [g.layers for g in apart.groups] == [(0,), (1,)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: kv.with_draft(spec_of(FULL), spec_of(OTHER), packed=True),
            "draft layer 0: keeps 'all', 32 bytes an entry, in blocks of 4 tokens, as none of "
            "the main model's groups full does; give packed=False",
        ),
        (
            lambda: kv.with_draft(spec_of(FULL), spec_of(FULL, block_size=8), packed=True),
            "in blocks of 8 tokens, as none",
        ),
        (lambda: kv.with_draft(composed()[1], composed()[1]), "draft: has 3 drafts itself"),
        (lambda: kv.with_draft(spec_of(FULL), [FULL]), "draft: wanted a CacheSpec, got list"),
        (lambda: kv.draft_layer(composed()[1], 0, 2), "draft module 0 has layers 0 to 1, got 2"),
        (lambda: kv.draft_layer(composed()[1], True), "no draft module True"),
        (lambda: kv.origin_of(composed()[1], 8), "no layer 8; there are 0 to 7"),
        (lambda: kv.project(composed()[1], [1, 2]), "values: wanted one for each of 8 layers"),
        (lambda: spec_of(FULL, drafts=[kv.Draft(1, True)]), "1 layers of drafts, but only 1"),
        (lambda: spec_of(FULL, FULL, drafts=[kv.Draft(0, True)]), r"drafts\[0\].layers: .* got 0"),
        (lambda: spec_of(FULL, FULL, drafts=[kv.Draft(1, 1)]), r"packed: wanted a bool, got 1"),
    ],
)
def test_what_cannot_be_composed_is_refused_by_name(make, message):
    with pytest.raises(kv.SpecError, match=message):
        make()
