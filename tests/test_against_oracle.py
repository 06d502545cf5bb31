"""Random verbs, sensible and absurd, against the oracle: statuses, tables, counts and refusals."""

import os

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from lockstep import I32MAX, I32MIN, Lockstep, Setup

SETUPS = [
    Setup(("all", ("window", 4)), (9, 7), block=2, max_len=18, step=5),
    Setup((("window", 5), "state"), (6, 4), block=4, max_len=20, step=7),
    Setup((("chunk", 6), "all", "state"), (6, 7, 5), block=4, max_len=20, step=6),
    Setup((("comp", 4), ("window", 3), ("chunk", 3)), (6, 9, 8), block=3, max_len=18, step=6),
    Setup((("window", 1), ("chunk", 4), "all"), (12, 10, 30), block=2, max_len=24, step=9),
    Setup((("chunk", 2), ("window", 1), "all"), (6, 7, 12), block=4, max_len=20, step=6),
    Setup((("chunk", 3),), (8,), block=8, max_len=30, step=9),
]
EXAMPLES = int(os.environ.get("KVPOOL_ORACLE_EXAMPLES", "150"))
ABSURD = (-2, -9, 17, 1000, I32MAX, I32MIN)
COUNTS = st.sampled_from((0, 0, 1, 1, 1, 2, 2, 3, 4, 5, 6, 9, 12, -1, *ABSURD))
STEPS = st.sampled_from((0, 1, 1, 2, 3, 4, 5, 6))
ROWS = st.sampled_from((0, 0, 0, 1, 1, 1, 2, 2, 2, -1, -1, 3, *ABSURD))


def triple(elements):
    return st.lists(elements, min_size=3, max_size=3)


class Bookkeeping(RuleBasedStateMachine):
    """Three rows, three entries in every call, so that each verb is compiled once a setup."""

    setups = SETUPS

    @initialize(data=st.data())
    def start(self, data):
        self.both = Lockstep(data.draw(st.sampled_from(self.setups)))
        self.both.admit(*data.draw(st.sampled_from(((0, 1, 2), (0, -1, -1), (2, 0, -1)))))

    # ---------------------------------------------------------------- the usual life
    @rule(rows=triple(ROWS))
    def admit(self, rows):
        self.both.admit(*rows)

    @rule(num=triple(STEPS), each=st.booleans())
    def step(self, num, each):
        result = self.both.reserve(num, each=each)
        self.both.advance(np.where(result.granted, num, 0))

    @rule(num=triple(STEPS), keep=triple(STEPS))
    def prefill(self, num, keep):
        """A tail-only step; what it advances by may or may not cross the gap it left."""
        result = self.both.reserve(num, each=True, tail_only=True)
        self.both.advance(np.where(result.granted, np.where(np.equal(keep, 0), num, keep), 0))

    @rule(num=triple(COUNTS), each=st.booleans(), tail_only=st.booleans())
    def reserve(self, num, each, tail_only):
        self.both.reserve(num, each=each, tail_only=tail_only)

    @rule(num=triple(COUNTS))
    def advance(self, num):
        self.both.advance(num)

    @rule(lens=triple(COUNTS), near=triple(st.sampled_from((0, 0, 1, 2, None))))
    def truncate(self, lens, near):
        for r, back in enumerate(near):
            lens[r] = lens[r] if back is None else self.both.n(r) - back
        self.both.truncate(lens)

    @rule(row=st.integers(0, 2), chunks=st.integers(0, 3), back=st.integers(0, 2))
    def start_a_chunk_again(self, row, chunks, back):
        """And then go back a little further, into what need not be held."""
        start = self.both.chunk_start(row, chunks)
        if start > 0:
            self.both.truncate({row: start})
            self.both.truncate({row: start - back})

    @rule(src=triple(ROWS), dst=triple(ROWS))
    def fork(self, src, dst):
        self.both.fork(src, dst)

    @rule(rows=triple(ROWS))
    def snapshot(self, rows):
        self.both.snapshot(*rows)

    @rule(rows=triple(ROWS))
    def release(self, rows):
        self.both.release(*rows)

    # ---------------------------------------------------------------- holders beside the rows
    @rule(data=st.data())
    def retain(self, data):
        self.both.retain(self._some_ids(data))

    @rule(data=st.data())
    def drop(self, data):
        self.both.drop(self._some_ids(data))

    @rule(data=st.data(), rows=triple(ROWS))
    def admit_prefix(self, data, rows):
        """Prefixes as some row's table has them, now and then with a foreign id in a column."""
        both, lengths, blocks = self.both, [], {g.name: [] for g in self.both.model.groups}
        for _ in rows:
            source = data.draw(st.sampled_from((0, 1, 2)))
            n = both.n(source)
            lengths.append(data.draw(st.sampled_from((n, n, max(n - 1, 0), n + 1, *ABSURD))))
            for layer, g in enumerate(both.model.groups):
                ids = both.table(source, layer)
                if data.draw(st.sampled_from((False, False, False, True))):
                    ids[data.draw(st.integers(0, len(ids) - 1))] = data.draw(self._ids(g))
                blocks[g.name].append(ids)
        both.admit(*rows, lengths=lengths, blocks=blocks)

    @rule(num=triple(COUNTS), keep_free=st.sampled_from((0, 0, 1, 3)))
    def fits(self, num, keep_free):
        self.both.fits(num, keep_free)

    def _ids(self, group):
        """Ids of a pool: held ones three times as often as anything else."""
        held = sorted(self.both.ids[group.pool].values())
        return st.sampled_from((*held * 3, *range(self.both.model.pools[group.pool]), -1, *ABSURD))

    def _some_ids(self, data):
        return {g.name: data.draw(triple(self._ids(g))) for g in self.both.model.groups}


TestBookkeeping = Bookkeeping.TestCase


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: "-".join(map(str, s.kinds)))
def test_long_runs(setup):
    machine = type("Long", (Bookkeeping,), {"setups": [setup]})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=60)
    )
