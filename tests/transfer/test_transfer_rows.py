"""The bookkeeping of both sides: rows, states and inboxes that do not belong together."""

import numpy as np
import pytest
from machines import SPEC, Machine

import kvpool as kv
from kvpool.transfer import Inbox, Offer, Shards, rows


@pytest.fixture(scope="module")
def source():
    machine = Machine()
    machine.fill(1, 21)
    return machine.ranks[0]


def begun(plan):
    """(state, storage) with room for a plan's tokens in row 0, and an inbox that is full."""
    state, storage = Machine().ranks[0]
    state, result = rows.begin(state, 0, plan.num_tokens)
    assert bool(result.ok)
    inbox = Inbox(plan, 0)
    for sender in inbox.arrivals.outlines:
        inbox.arrivals.here(sender)[:] = True
    return state, storage, inbox


@pytest.mark.parametrize("row", [-1, 2, 1.0, True, None])
def test_a_row_that_does_not_exist(source, row):
    state, storage, inbox = begun(kv.transfer.plan(SPEC, 21))
    told = f"row: wanted one from 0 to 1, got {row}"
    for call in (
        lambda: rows.offer_of(*source, row, "r", SPEC),
        lambda: rows.fill(Offer("r", SPEC, 21), *source, row),
        lambda: rows.begin(state, row, 3),
        lambda: rows.finish(state, storage, row, inbox),
    ):
        with pytest.raises(kv.SpecError, match=told):
            call()


def test_a_spec_that_differs_where_the_bytes_are_as_many(source):
    other = kv.CacheSpec.from_layers(
        [kv.FullAttention(4, 4, dtype="float16"), *SPEC.layers[1:]], block_size=4
    )
    state, storage, inbox = begun(kv.transfer.plan(other, 21))
    told = rf"state: of the spec {SPEC.digest[:12]}, wanted one of kvpool.per_rank\(spec, 1\)"
    with pytest.raises(kv.SpecError, match=told):
        rows.finish(state, storage, 0, inbox)
    with pytest.raises(kv.SpecError, match=told):
        rows.offer_of(*source, 1, "r", other)
    with pytest.raises(kv.SpecError, match=r"kvpool.per_rank\(spec, 2\)"):
        rows.offer_of(*source, 1, "r", SPEC, Shards(2))
    with pytest.raises(kv.SpecError, match="blocks: made from another plan than the state's"):
        rows.offer_of(source[0], Machine(max_seq_len=60).ranks[0][1], 1, "r", SPEC)


def test_dealt_blocks_are_not_settled_in_a_table_of_all_columns():
    state, storage, inbox = begun(kv.transfer.plan(SPEC, 21, receiver=Shards(1, 2)))
    with pytest.raises(kv.SpecError, match="shards: a state's table has all columns; use"):
        rows.finish(state, storage, 0, inbox)


def test_the_pooling_may_differ(source):
    offer = rows.offer_of(*source, 1, "r", kv.with_pooling(SPEC, "elastic"))
    assert offer.num_tokens == 21


def test_a_prefix_longer_than_the_sequence():
    machine = Machine(blocks={group.name: 32 for group in SPEC.groups})
    machine.fill(1, 20)
    state, taken = kv.snapshot(machine.ranks[0][0], [1])
    blocks = {g.name: np.asarray(kv.block_table(state, g.name))[1] for g in SPEC.groups}
    blocks["state"] = np.asarray(taken.blocks["state"])
    with pytest.raises(kv.SpecError, match="prefix: wanted at most 18 tokens, got 20"):
        rows.begin(state, 0, 18, kv.Prefix(20, blocks))


def test_an_offer_with_snapshots_is_filled_but_for_them(source):
    offer = Offer("r", SPEC, 21, snapshots=[8, 16])
    rows.fill(offer, *source, 1)
    state = SPEC.group_index("state")
    assert [here.all() for here in offer._here] == [
        index != state for index in range(len(SPEC.groups))
    ]
    assert offer._here[state].tolist() == [[False, False, True]]
    plain = rows.offer_of(*source, 1, "r", SPEC)
    assert offer.blocks[state][2].tobytes() == plain.blocks[state][0].tobytes()
    offer.put("state", np.zeros_like(offer.blocks[state][:1]), items=[8])
    assert offer._here[state].tolist() == [[True, False, True]]
