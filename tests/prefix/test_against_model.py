"""The cache against a plain model, a dictionary of token tuples, with blocks always short."""

from typing import ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from plain_model import Model
from serving import Serving, i32

import kvpool as kv

FULL = kv.FullAttention(1, 4, dtype="float32")
WINDOW = kv.SlidingWindow(4, 1, 4, dtype="float32")
STATE = kv.RecurrentState({"sum": ((2,), "float32")})
MAX_LEN, STEP, ROWS = 16, 6, 3
SALTS = st.sampled_from((None, None, None, "other"))
COUNTS = st.sampled_from([1, 2, 2, 3, 4, 4, STEP])
RUNS = st.integers(1, MAX_LEN)  # of one token
PROMPTS = st.builds(
    lambda tokens, runs: [t for t, run in zip(tokens, runs, strict=False) for _ in range(run)][
        :MAX_LEN
    ],
    st.sampled_from([(1, 2, 1), (1, 3, 1), (2, 1, 2)]),
    st.lists(RUNS, min_size=1, max_size=3),
)


class CacheMachine(RuleBasedStateMachine):
    """Requests over few tokens, so that prompts begin alike."""

    layers: ClassVar = [FULL, WINDOW, STATE]
    blocks: ClassVar = {"full": 14, "window4": 12, "state": 6}
    sizes: ClassVar = None
    most: ClassVar = None  # snapshots of a path

    @initialize()
    def start(self):
        options = {"step": STEP, "sizes": self.sizes, "max_snapshots": self.most}
        self.serving = Serving(self.layers, 2, self.blocks, ROWS, MAX_LEN, **options)
        self.cache = self.serving.cache
        self.model = Model(self.cache)
        self.salt_of: dict[int, str | None] = {}
        self.pinned: dict[tuple, int] = {}

    @rule(tokens=PROMPTS, salt=SALTS)
    def match(self, tokens, salt):
        self.matched(tokens, salt)

    def matched(self, tokens, salt, touch=True):
        hit = self.cache.match(tokens, salt, touch=touch)
        assert hit.length == self.model.longest(tokens, salt, len(tokens) - 1)
        limit = (len(tokens) - 1) // self.cache.unit * self.cache.unit
        assert (hit.length == limit) == (set(hit.missed.values()) == {None})
        assert hit.length <= hit.known <= limit
        return hit

    def match_all(self):
        """What served rows had, and their beginnings."""
        for salt, tokens in self.model.meaning.values():
            self.matched([*tokens, 3], salt, touch=False)

    @rule(
        row=st.integers(0, ROWS - 1),
        tokens=PROMPTS,
        salt=SALTS,
        steps=st.lists(st.tuples(COUNTS, st.sampled_from([True, True, False])), max_size=6),
        ends=st.booleans(),
        hole=st.sampled_from([None, 0, 1, 1, 2]),
    )
    def go_on(self, row, tokens, salt, steps, ends, hole):
        """A request, from its start or from where it was, in steps that are published or not."""
        self.serve(row, tokens, salt, steps, ends)
        if hole is not None:
            self.evict_a_few(hole, 1)

    def serve(self, row, tokens, salt, steps, ends):
        if row not in self.serving.tokens:
            self.admit(row, tokens, salt)
        if row in self.serving.tokens:
            for count, publish in steps:
                self.run(row, count)
                if publish:
                    self.insert(row)
            if ends:
                self.serving.release(row)

    def admit(self, row, tokens, salt):
        serving = self.serving
        self.model.hear_of(tokens, salt)
        hit = self.matched(tokens, salt)
        _, result = kv.admit(serving.state, i32([row]), hit.prefix)
        if not result.ok:
            self.make_room(result, protect=hit)
            _, result = kv.admit(serving.state, i32([row]), hit.prefix)
            if not result.ok:
                assert result.status[0] == kv.Status.OUT_OF_BLOCKS
                return
        serving.admit(row, tokens, hit=hit)
        self.salt_of[row] = salt
        serving.verify(row)

    def run(self, row, count):
        serving = self.serving
        count = min(count, len(serving.tokens[row]) - serving.n(row))
        num = serving._vector(row, count)
        _, result = kv.reserve(serving.state, num, each=True)
        if not result.ok:
            self.make_room(result)
            _, result = kv.reserve(serving.state, num, each=True)
        if result.ok and count:
            serving.run(row, serving.n(row) + count)
            serving.verify(row)

    def make_room(self, result, **options):
        free, short = self.serving.free(), result.shortfall
        need = {group: free[group] + int(short[group]) for group in short if int(short[group])}
        self.evict(need, short=short, **options)

    def insert(self, row):
        serving = self.serving
        before, n, salt = serving.free(), serving.n(row), self.salt_of[row]
        skipped = self.cache.stats().snapshots_skipped
        serving.insert(row, salt, priority=serving.tokens[row][0] - 1)
        self.model.listen()
        tokens, unit = serving.tokens[row], self.cache.unit
        for group in serving.spec.groups:
            if group.is_state:
                skips = self.cache.stats().snapshots_skipped - skipped
                assert skips <= (before[group.name] == 0)
                has = (group.name, 0) in self.model.held.get((salt, tuple(tokens[:n])), ())
                assert has == (n > 0 and n % unit == 0 and not skips)
            else:
                first, stop = group.dead_columns(n), n // unit * unit // group.block_size
                assert all(
                    self.model.has(tokens, salt, group, column) for column in range(first, stop)
                )

    @rule(row=st.integers(0, ROWS - 1), to=st.integers(0, ROWS - 1))
    def fork(self, row, to):
        serving = self.serving
        if row not in serving.tokens or to in serving.tokens:
            return
        serving.state, result = kv.fork(serving.state, i32([row]), i32([to]))
        if result.ok:
            serving.storage = kv.copy_blocks(serving.storage, result.copies)
            serving.tokens[to], self.salt_of[to] = serving.tokens[row], self.salt_of[row]
            serving.settle()
            serving.verify(to)

    @rule(need=st.dictionaries(st.integers(0, 2), st.integers(0, 14)))
    def evict_some(self, need):
        names = [group.name for group in self.serving.spec.groups]
        self.evict({names[i]: count for i, count in need.items() if i < len(names)})

    def evict_a_few(self, group, count):
        """Of one group, so that holes appear."""
        names = [group.name for group in self.serving.spec.groups]
        name = names[group % len(names)]
        self.evict({name: self.serving.free()[name] + count})
        self.match_all()

    def evict(self, need, short=None, protect=None):
        """Asks for `need`, by what is `short` where that is given."""
        serving, free = self.serving, self.serving.free()
        asked = {"short": short} if short else {"need": need}
        freed = serving.evict(**asked, protect=protect)
        self.model.listen()
        now = serving.free()
        assert {group: now[group] - free[group] for group in now} == freed
        for group, count in need.items():
            if now[group] < count:
                self.nothing_left(group, protect)
            elif serving.spec.group(group).region.kind == "all":
                lacked = max(0, count - free[group])
                # Whole units go, of all groups that keep everything: one may get more.
                wholes = [g for g in serving.spec.groups if g.region.kind == "all"]
                alone = len(wholes) == 1 and wholes[0].block_size == self.cache.unit
                assert freed[group] == lacked if alone else freed[group] >= lacked

    def nothing_left(self, group, protect):
        """Rows, pins or the protected hit keep every block of the group that is cached."""
        stay = set()
        state, holdings = self.serving.state, self.cache.holdings
        kept = [one for one in holdings.everything() if holdings.group_of(one).name == group]
        index = state.plan.spec.group_index(group)
        at = state.pool.offsets[state.plan.pool_of[index]]
        held_by_rows = np.asarray(state.pool.holders)[at:] > 1
        for guard in {*holdings.pins, *(holdings.guards(protect.used) if protect else ())}:
            stay.add(guard)
        for one in kept:
            if held_by_rows[one.block]:
                stay.add(one)
        nodes = {one.node for one in stay if holdings.group_of(one).keeps_all}
        for node in list(nodes):
            while node.parent:
                nodes.add(node)
                node = node.parent
        assert all(one in stay or one.node in nodes for one in kept)

    @rule(tokens=PROMPTS)
    def pin(self, tokens):
        if tuple(tokens) not in self.pinned:
            length = self.cache.pin(tokens)
            assert length == self.model.longest(tokens, None, len(tokens))
            if length:
                self.pinned[tuple(tokens)] = length

    @rule(data=st.data())
    def unpin(self, data):
        if self.pinned:
            tokens = data.draw(st.sampled_from(sorted(self.pinned)))
            self.cache.unpin(tokens)
            del self.pinned[tokens]

    @rule(really=st.integers(0, 4))
    def clear(self, really):
        if not really:
            self.serving.state = self.cache.clear(self.serving.state)
            self.serving.settle()
            self.model.listen()
            self.pinned.clear()
            assert not any(self.model.held.values())

    @invariant()
    def what_is_pinned_stays(self):
        for tokens, length in getattr(self, "pinned", {}).items():
            assert self.model.serves(tokens, None, length)

    @invariant()
    def what_rows_hold_stays(self):
        for row in getattr(getattr(self, "serving", None), "tokens", ()):
            self.serving.verify(row)


