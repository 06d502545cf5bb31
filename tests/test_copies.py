"""Blocks to the host and back: the same bytes in every layout and on every way, and no more at a
time than was allowed."""

import contextlib
import itertools

import jax
import numpy as np
import pytest
from faults import WAYS, Fault, Faults, go
from host_cases import MIXED, free, grown, pool_books, seen, tier_of, unordered
from lockstep import copy_of, i32, leaves_equal
from storage_cases import random_bits
from store_worker import digest

import kvpool as kv
from kvpool.tiers import (
    BLOCK_FIRST,
    LAYER_FIRST,
    HostBlocks,
    Loading,
    Saving,
    Store,
    backup,
    convert,
    copies,
    discard,
    finish_backup,
    finish_restore,
    host_blocks,
    pieces_of,
    restore,
    start_backup,
    start_restore,
)

LAYERS = [
    kv.FullAttention(2, 8),
    kv.RecurrentState({"conv": ((3,), "float32"), "ssm": ((5,), "bfloat16")}),
    kv.FullAttention(2, 8),
    kv.SlidingWindow(8, 1, 8, dtype="int8", scales="token"),
    kv.FullAttention(2, 8),
]
BLOCKS = {"full": 13, "state": 6, "window8": 9}


def filled(seed=0):
    """(plan, storage) with bits of every kind in all blocks."""
    spec = kv.CacheSpec.from_layers(LAYERS, block_size=4)
    plan = kv.plan(spec, num_blocks=BLOCKS, max_seqs=2, max_seq_len=24)
    storage = kv.init_storage(spec, plan)
    for index, (name, number) in enumerate(BLOCKS.items()):
        words = kv.export_blocks(storage, name, i32(range(number)))
        data = random_bits(seed + index, words.dtype.name, words.shape)
        storage = kv.import_blocks(storage, name, i32(range(number)), data)
    return plan, storage


@pytest.fixture(params=WAYS)
def way(request, monkeypatch):
    go(request.param, monkeypatch)
    return request.param


def memory_of(plan, layout=BLOCK_FIRST):
    return {g.name: HostBlocks(g, BLOCKS[g.name], layout) for g in plan.spec.groups}


SOURCE = {"full": [12, 0, 3, 4, 5, 6, 7], "state": [5], "window8": [1, 3, 2]}
HOST = {"full": [2, 3, 4, 5, 0, 9, 12], "state": [0], "window8": [8, 0, 1]}
TARGET = {"full": [1, 11, 9, 7, 5, 3, 2], "state": [2], "window8": [0, 8, 4]}


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("layout", [BLOCK_FIRST, LAYER_FIRST])
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("chunk", [1, 1000, 1 << 20])
def test_blocks_come_back_as_they_were_and_others_are_not_touched(layout, by_layer, chunk):
    plan, storage = filled()
    memory = memory_of(plan, layout)
    saving = Saving(memory, pieces_of(memory, SOURCE, HOST, chunk))
    assert saving.send(storage, wait=True)
    for name, ids in HOST.items():
        data = np.asarray(kv.export_blocks(storage, name, i32(SOURCE[name])))
        assert memory[name].get(ids).tobytes() == data.tobytes()
    other = filled(seed=7)[1]
    before = copy_of(other)
    loading = Loading(memory, pieces_of(memory, TARGET, HOST, chunk, by_layer))
    loaded = loading.receive(other, wait=True)
    assert leaves_equal(before, other)  # it was not donated
    for name, number in BLOCKS.items():
        wanted = np.array(kv.export_blocks(other, name, i32(range(number))))
        came = np.asarray(kv.export_blocks(storage, name, i32(SOURCE[name])))
        wanted[TARGET[name]] = came
        assert np.array_equal(kv.export_blocks(loaded, name, i32(range(number))), wanted)


def test_layouts_hold_the_same_bytes_and_are_converted_by_name():
    plan, storage = filled()
    arrays = {}
    for layout in (BLOCK_FIRST, LAYER_FIRST):
        memory = memory_of(plan, layout)["full"]
        memory.put(range(13), np.asarray(kv.export_blocks(storage, "full", i32(range(13)))))
        arrays[layout] = memory.array
        part = memory.get_layer([4, 2], 1)
        whole = memory.get([4, 2]).reshape(2, 3, -1)
        assert part.tobytes() == np.ascontiguousarray(whole[:, 1]).tobytes()
    layer = plan.spec.group("full").bytes_per_block // 3
    assert arrays[BLOCK_FIRST].shape == (13, 3, layer)
    assert arrays[LAYER_FIRST].shape == (3, 13, layer)
    assert np.array_equal(convert(arrays[BLOCK_FIRST], LAYER_FIRST), arrays[LAYER_FIRST])
    assert np.array_equal(convert(arrays[LAYER_FIRST], BLOCK_FIRST), arrays[BLOCK_FIRST])
    for wrong in (lambda: convert(arrays[BLOCK_FIRST], "page"), lambda: memory_of(plan, "page")):
        with pytest.raises(kv.SpecError, match="wanted 'block_first' or 'layer_first', got 'page'"):
            wrong()


def test_a_block_of_every_layout_is_stored_as_export_blocks_gives_it(tmp_path):
    plan, storage = filled()
    store = Store(tmp_path, plan.spec)
    for number, layout in enumerate((BLOCK_FIRST, LAYER_FIRST)):
        memory = memory_of(plan, layout)
        saving = Saving(memory, pieces_of(memory, SOURCE, HOST))
        saving.send(storage, wait=True)
        for name, ids in HOST.items():
            assert store.put(name, digest(number), memory[name].get(ids[:1])).wait()
            wanted = np.asarray(kv.export_blocks(storage, name, i32(SOURCE[name][:1])))
            found = store.get(name, digest(number))
            assert found.tobytes() == wanted.tobytes()
            for target in memory_of(plan, BLOCK_FIRST)[name], memory_of(plan, LAYER_FIRST)[name]:
                target.put([3], found[None])
                assert target.get([3]).tobytes() == wanted.tobytes()


