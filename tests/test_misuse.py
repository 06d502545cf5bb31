"""Misuse is answered: a status or a fault, and every other array bit for bit as it was."""

import numpy as np
import pytest
from lockstep import EAGER, I32MAX, I32MIN, JIT, Lockstep, Setup, copy_of, i32, leaves_equal
from test_core_cases import names

import kvpool as kv

SETUP = Setup(("all", ("window", 4), "state"), (9, 9, 4), block=2, rows=4, max_len=16, step=6)
OUTSIDE = (-2, 4, I32MAX, I32MIN)
VERBS = pytest.mark.parametrize("verbs", [EAGER, JIT], ids=["eager", "jit"])


def start(verbs=JIT) -> Lockstep:
    """Rows 0 and 1 live at lengths 5 and 4 with room for 6; row 2 live and empty; row 3 free."""
    both = Lockstep(SETUP, verbs)
    both.admit(0, 1, 2)
    both.reserve([5, 4, 0, 0])
    both.advance([5, 4, 0, 0])
    both.reserve([1, 2, 0, 0])
    return both


@VERBS
@pytest.mark.parametrize("row", OUTSIDE)
def test_rows_that_do_not_exist(verbs, row):
    both = start(verbs)
    assert names(both.admit(row)) == ["BAD_ARGUMENT"]
    assert names(both.snapshot(row)) == ["BAD_ARGUMENT"]
    assert names(both.fork(row, 3)) == ["BAD_ARGUMENT"]
    assert names(both.fork(0, row)) == ["BAD_ARGUMENT"]
    both.release(row)


@VERBS
def test_live_rows_are_busy_and_free_rows_free(verbs):
    both = start(verbs)
    assert names(both.admit(0, 2, 3, 3)) == ["BUSY", "BUSY", "OK", "BUSY"]
    both.release(3)
    assert names(both.fork([0, 0], [1, 0])) == ["BUSY", "BUSY"]
    assert names(both.fork([3], [3])) == ["FREE_ROW"]
    assert names(both.snapshot(3, 0, 0)) == ["FREE_ROW", "OK", "BUSY"]
    assert names(both.reserve({3: 1}))[3] == "FREE_ROW"
    assert names(both.truncate({3: 1}))[3] == "FREE_ROW"
    both.release(3, 0, 0)
    both.advance({3: 1})


@VERBS
def test_what_is_not_asked_names_no_row(verbs):
    """A pad beside a row's index is no first naming of it: the row is not BUSY afterwards."""
    both = start(verbs)
    assert names(both.fork([-1, 0], [3, 3])) == ["SKIPPED", "OK"]
    both = start(verbs)
    blocks = {g.name: i32([-1]) for g in SETUP.spec.groups}
    result = both.admit(3, 3, lengths=[-1, 0], blocks=blocks, shared=True)
    assert names(result) == ["SKIPPED", "OK"]


@VERBS
@pytest.mark.parametrize("tokens", [I32MIN, -7, -1, 0])
def test_lengths_that_ask_for_nothing(verbs, tokens):
    both = start(verbs)
    before = both.state
    everyone = [tokens] * 4
    assert set(names(both.reserve(everyone))) == {"SKIPPED"}
    assert set(names(both.reserve(everyone, each=True, tail_only=True))) == {"SKIPPED"}
    both.advance(everyone)
    if tokens < 0:
        assert set(names(both.truncate(everyone))) == {"SKIPPED"}
    assert both.fits(everyone) == ["OK"] * 4
    assert leaves_equal(before, both.state)


@VERBS
@pytest.mark.parametrize("tokens", [17, 1000, I32MAX])
def test_lengths_beyond_everything(verbs, tokens):
    both = start(verbs)
    for options in ({}, {"each": True}, {"tail_only": True}):
        want = ["TOO_LONG", "TOO_LONG", "TOO_LONG", "FREE_ROW"]
        assert names(both.reserve([tokens] * 4, **options)) == want
    want = ["BAD_ARGUMENT"] * 3 + ["FREE_ROW"]
    assert names(both.truncate([tokens] * 4)) == want
    assert both.fits([tokens] * 4) == ["NEVER"] * 4
    both.advance([tokens] * 4)
    assert np.asarray(both.state.seq_lens).tolist() == [5, 4, 0, 0]


