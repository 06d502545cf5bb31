"""Planner = allocator: what the arithmetic predicts on the host is what the verbs hand out."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpool as kv
from kvpool.held import Lengths, held_columns, lengths_after
from kvpool.needs import prefill_blocks, row_blocks

SIZE = st.integers(1, 9)
KINDS = st.one_of(
    st.just("all"),
    st.just("state"),
    st.tuples(st.sampled_from(["window", "chunk"]), SIZE),
    st.tuples(st.just("compressed"), st.integers(2, 5)),
)


@pytest.fixture(autouse=True)
def interpreted():
    """Every example has a spec of its own, which is not worth compiling."""
    with jax.disable_jit():
        yield


def region(kind, width: int):
    """A region of `width` int8 values an entry."""
    payload = {"k": ((width,), "int8")}
    if kind[0] == "compressed":
        return kv.Region("all", payload, kind[1])
    return kv.Region(kind, payload)


@st.composite
def specs(draw):
    kinds = draw(st.lists(KINDS, min_size=1, max_size=3, unique=True))
    layers = [region(kind, draw(SIZE)) for kind in kinds]
    return kv.CacheSpec.from_layers(layers, block_size=draw(st.integers(1, 6)))


def ample(spec, rows: int, length: int, step: int):
    """A plan in which nothing is ever short."""
    blocks = {group.name: rows * group.columns(length) + 1 for group in spec.groups}
    bounds = {group.name: group.blocks_per_row(step, length) for group in spec.groups}
    blocks = {name: max(n, bounds[name]) for name, n in blocks.items()}
    limits = {"max_seqs": rows, "max_seq_len": length, "max_step_tokens": step}
    return kv.plan(spec, num_blocks=blocks, **limits)


def one_row(plan) -> kv.State:
    return kv.admit(kv.init_state(plan.spec, plan), [0])[0]


def held(state) -> list[int]:
    """Blocks of each group that rows hold, by the pools' own counts."""
    free = kv.free_blocks(state)
    return [state.plan.num_blocks[name] - int(count) for name, count in free.items()]


def columns(state, row: int) -> list[list[int]]:
    """For each group the columns in which the row's table names a block."""
    tables = [np.asarray(kv.block_table(state, group.name)) for group in state.plan.spec.groups]
    return [np.flatnonzero(table[row] != kv.NULL_BLOCK).tolist() for table in tables]


@settings(max_examples=25)
@given(specs(), st.integers(1, 30), SIZE, st.booleans())
def test_the_peak_of_a_chunked_prefill(spec, tokens, step, tail_only):
    plan = ample(spec, 1, 31, step)
    state, seen = one_row(plan), []
    for settled in range(0, tokens, step):
        count = [min(step, tokens - settled)]
        state, result = kv.reserve(state, count, tail_only=tail_only)
        assert result.ok
        seen.append(held(state))
        state = kv.advance(state, count)
    assert prefill_blocks(spec.groups, tokens, step, tail_only).T.tolist() == seen
    sizes = [group.bytes_per_block for group in spec.groups]
    most = max(sum(n * size for n, size in zip(blocks, sizes, strict=True)) for blocks in seen)
    peak = plan.peak(tokens, step, tail_only)
    assert peak.total_bytes == most
    assert list(peak.blocks.values()) == seen[peak.settled // step]
    assert row_blocks(spec.groups, [tokens]).T.tolist() == [held(state)]
    bounds = [plan.blocks_per_row(group) for group in spec.groups]
    assert all(n <= bound for blocks in seen for n, bound in zip(blocks, bounds, strict=True))
    state, _ = kv.reserve(state, [1])
    assert row_blocks(spec.groups, [tokens + 1], writing=True).T.tolist() == [held(state)]
    kv.check(state)


STEPS = st.lists(
    st.tuples(st.sampled_from(["plain", "tail", "advance", "truncate"]), SIZE, SIZE), max_size=12
)


@settings(max_examples=25)
@given(specs(), STEPS)
def test_any_history_of_two_rows(spec, steps):
    """The lengths alone, followed on the host, say which columns every row holds."""
    plan = ample(spec, 2, 24, 9)
    state = kv.admit(kv.init_state(spec, plan), [0, 1])[0]
    lengths = Lengths.exactly(np.zeros(2, np.int64))
    for what, *count in steps:
        count = np.array(count)
        if what in ("plain", "tail"):
            state, result = kv.reserve(state, count, each=True, tail_only=what == "tail")
            target = lengths.settled + count
            after = lengths_after(spec.groups, lengths, target, what == "tail")
            pairs = zip(after, lengths, strict=True)
            lengths = Lengths(*(np.where(result.granted, new, old) for new, old in pairs))
        elif what == "advance":
            state = kv.advance(state, count)
            settled = np.asarray(state.seq_lens, np.int64)
            passed = settled > lengths.solid
            lengths = Lengths(
                settled,
                lengths.room,
                np.where(passed, lengths.room, lengths.solid),
                np.where(passed, lengths.room, lengths.tail),
            )
        else:
            state, result = kv.truncate(state, lengths.settled - count)
            cut = Lengths.exactly(lengths.settled - count)
            pairs = zip(cut, lengths, strict=True)
            lengths = Lengths(*(np.where(result.granted, new, old) for new, old in pairs))
        state = kv.clear_faults(state)
        kv.check(state)
        want = held_columns(spec.groups, lengths)
        for row in range(2):
            spans = zip(*(part[:, row] for part in jax.tree.leaves(want)), strict=True)
            assert columns(state, row) == [
                [*range(start, gap), *range(resume, stop)] for start, gap, resume, stop in spans
            ]


@settings(max_examples=25)
@given(specs(), st.integers(1, 24), SIZE, st.booleans(), st.integers(1, 4000))
def test_as_many_requests_are_admitted_as_planned(spec, tokens, step, tail_only, budget):
    """Pools for requests of one length take the planned number of them and refuse the next."""
    limits = {"max_seqs": 4, "max_seq_len": 24, "max_step_tokens": step}
    options = {"request_tokens": tokens, "tail_only": tail_only, "growing": False, **limits}
    try:
        plan = kv.plan(spec, budget, **options)
    except kv.SpecError as error:
        budget = int(str(error).split("at least ")[1].split(" ")[0].replace(",", ""))
        plan = kv.plan(spec, budget, **options)
        with pytest.raises(kv.SpecError, match="needs at least"):
            kv.plan(spec, budget - 1, **options)
    assert plan.total_bytes <= budget
    row = row_blocks(spec.groups, [tokens])[:, 0]
    most = prefill_blocks(spec.groups, tokens, step, tail_only).max(axis=1)
    have = np.array(plan.blocks)
    planned = next(n for n in (4, 3, 2, 1) if (have >= (n - 1) * row + np.maximum(row, most)).all())
    state = kv.init_state(spec, plan)
    admitted = 0
    while admitted < 4:
        after = prefilled(state, admitted, tokens, step, tail_only)
        if after is None:
            break
        state, admitted = after, admitted + 1
    assert admitted == planned
    kv.check(state)


def prefilled(state, row: int, tokens: int, step: int, tail_only: bool):
    """The state with the row prefilled to `tokens`, or None where blocks are short."""
    state, _ = kv.admit(state, [row])
    for settled in range(0, tokens, step):
        count = np.zeros(4, np.int32)
        count[row] = min(step, tokens - settled)
        state, result = kv.reserve(state, count, tail_only=tail_only)
        if not result.ok:
            return None
        state = kv.advance(state, count)
    return state