def test_pinned_memory_of_the_device_is_memory():
    """The CPU has memory of this kind too, and takes plain memory for its blocks only because that
    is as good there."""
    owner, view = host_blocks.pinned_memory(4096, jax.devices()[0])
    assert owner.sharding.memory_kind == host_blocks.PINNED
    assert not view.any()
    view[:] = np.arange(4096) % 251
    assert np.asarray(owner).tobytes() == view.tobytes()


class Slow:
    """A chunk that has not arrived before its time."""

    arrived = False

    def __init__(self, chunk):
        self.chunk = chunk

    def copy_to_host_async(self):
        self.chunk.copy_to_host_async()

    def is_ready(self):
        return Slow.arrived

    def __array__(self, *_, **__):
        return np.asarray(self.chunk)


def test_no_more_than_two_chunks_are_on_their_way_and_nobody_waits_for_them(monkeypatch):
    plan, storage = filled()
    memory = memory_of(plan)
    export = copies._export
    monkeypatch.setattr(copies, "_platform", lambda _: "another")
    monkeypatch.setattr(copies, "_export", lambda *args, **named: Slow(export(*args, **named)))
    ids = {"full": list(range(13))}
    saving = Saving(memory, pieces_of(memory, ids, ids, chunk_bytes=1))
    for _ in range(5):
        assert not saving.send(storage)
    assert (len(saving._flying), len(saving._todo)) == (2, 11)
    assert not memory["full"].array.any()
    monkeypatch.setattr(Slow, "arrived", True)
    sends = 0
    while not saving.send(storage):
        sends += 1
    assert sends == 11
    data = np.asarray(kv.export_blocks(storage, "full", i32(range(13))))
    assert memory["full"].array.tobytes() == data.tobytes()
    sizes = [len(piece.host_ids) for piece in pieces_of(memory, ids, ids, 1 << 20)]
    assert sizes == [8, 4, 1]


def test_the_first_layer_comes_first():
    plan, storage = filled()
    memory = memory_of(plan)
    loading = Loading(memory, pieces_of(memory, TARGET, HOST, 1 << 20, by_layer=True))
    assert loading.layers_to_come == {0, 1, 2, 3, 4}
    came = []
    while not loading.done:
        before = loading.layers_to_come
        storage = loading.receive(storage)
        came += sorted(before - loading.layers_to_come)
    assert came == [0, 1, 2, 3, 4]


def _backup(tier, state, storage, _):
    return state, storage, backup(tier, state, storage, 0)


def _backup_in_steps(tier, state, storage, _):
    held, record = start_backup(tier, state, 0)
    try:
        while not record.send(storage):
            pass
    finally:
        state = finish_backup(tier, held, record)
        assert leaves_equal(state, tier.before[0])
    return state, storage, record


def _restore(tier, state, storage, record):
    state, storage, _ = restore(tier, state, storage, record, 1)
    return state, storage, record


def _restore_in_steps(tier, state, storage, record):
    seated, restoring, _ = start_restore(tier, state, record, 1)
    try:
        while not restoring.done:
            storage = restoring.receive(storage)
    except BaseException:
        given_up = finish_restore(seated, restoring)
        kv.check(given_up)
        assert leaves_equal(unordered(given_up), unordered(tier.before[0]))
        raise
    return finish_restore(seated, restoring), storage, record


# Of each verb, the calls that move the 7 blocks of a row on each way. Where they lie: the storage
# is looked at and a block copied; the host's memory is looked at, a block copied and waited for.
# Through chunks: besides that a chunk is gathered, sent, arrives and is taken in; a chunk
# is gathered, sent and taken in.
CALLS = {
    _backup: (14, 35, 35),
    _backup_in_steps: (14, 35, 35),
    _restore: (21, 21, 21),
    _restore_in_steps: (21, 21, 21),
}


@pytest.mark.parametrize("verb", CALLS)
def test_a_copy_that_raises_at_any_call_leaves_everything_as_it_was(verb, way, monkeypatch):
    """Every call that moves bytes raises once; then the same thing is done without a fault."""
    faults = Faults(monkeypatch)
    faults.wrap_copies()
    faults.wrap(jax, "block_until_ready")
    world = grown(MIXED, {0: 7})
    tier = tier_of(MIXED, chunk_bytes=100)
    whole = tier.pools.available()
    content = seen(MIXED, world.state, world.storage, 0)
    kept = backup(tier, world.state, world.storage, 0)
    restore(tier, world.state, world.storage, kept, 1)  # the host's memory is known to jax by now
    books = pool_books(tier)
    tier.before = copy_of((world.state, world.storage))
    for at in itertools.count():
        faults.arm(at)
        with contextlib.suppress(Fault):
            state, storage, record = verb(tier, world.state, world.storage, kept)
        done = not faults.failed
        faults.arm(None)
        assert leaves_equal(tier.before, (world.state, world.storage))
        tier.pools.check()
        assert kept.readers == 0
        if done:
            break
        assert pool_books(tier) == books
    assert at == CALLS[verb][WAYS.index(way)]
    if record is not kept:
        state, storage, result = restore(tier, world.state, world.storage, record, 1)
        assert bool(result.ok)
        discard(tier, record)
    kv.check(state)
    assert seen(MIXED, state, storage, 1) == content
    discard(tier, kept)
    assert tier.pools.available() == whole
    assert free(world.state) == free(kv.release(state, i32([1])))
