"""A live row goes to the host and comes back in other blocks and another row, bit for bit."""

import numpy as np
import pytest
from host_cases import MIXED, SHORT, decoded, free, grown, rows_ids, seen, spoilt, tier_of
from lockstep import Setup, copy_of, i32, leaves_equal
from world import fill_blocks

import kvpool as kv
from kvpool.tiers import (
    BLOCK_FIRST,
    LAYER_FIRST,
    Backup,
    HostTier,
    Shortfall,
    backup,
    discard,
    finish_restore,
    restore,
    start_restore,
)

SETUPS = {
    "mixed": MIXED,
    "bfloat16": Setup(
        ("all", ("window", 5), ("chunk", 4), ("comp", 3), "state"),
        (12, 12, 12, 12, 6), block=2, max_len=18, step=5, dtype="bfloat16",
    ),
    "short chunks": SHORT,
}  # fmt: skip


@pytest.mark.parametrize("name", SETUPS)
@pytest.mark.parametrize("length", [0, 6, 11])
@pytest.mark.parametrize(("layout", "by_step"), [(BLOCK_FIRST, False), (LAYER_FIRST, True)])
def test_a_restored_row_decodes_on_bit_identically(name, layout, length, by_step):
    setup = SETUPS[name]
    world = grown(setup, {0: length, 1: 3})
    state, storage = world.state, world.storage
    before, wanted = seen(setup, state, storage, 0), decoded(setup, state, copy_of(storage), 0)
    tier = tier_of(setup, layout=layout, chunk_bytes=100)
    record = backup(tier, state, storage, 0)
    old = rows_ids(setup, state, 0)
    assert {name: len(ids) for name, ids in record.allocation.ids.items()} == {
        name: len(ids) for name, ids in old.items()
    }
    state = kv.release(state, i32([0]))
    state, _ = kv.admit(state, i32([0]))  # another takes what is free next
    state, result = kv.reserve(state, i32([2] + [0] * (setup.rows - 1)))
    assert bool(result.ok)
    storage = spoilt(setup, state, storage)
    if by_step:
        state, restoring, result = start_restore(tier, state, record, 2)
        kv.check(state)
        while not restoring.done:
            storage = restoring.receive(storage)
        state = finish_restore(state, restoring)
    else:
        state, storage, result = restore(tier, state, storage, record, 2)
    assert result.granted.tolist() == [True]
    kv.check(state)
    assert int(state.seq_lens[2]) == length
    new = rows_ids(setup, state, 2)
    assert {name: len(ids) for name, ids in new.items()} == {n: len(i) for n, i in old.items()}
    if length > 1:
        assert all(new[name] != old[name] for name in old if old[name])
    assert seen(setup, state, storage, 2) == before
    assert decoded(setup, state, storage, 2) == wanted
    discard(tier, record)
    assert tier.pools.available() == {setup.group(i): n for i, n in enumerate(setup.blocks)}


def test_a_row_that_went_back_into_a_fresh_block_remembers_what_it_lacks():
    """Chunks of 2 in blocks of 4: at 10 the block begins at 8, and lacks 8 and 9."""
    world = grown(SHORT, {0: 12})
    world.truncate({0: 10})
    tier = tier_of(SHORT)
    record = backup(tier, world.state, world.storage, 0)
    assert record.lacking["chunk2"].tolist() == [2]
    state, storage, _ = restore(tier, world.state, world.storage, record, 2)
    kv.check(state)
    assert seen(SHORT, state, storage, 0) == seen(SHORT, state, storage, 2)
    for length, status in ((9, kv.Status.UNREACHABLE), (8, kv.Status.OK), (10, kv.Status.OK)):
        for row in (0, 2):
            asked = np.full(SHORT.rows, -1, np.int32)
            asked[row] = length
            assert int(kv.truncate(state, asked)[1].status[row]) == status


def test_what_is_reserved_beyond_the_settled_length_stays_behind():
    world = grown(MIXED, {0: 4})
    world.reserve({0: 5})
    tier = tier_of(MIXED)
    record = backup(tier, world.state, world.storage, 0)
    assert len(record.allocation.ids["full"]) == 2
    state, storage, _ = restore(tier, world.state, world.storage, record, 1)
    kv.check(state)
    assert (int(state.seq_lens[1]), int(state.room[1])) == (4, 4)
    assert seen(MIXED, state, storage, 1) == seen(MIXED, world.state, world.storage, 0)


