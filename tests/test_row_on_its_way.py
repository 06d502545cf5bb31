"""A row whose bytes are moved between the steps of others: what is held, given up, refused."""

import pytest
from host_cases import MIXED, free, grown, rows_ids, seen, spoilt, tier_of
from lockstep import i32

import kvpool as kv
from kvpool.tiers import (
    backup,
    discard,
    finish_backup,
    finish_restore,
    restore,
    start_backup,
    start_restore,
)


def test_blocks_in_flight_are_held_whoever_wants_them():
    world = grown(MIXED, {0: 7, 1: 2})
    tier = tier_of(MIXED, chunk_bytes=64)
    content, gone = seen(MIXED, world.state, world.storage, 0), rows_ids(MIXED, world.state, 0)
    state, record = start_backup(tier, world.state, 0)
    state = kv.release(state, i32([0]))
    kv.check(state)
    assert not record.done
    with pytest.raises(kv.SpecError, match="still on their way"):
        start_restore(tier, state, record, 2)
    with pytest.raises(kv.SpecError, match="is not done"):
        discard(tier, record)
    state, result = kv.reserve(state, i32([0, 5, 0]))  # others get other blocks
    assert bool(result.ok)
    mine = rows_ids(MIXED, state, 1)
    assert not any(set(mine[name]) & set(gone[name]) for name in gone)
    storage, sends = spoilt(MIXED, state, world.storage), 0
    while not record.send(storage):
        sends += 1
        assert sends < 100
    before = free(state)
    state = finish_backup(tier, state, record)
    kv.check(state)
    assert free(state) == {name: before[name] + len(gone[name]) for name in before}
    state, restoring, result = start_restore(tier, state, record, 2)
    with pytest.raises(kv.SpecError, match="is being restored from"):
        discard(tier, record)
    storage = spoilt(MIXED, state, storage)
    order = []
    while not restoring.done:
        order.append(sorted(restoring.layers_to_come))
        storage = restoring.receive(storage)
    assert order[0] == [0, 1, 2]
    assert order == sorted(order, key=lambda layers: layers[0])
    assert order[-1] == [2]
    state = finish_restore(state, restoring)
    kv.check(state)
    assert seen(MIXED, state, storage, 2) == content
    discard(tier, record)


def test_copies_that_are_given_up_leave_nothing_behind():
    world = grown(MIXED, {0: 7})
    tier = tier_of(MIXED, chunk_bytes=64)
    whole = tier.pools.available()
    state, record = start_backup(tier, world.state, 0)
    record.send(world.storage)
    state = finish_backup(tier, state, record)
    kv.check(state)
    assert tier.pools.available() == whole
    assert free(state) == free(world.state)
    record = backup(tier, state, world.storage, 0)
    trying, restoring, _ = start_restore(tier, state, record, 1)
    restoring.receive(world.storage)
    trying = finish_restore(trying, restoring)
    kv.check(trying)
    assert free(trying) == free(state)
    assert not bool(trying.live[1])
    discard(tier, record)
    assert tier.pools.available() == whole


def test_a_copy_that_was_given_up_moves_nothing_any_more():
    """Its blocks, at both ends, may be another's by now."""
    world = grown(MIXED, {0: 7, 1: 7})
    tier = tier_of(MIXED, 4, 2, 1, chunk_bytes=64)
    state, stale = start_backup(tier, world.state, 0)
    state = finish_backup(tier, state, stale)
    record = backup(tier, state, world.storage, 1)
    assert sorted(record.allocation.ids["full"]) == sorted(stale.allocation.ids["full"])
    with pytest.raises(kv.SpecError, match="copy: wanted one that goes on, got one that was given"):
        stale.send(world.storage, wait=True)
    assert not stale.done
    trying, restoring, _ = start_restore(tier, state, record, 2)
    state = finish_restore(trying, restoring)
    with pytest.raises(kv.SpecError, match="copy: wanted one that goes on"):
        restoring.receive(world.storage, donate=True)
    with pytest.raises(kv.SpecError, match="restoring: wanted one that is under way"):
        finish_restore(state, restoring)
    assert (restoring.done, record.readers) == (False, 0)
    content = seen(MIXED, state, world.storage, 1)
    state, storage, result = restore(tier, state, world.storage, record, 2)
    assert bool(result.ok)
    assert seen(MIXED, state, storage, 2) == content


def test_a_restore_is_finished_once():
    world = grown(MIXED, {0: 7})
    tier = tier_of(MIXED)
    record = backup(tier, world.state, world.storage, 0)
    state, restoring, _ = start_restore(tier, world.state, record, 1)
    restoring.receive(world.storage, wait=True)
    state = finish_restore(state, restoring)
    with pytest.raises(kv.SpecError, match="restoring: wanted one that is under way"):
        finish_restore(state, restoring)
    assert (int(state.seq_lens[1]), record.readers) == (7, 0)
    discard(tier, record)