@VERBS
def test_a_row_at_fault_holds_back_the_others(verbs):
    both = start(verbs)
    result = both.reserve([1, 7, 0, 1])
    assert names(result) == ["HELD_BACK", "STEP_TOO_LONG", "SKIPPED", "FREE_ROW"]
    assert not bool(result.ok)
    result = both.reserve([6, 7, 0, 1], each=True)
    assert names(result) == ["OK", "STEP_TOO_LONG", "SKIPPED", "FREE_ROW"]


@VERBS
def test_one_row_advanced_too_far_does_not_stop_the_others(verbs):
    both = start(verbs)
    both.advance([2, 2, 1, 1])  # room for 1, 2, none, and a free row
    assert np.asarray(both.state.seq_lens).tolist() == [5, 6, 0, 0]


@VERBS
def test_prefix_lengths_and_ids_outside(verbs):
    both = start(verbs)
    blocks = {g.name: i32([-1, I32MAX, I32MIN, 99]) for g in SETUP.spec.groups}
    for length, status in ((17, "TOO_LONG"), (I32MAX, "TOO_LONG"), (4, "UNREACHABLE"),
                           (-1, "SKIPPED"), (I32MIN, "SKIPPED"), (0, "OK")):  # fmt: skip
        assert names(both.admit(3, lengths=length, blocks=blocks, shared=True)) == [status]


@VERBS
def test_holders_that_are_not_there(verbs):
    both = start(verbs)
    mine = both.table(0)[0]
    spare = next(i for i in range(9) if i not in both.ids["full"].values())
    both.retain({"full": i32([spare, -1, I32MAX, I32MIN, 9])})  # nobody holds it
    both.drop({"full": i32([spare, -1, I32MAX, I32MIN, 9])})
    both.drop({"full": i32([mine])})  # a row holds it, and nobody retained it
    assert both.holders(0, mine) == 1
    both.retain({"full": i32([mine, mine])})
    assert both.holders(0, mine) == 3
    both.drop({"full": i32([mine, mine, mine])})
    assert both.holders(0, mine) == 1
    both.retain({"full": i32([-1, I32MAX])})  # absent ids alone are no misuse
    assert int(both.state.faults) == 0


@VERBS
def test_unknown_groups_are_named(verbs):
    both = start(verbs)
    ids = {"fall": i32([0])}
    for call in (verbs.retain, verbs.drop):
        with pytest.raises(kv.SpecError, match=r"fall.*full"):
            call(both.state, ids)
    with pytest.raises(kv.SpecError, match=r"fall.*full"):
        verbs.admit(both.state, i32([3]), kv.Prefix(2, ids))
    with pytest.raises(kv.SpecError, match=r"fall.*full"):
        kv.block_table(both.state, "fall")


def test_faults_stay_until_cleared_and_are_named():
    state = start().state
    for misuse, word in (
        (lambda s: kv.advance(s, i32([9, 0, 0, 0])), "advance"),
        (lambda s: kv.release(s, i32([3])), "release"),
        (lambda s: kv.retain(s, {"full": i32([8])}), "retain"),
        (lambda s: kv.drop(s, {"full": i32([8])}), "drop"),
    ):
        after = misuse(state)
        later, _ = kv.reserve(after, i32([0, 0, 1, 0]))
        for faulty in (after, later):
            with pytest.raises(kv.InvariantError, match=f"(?i){word}"):
                kv.check(faulty)
        assert leaves_equal(kv.clear_faults(after), state)
        kv.check(kv.clear_faults(later))


@pytest.mark.parametrize(
    "call",
    [
        lambda s: kv.reserve(s, i32([1, 1, 1])),
        lambda s: kv.reserve(s, np.ones((4, 1), np.int32)),
        lambda s: kv.reserve(s, np.ones(4, np.float32)),
        lambda s: kv.advance(s, i32([1])),
        lambda s: kv.truncate(s, i32([1, 1, 1, 1, 1])),
        lambda s: kv.fork(s, i32([0, 1]), i32([3])),
        lambda s: kv.admit(s, np.asarray([0.5])),
        lambda s: kv.release(s, i32([[0]])),
        lambda s: kv.fits(s, i32([1])),
    ],
)
def test_arguments_of_another_shape_or_kind_are_refused_by_name(call):
    state = start().state
    kept = copy_of(state)
    with pytest.raises(ValueError, match=r"rows|num_tokens|seq_lens|src|dst"):
        call(state)
    assert leaves_equal(kept, state)