class WindowsAlone(CacheMachine):
    """No group keeps everything, and blocks differ in size."""

    layers: ClassVar = [
        kv.SlidingWindow(5, 1, 4, dtype="float32"),
        kv.ChunkedLocal(6, 1, 4, dtype="float32"),
    ]
    blocks: ClassVar = {"window5": 14, "chunk6": 10}
    sizes: ClassVar = {"chunk6": 4}


class StatesAlone(CacheMachine):
    """Nothing but recurrent states."""

    layers: ClassVar = [STATE]
    blocks: ClassVar = {"state": 6}


class FewSnapshots(CacheMachine):
    """A path keeps one state."""

    most: ClassVar = 1


class EvenSizes(CacheMachine):
    """Two groups that keep everything, in blocks of different sizes."""

    layers: ClassVar = [FULL, kv.LatentAttention(2, 2, dtype="float32"), WINDOW]
    blocks: ClassVar = {"full": 14, "latent": 7, "window4": 10}
    sizes: ClassVar = {"latent": 4}


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=25, stateful_step_count=25)


@pytest.mark.slow
@pytest.mark.parametrize(
    "machine", [CacheMachine, WindowsAlone, StatesAlone, FewSnapshots, EvenSizes]
)
def test_many_more_steps(machine):
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=50))
