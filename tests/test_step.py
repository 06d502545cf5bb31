"""Views of one step: which tokens are written, which keys are shown, and what is refused."""

import jax
import numpy as np
import pytest
from lockstep import I32MAX, I32MIN, i32

import kvpool as kv
from kvpool import step

LAYERS = [
    kv.FullAttention(1, 4),
    kv.SlidingWindow(5, 1, 4),
    kv.ChunkedLocal(6, 1, 4),
    kv.Compressed(3, 4),
    kv.RecurrentState({"sum": ((2,), "float32")}),
]
GROUPS = ("full", "window5", "chunk6", "compressed3", "state")
TOKENS = GROUPS[:4]
BLOCKS = {"full": 40, "window5": 40, "chunk6": 40, "compressed3": 40, "state": 4}
SETTLED = (7, 0, 12, 5)  # row 3 is released below


def settled_state(max_step_tokens=6):
    spec = kv.CacheSpec.from_layers(LAYERS, block_size=2)
    plan = kv.plan(
        spec, num_blocks=BLOCKS, max_seqs=4, max_seq_len=20, max_step_tokens=max_step_tokens
    )
    state, _ = kv.admit(kv.init_state(spec, plan), i32(range(4)))
    while (np.asarray(state.seq_lens) < SETTLED).any():
        tokens = np.minimum(SETTLED - np.asarray(state.seq_lens), max_step_tokens)
        state, result = kv.reserve(state, i32(tokens))
        assert bool(result.ok)
        state = kv.advance(state, i32(tokens))
    state = kv.release(state, i32([3]))
    state, result = kv.reserve(state, i32([3, 4, 1, 0]))
    assert bool(result.ok)
    return state


ROOM = (10, 4, 13, 0)


def group_of(view, name):
    return view.plan.spec.group(name), view.plan.spec.group_index(name)


def slots_of(view, name, width=None):
    _, index = group_of(view, name)
    return np.asarray(step.slots_of(view, index, width))