def test_a_past_longer_than_a_step_comes_back_as_a_whole_and_takes_no_more_than_it_held():
    setup = Setup(("all", ("window", 4)), (9, 3), block=2, rows=3, max_len=18, step=1)
    world = grown(setup, {0: 16, 1: 1})
    assert free(world.state) == {"full": 0, "window4": 0}
    tier = tier_of(setup)
    record = backup(tier, world.state, world.storage, 0)
    assert {n: len(ids) for n, ids in record.allocation.ids.items()} == {"full": 8, "window4": 2}
    state = kv.release(world.state, i32([0]))
    state, _, result = restore(tier, state, world.storage, record, 2)
    assert bool(result.ok)
    kv.check(state)
    assert free(state) == {"full": 0, "window4": 0}


def test_offload_and_load_back_are_all_or_nothing():
    """Host blocks 4, 2 and 1; rows that hold (3, 2, 1) and (1, 1, 1); the device's last state."""
    world = grown(MIXED, {0: 6, 1: 2})
    tier = tier_of(MIXED, 4, 2, 1)
    record = backup(tier, world.state, world.storage, 0)
    assert tier.pools.available() == {"full": 1, "window4": 0, "state": 0}
    before = copy_of((world.state, world.storage))
    refused = backup(tier, world.state, world.storage, 1)
    assert refused == Shortfall({"window4": 1, "state": 1})
    assert tier.pools.available() == {"full": 1, "window4": 0, "state": 0}
    assert leaves_equal(before, (world.state, world.storage))
    content = seen(MIXED, world.state, world.storage, 0)

    state = kv.release(world.state, i32([0]))
    snapshots = []
    while free(state)["state"]:
        state, result = kv.snapshot(state, i32([1]))
        snapshots.append(result.blocks["state"])
    before = copy_of((state, world.storage))
    after, storage, result = restore(tier, state, world.storage, record, 2)
    assert result.status.tolist() == [kv.Status.OUT_OF_BLOCKS]
    assert {name: int(n) for name, n in result.shortfall.items()}["state"] == 1
    assert leaves_equal(before, (after, storage))
    assert tier.pools.available() == {"full": 1, "window4": 0, "state": 0}

    state = kv.drop(state, {"state": snapshots.pop()})
    state, storage, result = restore(tier, state, world.storage, record, 2)
    assert bool(result.ok)
    assert seen(MIXED, state, storage, 2) == content
    discard(tier, record)
    assert tier.pools.available() == {"full": 4, "window4": 2, "state": 1}


def test_a_host_of_a_tenth_refuses_and_the_row_goes_on():
    """Device blocks of 4 tokens, 8 of them; a row of 8 tokens; host 0.1 of it, then as much."""
    setup = Setup(("all",), (8,), block=4, rows=3, max_len=24, step=8)
    world = grown(setup, {0: 8})
    small = HostTier.of_ratio(setup.plan, 0.1)
    assert small.pools.available() == {"full": 0}
    assert backup(small, world.state, world.storage, 0) == Shortfall({"full": 2})
    world.step({0: 1})
    world.truncate({0: 8})

    tier = HostTier.of_ratio(setup.plan, 1.0)
    state, storage = world.state, world.storage
    old = rows_ids(setup, state, 0)
    data = kv.export_blocks(storage, "full", i32(old["full"]))
    record = backup(tier, state, storage, 0)
    assert tier.pools.available() == {"full": 6}
    state = kv.release(state, i32([0]))
    state, _ = kv.admit(state, i32([1]))
    state, result = kv.reserve(state, i32([0, 8, 0]))
    assert sorted(rows_ids(setup, state, 1)["full"]) == sorted(old["full"])
    storage = fill_blocks(setup, copy_of(storage), {"full": i32(old["full"])})
    state, storage, result = restore(tier, state, storage, record, 0)
    assert bool(result.ok)
    new = rows_ids(setup, state, 0)["full"]
    assert not set(new) & set(old["full"])
    assert np.array_equal(kv.export_blocks(storage, "full", i32(new)), data)
    discard(tier, record)
    assert tier.pools.available() == {"full": 8}
    with pytest.raises(kv.SpecError, match="released or reclaimed before"):
        discard(tier, record)
    assert tier.pools.available() == {"full": 8}
    with pytest.raises(kv.SpecError, match="discarded"):
        restore(tier, state, storage, record, 2)


