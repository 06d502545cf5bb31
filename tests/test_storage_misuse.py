"""What the storage's verbs refuse, and what they say: the argument, got and wanted."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from lockstep import i32, leaves_equal
from storage_cases import world

import kvpool as kv


def test_layers_are_integers_of_any_kind():
    state, storage = world([kv.FullAttention(1, 4)] * 2)
    view = kv.step_view(state, i32([1, 1]))
    first = kv.read(storage, view, 1)
    for layer in (np.int32(1), np.uint8(1), jnp.int32(1)):
        assert leaves_equal(kv.read(storage, view, layer), first)
    for layer in (1.0, "1", None, jnp.float32(1)):
        with pytest.raises(ValueError, match="layer: wanted an integer"):
            kv.read(storage, view, layer)
    for layer in (-1, 2):
        with pytest.raises(kv.SpecError, match="layer"):
            kv.read(storage, view, layer)


def test_values_are_refused_by_name():
    state, storage = world([kv.FullAttention(1, 4), kv.RecurrentState({"s": ((2,), "int8")})])
    view = kv.step_view(state, i32([1, 1]))
    good = np.zeros((2, 3, 1, 4), ml_dtypes.bfloat16)
    flat = kv.ragged_view(state, i32([0] * 5), i32([0] * 5))
    for values, named, step in (
        ({"k": good}, "wanted the buffers k, v, got k", view),
        ({"k": good, "v": good, "w": good}, "got k, v, w", view),
        ([good, good], "got list", view),
        ({"k": good, "v": good[:, :2]}, r"'v'.*\[2, 3, 1, 4\].*\[2, 2, 1, 4\]", view),
        ({"k": good, "v": good.astype(np.float32)}, r"'v'.*bfloat16.*float32", view),
        ({"k": good[0, 0, 0], "v": good}, r"'k'.*got bfloat16\[4\]", view),
        ({"k": 1.0, "v": good}, r"'k'.*got float64\[\]", view),
        ({"k": good[0], "v": good[0]}, r"\[5, 1, 4\], got bfloat16\[3, 1, 4\]", flat),
    ):
        with pytest.raises(ValueError, match=named):
            kv.write(storage, step, 0, values)
    with pytest.raises(ValueError, match=r"'s'.*wanted int8\[2, 2\], got int8\[5, 2\]"):
        kv.write_state(storage, flat, 1, {"s": np.zeros((5, 2), np.int8)})
    with pytest.raises(kv.SpecError, match="'state' keeps recurrent state; use read_state"):
        kv.write(storage, view, 1, {"s": np.zeros((2, 2), np.int8)})
    with pytest.raises(kv.SpecError, match="'full' keeps tokens; use read and write"):
        kv.read_state(storage, view, 0)


def test_blocks_are_refused_by_name():
    state, storage = world([kv.FullAttention(1, 4)])
    data = kv.export_blocks(storage, "full", i32([0, 1]))
    for bad in (data[:1], data[:, :-1], data.astype(np.uint8), data.astype(np.int16)):
        with pytest.raises(ValueError, match=r"data: wanted uint16\[2, 32\], got"):
            kv.import_blocks(storage, "full", i32([0, 1]), bad)
    with pytest.raises(kv.SpecError, match=r"fall.*full"):
        kv.export_blocks(storage, "fall", i32([0]))
    with pytest.raises(ValueError, match="ids: wanted integers, got float64"):
        kv.export_blocks(storage, "full", np.zeros(2))
    with pytest.raises(ValueError, match=r"copies\['full'\] target: wanted i32\[2\]"):
        kv.copy_blocks(storage, {"full": (i32([0, 1]), i32([0]))})
    other, _ = world([kv.FullAttention(1, 4)], max_len=16)
    with pytest.raises(kv.SpecError, match="another plan"):
        kv.read(storage, kv.step_view(other, i32([0, 0])), 0)
    assert kv.copy_blocks(storage, {}) is storage
    del state


def test_too_many_entries_for_a_slot_number():
    spec = kv.CacheSpec.from_layers([kv.Region("all", {"x": ((), "int8")})], block_size=1 << 16)
    plan = kv.plan(spec, num_blocks={"full": 1 << 15}, max_seqs=1, max_seq_len=1 << 16)
    with pytest.raises(kv.SpecError, match=r"'full': wanted less than 2\^31 entries"):
        kv.init_storage(spec, plan)