def wanted_slot(state, name, row, position):
    """The slot of one token by the table; -1 where it has none."""
    group = state.plan.spec.group(name)
    ratio = group.region.tokens_per_entry
    if not 0 <= row < 4 or not SETTLED[row] <= position < ROOM[row] or (position + 1) % ratio:
        return -1
    block = int(np.asarray(kv.block_table(state, name))[row, position // group.block_size])
    place = position % group.block_size // ratio
    return -1 if block < 0 else block * group.entries_per_block + place


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("width", [1, 3, 9])
def test_slots_of_a_rectangular_step(name, width):
    state = settled_state()
    num = [2, 4, 9, 1]
    view = kv.step_view(state, i32(num))
    wanted = [
        wanted_slot(state, name, row, SETTLED[row] + t) if t < num[row] else -1
        for row in range(4)
        for t in range(width)
    ]
    assert slots_of(view, name, width).tolist() == wanted


@pytest.mark.parametrize("name", TOKENS)
def test_slots_of_a_flat_step(name):
    state = settled_state()
    rows = [0, 1, -1, 2, 0, 4, I32MAX, -9, 3, 0, 0, 1, 1, 2]
    positions = [8, 2, 8, 12, -1, 0, 1, 2, 0, 6, 10, I32MAX, 3, I32MIN]
    view = kv.ragged_view(state, i32(rows), i32(positions))
    wanted = [wanted_slot(state, name, *pair) for pair in zip(rows, positions, strict=True)]
    assert slots_of(view, name).tolist() == wanted


@pytest.mark.parametrize(
    ("num", "stop"),
    [
        ((0, 0, 0, 0), (7, 0, 12, 0)),
        ((2, 1, 1, 1), (9, 1, 13, 0)),
        ((99, 99, 99, 99), ROOM),
        ((I32MAX,) * 4, ROOM),
        ((-1, I32MIN, -5, 0), (7, 0, 12, 0)),
    ],
)
def test_lengths_of_a_rectangular_step_stay_within_the_room(num, stop):
    for view in (
        kv.step_view(settled_state(), i32(num)),
        jax.jit(kv.step_view)(settled_state(), i32(num)),
    ):
        assert np.asarray(view.stop).tolist() == list(stop)
        expected = [a > b for a, b in zip(stop, (7, 0, 12, 0), strict=True)]
        assert np.asarray(view.has_tokens).tolist() == expected


@pytest.mark.parametrize(
    ("rows", "positions", "stop"),
    [
        ([], [], (7, 0, 12, 0)),
        ([-1, -1], [8, 9], (7, 0, 12, 0)),
        ([0, 0, 1], [8, 7, 0], (9, 1, 12, 0)),
        ([0, 0], [9, 10], (10, 0, 12, 0)),  # 10 is beyond the room
        ([0, 2, 3], [6, 11, 0], (7, 0, 12, 0)),  # settled, or of a free row
        ([4, -2, I32MAX], [0, 0, 0], (7, 0, 12, 0)),
    ],
)
def test_lengths_of_a_flat_step_end_at_the_last_position(rows, positions, stop):
    view = kv.ragged_view(settled_state(), i32(rows), i32(positions))
    assert np.asarray(view.stop).tolist() == list(stop)


@pytest.mark.parametrize("name", TOKENS)
def test_key_positions_are_those_a_query_at_n_reads(name):
    state = settled_state()
    view = kv.step_view(state, i32([3, 4, 0, 2]))
    group, _ = group_of(view, name)
    shown = np.asarray(view.key_positions(name))
    blocks = state.plan.blocks_per_row(group)
    assert shown.shape == (4, blocks * group.entries_per_block)
    ratio = group.region.tokens_per_entry
    for row, stop in enumerate((10, 4, 12, 0)):
        n = (*SETTLED[:3], 0)[row]
        first = int(group.region.first_read(n))
        wanted = [p for p in range(first, stop) if (p + 1) % ratio == 0]
        assert shown[row][shown[row] >= 0].tolist() == wanted
        begin = first // group.block_size * group.entries_per_block  # place 0 of the row
        places = np.flatnonzero(shown[row] >= 0) + begin
        assert places.tolist() == [p // ratio for p in wanted]


@pytest.mark.parametrize("name", TOKENS)
def test_key_positions_of_some_rows_and_blocks(name):
    view = kv.step_view(settled_state(), i32([3, 4, 0, 0]))
    entries = group_of(view, name)[0].entries_per_block
    every = np.asarray(view.key_positions(name))
    some = np.asarray(view.key_positions(name, rows=i32([2, -1, 0, 4, 2]), max_blocks=2))
    assert some.shape == (5, 2 * entries)
    for place, row in ((0, 2), (2, 0), (4, 2)):
        assert some[place].tolist() == every[row, : 2 * entries].tolist()
    assert (some[[1, 3]] == -1).all()
    wide = view.key_positions(name, max_blocks=10**6)
    assert np.asarray(wide).tolist() == every.tolist()


def test_arguments_of_views():
    state = settled_state()
    with pytest.raises(ValueError, match=r"num_tokens: wanted i32\[4\], got int32\[3\]"):
        kv.step_view(state, i32([0, 0, 0]))
    with pytest.raises(ValueError, match="num_tokens: wanted integers, got float32"):
        kv.step_view(state, np.zeros(4, np.float32))
    with pytest.raises(ValueError, match=r"positions: wanted i32\[2\], got int32\[3\]"):
        kv.ragged_view(state, i32([0, 1]), i32([0, 1, 2]))
    with pytest.raises(ValueError, match=r"rows.*\[1, 1\]"):
        kv.ragged_view(state, i32([[0]]), i32([0]))


def test_arguments_of_key_positions():
    view = kv.step_view(settled_state(), i32([1, 1, 1, 1]))
    with pytest.raises(kv.SpecError, match=r"fall.*full"):
        view.key_positions("fall")
    with pytest.raises(kv.SpecError, match=r"state.*no keys"):
        view.key_positions("state")
    with pytest.raises(ValueError, match="max_blocks: wanted at least 1, got 0"):
        view.key_positions("full", max_blocks=0)
    with pytest.raises(ValueError, match="max_blocks: wanted an integer"):
        view.key_positions("full", max_blocks=1.5)
    with pytest.raises(ValueError, match="rows"):
        view.key_positions("full", rows=np.zeros((1, 1), np.int32))


def test_a_view_is_a_pytree_of_fixed_shape():
    state = settled_state()
    views = [kv.step_view(state, i32([n, 0, 0, 0])) for n in (0, 2)]
    shapes = [jax.tree.map(lambda x: (x.shape, x.dtype), view) for view in views]
    assert shapes[0] == shapes[1]
    assert jax.tree.structure(views[0]) == jax.tree.structure(views[1])


def test_a_decode_step_gathers_its_table_entries():
    """No operation of a step for one token a row makes an array as large as the table."""
    spec = kv.CacheSpec.from_layers([kv.FullAttention(1, 4)], block_size=2)
    plan = kv.plan(spec, num_blocks={"full": 64}, max_seqs=16, max_seq_len=512)
    state = kv.init_state(spec, plan)

    def slots(state, num):
        return step.slots_of(kv.step_view(state, num), 0, 1)

    text = jax.jit(slots).lower(state, np.ones(16, np.int32)).compile().as_text()
    makers = [x for x in text.splitlines() if "= s32[16,256]" in x or "= s32[4096]" in x]
    assert all("parameter(" in x or "bitcast(" in x for x in makers), makers