def test_draft_layers_go_along_packed_or_apart():
    """A block is as long as its layers: 3 with one packed draft, 5 with three, in one record."""
    region = kv.FullAttention(1, 4, dtype="float32")
    for packed, drafts in ((True, 1), (True, 3), (False, 2)):
        main, draft = (kv.CacheSpec.from_layers([region] * n, 4) for n in (2, drafts))
        spec = kv.with_draft(main, draft, packed=packed)
        plan = kv.plan(
            spec, num_blocks={g.name: 4 for g in spec.groups}, max_seqs=2, max_seq_len=16
        )
        state, storage = kv.init(spec, plan)
        state, _ = kv.admit(state, i32([0]))
        state, _ = kv.reserve(state, i32([6, 0]))
        view = kv.step_view(state, i32([6, 0]))
        values = {}
        for layer in range(2 + drafts):
            data = np.random.default_rng(layer).standard_normal((2, 6, 1, 4), np.float32)
            storage = kv.write(storage, view, layer, {"k": data, "v": -data})
            values[layer] = data[0]
        state = kv.advance(state, i32([6, 0]))
        tier = HostTier.of_ratio(plan, 1.0)
        record = backup(tier, state, storage, 0)
        sizes = {g.name: 2 * g.bytes_per_block for g in spec.groups}
        assert tier.pools.used_bytes() == sum(sizes.values()) == 2 * (2 + drafts) * 4 * 32
        state, storage, _ = restore(tier, state, storage, record, 1, donate=True)
        view = kv.step_view(state, i32([0, 0]))
        for layer in range(2 + drafts):
            read, mask = kv.read(storage, view, layer)
            assert np.array_equal(np.asarray(read["k"])[1][np.asarray(mask)[1]], values[layer])


def test_refusals_of_rows_records_and_specs():
    world = grown(MIXED, {0: 5})
    tier = tier_of(MIXED)
    for row, says in ((1, "row 1 is free"), (-1, "one of 0..2"), (3, "one of 0..2"), (True, "row")):
        with pytest.raises(kv.SpecError, match=says):
            backup(tier, world.state, world.storage, row)
    other = HostTier(SHORT.spec, {})
    with pytest.raises(kv.SpecError, match="host tier: made for the spec"):
        backup(other, world.state, world.storage, 0)
    record = backup(tier, world.state, world.storage, 0)
    for row, status in ((0, kv.Status.BUSY), (7, kv.Status.BAD_ARGUMENT)):
        state, storage, result = restore(tier, world.state, world.storage, record, row)
        assert result.status.tolist() == [status]
        assert state is world.state
        assert storage is world.storage
    stranger = tier_of(MIXED)
    with pytest.raises(kv.SpecError, match="wanted a backup of this tier"):
        restore(stranger, world.state, world.storage, record, 1)
    short = Setup(("all", ("window", 4), "state"), (12, 9, 6), block=2, max_len=4, step=4)
    state = kv.init_state(short.spec, short.plan)
    storage = kv.init_storage(short.spec, short.plan)
    _, _, result = restore(tier, state, storage, record, 1)
    assert result.status.tolist() == [kv.Status.TOO_LONG]
    with pytest.raises(kv.SpecError, match="anchor: no group keeps all positions"):
        HostTier(kv.CacheSpec.from_layers([kv.SlidingWindow(4, 1, 4)]), {})
    with pytest.raises(kv.SpecError, match="ratio"):
        HostTier.of_ratio(MIXED.plan, -1)


def test_a_backup_may_be_restored_more_than_once():
    world = grown(MIXED, {0: 5})
    tier = tier_of(MIXED)
    record = backup(tier, world.state, world.storage, 0)
    assert isinstance(record, Backup)
    state, storage = world.state, world.storage
    for row in (1, 2):
        state, storage, result = restore(tier, state, storage, record, row)
        assert bool(result.ok)
    kv.check(state)
    assert seen(MIXED, state, storage, 1) == seen(MIXED, state, storage, 2)
