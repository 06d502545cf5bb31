"""Random lives of rows with their values: what a read shows is what was written, or 0."""

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from lockstep import MIXED, Setup
from test_against_oracle import STEPS, triple
from world import World

SETUPS = [
    MIXED,
    Setup((("chunk", 6), ("comp", 3), ("window", 5)), (7, 9, 8), block=4, max_len=20, step=6),
    Setup((("chunk", 2), ("window", 1), "all"), (8, 7, 12), block=4, max_len=20, step=6),
    Setup((("chunk", 3),), (8,), block=8, max_len=30, step=9),
    # Bytes of a block: 64, 192 and 16, so 3, 1 and 12 in a slab of 192.
    Setup(("all", ("window", 4), "state"), (None,) * 3, memory=12 * 192, slab=192, heads=(2, 6, 1),
          dtype="bfloat16", pooling="elastic", block=2, max_len=18, step=5),
    # All 64: one pool.
    Setup(("all", ("window", 5), ("chunk", 6)), (None,) * 3, memory=22 * 64, dtype="bfloat16",
          pooling="shared", block=4, max_len=20, step=6),
]  # fmt: skip


class Content(RuleBasedStateMachine):
    """Three rows and a shelf of published prefixes: (length, blocks per group, tokens)."""

    setups = SETUPS[:-1]  # the long lives have the shared one too

    @initialize(data=st.data())
    def start(self, data):
        self.world = World(data.draw(st.sampled_from(self.setups)))
        self.world.admit(0, 1, 2)
        self.shelf = []

    @rule(num=triple(STEPS), keep=triple(STEPS), ragged=st.booleans())
    def step(self, num, keep, ragged):
        """A step with drafts: some of what was written is settled."""
        self.world.step(num, keep=dict(enumerate(keep)), ragged=ragged)

    @rule(num=triple(STEPS), back=triple(st.sampled_from((0, 0, 0, 1, 4))), ragged=st.booleans())
    def prefill(self, num, back, ragged):
        keep = {r: max(k - b, 0) for r, (k, b) in enumerate(zip(num, back, strict=True))}
        self.world.step(num, keep=keep, ragged=ragged, tail_only=True)

    @rule(rows=triple(st.integers(-1, 2)))
    def admit(self, rows):
        self.world.admit(*rows)

    @rule(src=triple(st.integers(-1, 2)), dst=triple(st.integers(-1, 2)))
    def fork(self, src, dst):
        self.world.fork(src, dst)

    @rule(back=triple(st.sampled_from((None, 0, 1, 2, 5, 99))))
    def truncate(self, back):
        lens = [-1 if b is None else max(self.world.n(r) - b, 0) for r, b in enumerate(back)]
        self.world.truncate(lens)

    @rule(row=st.integers(0, 2), chunks=st.integers(0, 3), back=st.integers(0, 2))
    def start_a_chunk_again(self, row, chunks, back):
        """And then go back a little further, into what need not be held."""
        start = self.world.chunk_start(row, chunks)
        if start > 0:
            self.world.truncate({row: start})
            self.world.truncate({row: start - back})

    @rule(row=st.integers(0, 2))
    def release(self, row):
        if row in self.world.tokens:
            self.world.release(row)

    @rule(row=st.integers(0, 2))
    def publish(self, row):
        """Keeps a row's full blocks, and its state where there is one."""
        world = self.world
        n, kinds = len(world.tokens.get(row, [])), world.setup.kinds
        tail = any(n % g.block for g in world.model.groups if g.kind != "state")
        if n == 0 or tail or len(self.shelf) == 2:
            return
        blocks = {g.name: world.table(row, i) for i, g in enumerate(world.model.groups)}
        if "state" in kinds:
            result = world.snapshot(row, -1, -1)
            if not bool(result.granted[0]):
                return
            blocks["state"] = [int(result.blocks["state"][0])]
        kept = {g: ids for g, ids in blocks.items() if g != "state"}
        world.retain(kept)
        self.shelf.append((n, blocks, list(world.tokens[row])))

    @rule(data=st.data(), row=st.integers(0, 2), back=st.sampled_from((0, 0, 1, 2, 4)))
    def hit(self, data, row, back):
        """A row starts from what is kept, or from a shorter length that may still be reachable."""
        if self.shelf and row not in self.world.tokens:
            n, blocks, tokens = data.draw(st.sampled_from(self.shelf))
            n = n if "state" in blocks else max(n - back, 0)
            spread = {g: [ids] * 3 for g, ids in blocks.items()}
            self.world.admit(row, -1, -1, lengths=[n] * 3, blocks=spread, tokens=[tokens[:n]] * 3)

    @rule()
    def evict(self):
        if self.shelf:
            _, blocks, _ = self.shelf.pop(0)
            self.world.drop(blocks)


TestContent = Content.TestCase


@pytest.mark.slow
@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: "-".join(map(str, s.kinds)))
def test_long_lives(setup):
    machine = type("Long", (Content,), {"setups": [setup]})
    run_state_machine_as_test(machine, settings=settings(max_examples=100, stateful_step_count=60))
