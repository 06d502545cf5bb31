"""Views of one step: which positions are shown, in which order and width, and what is skipped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from lockstep import PLAIN, Setup, copy_of, i32, leaves_equal
from oracle import cdiv
from test_core_cases import grown
from world import World, layers_of

import kvpool as kv

HYBRID = Setup(("all", ("window", 4), ("chunk", 6), ("comp", 3)), (10, 10, 10, 8), block=2,
               rows=3, max_len=18, step=5)  # fmt: skip


def hybrid(lengths=(7, 0, 4)):
    world = World(HYBRID)
    world.admit(0, 1, 2)
    for row, n in enumerate(lengths):
        grown(world, row, n)
    return world


def test_widths_are_the_columns_or_the_bound():
    world = hybrid()
    view = kv.step_view(world.state, i32([0, 0, 0]))
    bounds = {0: 9, 1: cdiv(4 + 5 - 2, 2) + 1, 2: cdiv(6 + 5 - 2, 2) + 1}
    for layer, blocks in bounds.items():
        values, mask = kv.read(world.storage, view, layer)
        assert mask.shape == (3, 2 * blocks)
        assert mask.dtype == bool
        assert values["k"].shape == (3, 2 * blocks, 1, 4)
        positions = view.key_positions(world.setup.group(layer))
        assert positions.shape == mask.shape
        assert positions.dtype == jnp.int32


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_fewer_blocks_are_the_first_of_the_same(layer):
    world = hybrid()
    view = kv.step_view(world.state, i32([0, 0, 0]))
    wide = kv.read(world.storage, view, layer)
    values, mask = kv.read(world.storage, view, layer, max_blocks=2)
    assert mask.shape == (3, 4)
    assert leaves_equal((values, mask), jax.tree.map(lambda x: x[:, :4], wide))


@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_rows_are_picked_in_the_order_asked_and_absent_ones_are_fill(layer):
    world = hybrid()
    view = kv.step_view(world.state, i32([0, 0, 0]))
    every = kv.read(world.storage, view, layer)
    got = kv.read(world.storage, view, layer, rows=i32([2, -1, 0, 99]))
    for picked, row in ((0, 2), (2, 0)):
        one = jax.tree.map(lambda x, p=picked: x[p], got)
        assert leaves_equal(one, jax.tree.map(lambda x, r=row: x[r], every))
    for absent in (1, 3):
        assert not np.asarray(got[1])[absent].any()
        assert all(not np.asarray(x)[absent].any() for x in got[0].values())


def test_a_flat_view_shows_up_to_the_last_position_in_it():
    world = hybrid()
    assert bool(world.reserve({0: 3, 2: 3}).ok)
    rows, positions = i32([2, 0, 0, -1, 2]), i32([4, 7, 8, -1, 5])
    view = kv.ragged_view(world.state, rows, positions)
    for layer, last in ((0, (9, 0, 6)), (1, (9, 0, 6)), (2, (9, 0, 6))):
        group = world.model.groups[layer]
        shown = np.asarray(view.key_positions(group.name))
        for row, stop in enumerate(last):
            first = group.first_read(world.n(row))
            assert shown[row][shown[row] >= 0].tolist() == list(range(first, stop))
    compressed = np.asarray(view.key_positions("compressed3"))
    assert compressed[0][compressed[0] >= 0].tolist() == [2, 5, 8]
    assert compressed[2][compressed[2] >= 0].tolist() == [2, 5]


def test_settled_tokens_are_never_written_again():
    world = hybrid()
    before = copy_of(world.storage)
    view = kv.ragged_view(world.state, i32([0, 0, 2]), i32([0, 6, 3]))
    for layer, shapes in layers_of(world.setup, recurrent=False):
        data = {b: jnp.full((3, *s), 9.0) for b, s in shapes.items()}
        world.storage = kv.write(world.storage, view, layer, data)
    assert leaves_equal(before, world.storage)


def test_copies_with_an_absent_end_are_skipped():
    world = hybrid()
    before = copy_of(world.storage)
    held = world.table(0)[0]
    pairs = (i32([-1, held, 10, held, 2**31 - 1]), i32([held, -1, held, 10, held]))
    assert leaves_equal(before, kv.copy_blocks(world.storage, {"full": pairs}))
    with pytest.raises(kv.SpecError, match=r"fall.*full"):
        kv.copy_blocks(world.storage, {"fall": pairs})


def test_imports_and_exports_of_absent_ids():
    world = hybrid()
    held = world.table(0)[0]
    before = copy_of(world.storage)
    data = kv.export_blocks(world.storage, "full", i32([held, -1, 10]))
    for leaf in jax.tree.leaves(data):
        assert np.asarray(leaf)[0].any()
        assert not np.asarray(leaf)[1:].any()
    out = kv.import_blocks(world.storage, "full", i32([-1, -9, 2**31 - 1]), data)
    assert leaves_equal(before, out)


def test_values_are_checked_by_name_shape_and_dtype():
    world = World(PLAIN)
    world.admit(0)
    world.reserve({0: 2})
    view = kv.step_view(world.state, i32([2, 0, 0, 0]))
    good = jnp.zeros((4, 2, 1, 4))
    for values, named in (
        ({"k": good}, "v"),
        ({"k": good, "v": good, "extra": good}, "extra"),
        ({"k": good, "v": good.astype(jnp.bfloat16)}, "bfloat16.*float32|float32.*bfloat16"),
        ({"k": good, "v": good[..., :3]}, "3"),
        ({"k": good, "v": good[:3]}, "3"),
    ):
        with pytest.raises(ValueError, match=named):
            kv.write(world.storage, view, 0, values)
    with pytest.raises(kv.SpecError):
        kv.write(world.storage, view, 1, {"k": good, "v": good})


def test_layers_of_one_tag_under_a_scan():
    layers = [{"swa": kv.SlidingWindow(4, 1, 4, dtype="float32"),
               "csa": kv.Compressed(2, 4, dtype="float32")}] * 3  # fmt: skip
    spec = kv.CacheSpec.from_layers(layers, block_size=2)
    counts = {g.name: 6 for g in spec.groups}
    plan = kv.plan(spec, num_blocks=counts, max_seqs=1, max_seq_len=8, max_step_tokens=4)
    state, storage = kv.init(spec, plan)
    state, _ = kv.admit(state, i32([0]))
    state, _ = kv.reserve(state, i32([4]))
    view = kv.step_view(state, i32([4]))
    data = jnp.arange(48.0).reshape(3, 1, 4, 1, 4)

    def put(storage, layer, x):
        storage = kv.write(storage, view, layer, {"k": x, "v": -x}, tag="swa")
        return kv.write(storage, view, layer, {"entry": x[:, :, 0]}, tag="csa")

    looped = storage
    for layer in range(3):
        looped = put(looped, layer, data[layer])
    scanned, _ = jax.lax.scan(lambda s, a: (put(s, *a), None), storage, (jnp.arange(3), data))
    assert leaves_equal(looped, scanned)
    _, (read, mask) = jax.lax.scan(
        lambda _, layer: (None, kv.read(scanned, view, layer, tag="csa")), None, jnp.arange(3)
    )
    entries = np.asarray(read["entry"])[np.asarray(mask)].reshape(3, 2, 4)
    assert (entries == np.asarray(data)[:, 0, 1::2, 0]).all()
