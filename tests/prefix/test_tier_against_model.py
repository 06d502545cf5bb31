"""The prefix tier against a plain model, with blocks short on the device and often on the host."""

from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import initialize, invariant, rule, run_state_machine_as_test
from test_against_model import FULL, MAX_LEN, ROWS, STEP, WINDOW, CacheMachine
from tier_actions import ACTIONS, call
from tier_model import Failure, Promoting, TierModel, failing
from tiered import DictStore

import kvpool as kv

ROOMY = 400  # blocks of each group: more than there can be

# Of a fault of an earlier call.
pytestmark = pytest.mark.filterwarnings("ignore::kvpool.tiers.StoreWarning")


class TierMachine(CacheMachine):
    """As the cache's own, with promotions between the steps, lost host blocks and copies that fail.

    Whatever happens: a hit is never longer than what all levels have, never shorter than what the
    device had, and its bytes are right.
    """

    tiny: ClassVar = {"full": 3, "window4": 2, "state": 1}
    small: ClassVar = {"full": 9, "window4": 6, "state": 4}

    @initialize(
        policy=st.sampled_from(["write_back", "write_through", "second_use"]),
        host=st.sampled_from(["tiny", "small", "roomy"]),
        store=st.booleans(),
    )
    def start(self, policy, host, store):
        self.roomy = host == "roomy"
        self.serving = Promoting(
            self.layers, 2, self.blocks, ROWS, MAX_LEN, step=STEP, sizes=self.sizes,
            host=ROOMY if self.roomy else getattr(self, host),
            store=DictStore if store else None, policy=policy,
        )  # fmt: skip
        self.cache, self.prefixes = self.serving.cache, self.serving.prefixes
        self.model = TierModel(self.serving)
        self.salt_of, self.pinned = {}, {}
        self.fault = None  # of the next calls
        self.uncertain = False  # whether something failed or was lost on the host

    # ---------------------------------------------------------------- what is compared
    def lengths(self, tokens, salt):
        """The longest hit of the device, of device and host, and of all levels."""
        model, most, host = self.model, len(tokens) - 1, self.model.host()
        return (
            model.longest(tokens, salt, most),
            model.with_names(host).longest(tokens, salt, most),
            model.with_names(host | model.store()).longest(tokens, salt, most),
        )

    def listen(self):
        """Takes in what happened: the policy says what the host then must have."""
        arriving = {"write_back": "removed", "write_through": "stored"}
        self.model.listen(arriving.get(self.prefixes.policy, ""))

    def matched(self, tokens, salt, touch=True):
        before, joint, everywhere = self.lengths(tokens, salt)
        assert self.prefixes.find(tokens, salt).length == joint
        if not touch:
            return None
        free = not self.serving.tokens and not self.serving.promotions and not self.pinned
        with failing(self.fault) as raised:
            hit = self.serving.match(tokens, salt)
        self.forget(raised)
        self.listen()
        assert hit.length == self.model.longest(tokens, salt, len(tokens) - 1)
        assert before <= hit.length <= everywhere
        if free and not raised and (self.roomy or not self.prefixes.store):
            assert hit.length == everywhere
        if self.prefixes.policy == "second_use":
            used = [one for of_group in hit.used for one in of_group]
            self.model.expected |= {(one.node.key, one.place) for one in used} - {None}
        return hit

    def forget(self, raised):
        """What did not come for a failure is expected no more, once what is under way has come."""
        self.uncertain |= bool(raised)

    def evict(self, need, short=None, protect=None):
        free = self.serving.free()
        asked = {"short": short} if short else {"need": need}
        with failing(self.fault) as raised:
            freed = self.serving.evict(**asked, protect=protect)
        self.forget(raised)
        self.listen()
        now = self.serving.free()
        assert all(now[group] - free[group] >= freed[group] for group in now)
        for group, count in need.items():
            if now[group] < count:
                self.nothing_left(group, protect)

    def insert(self, row):
        with failing(self.fault) as raised:
            super().insert(row)
        self.forget(raised)

    # ---------------------------------------------------------------- what happens
    @rule(actions=st.lists(ACTIONS.flatmap(call), min_size=6, max_size=16))
    def several(self, actions):
        for self.fault, name, arguments in actions:
            getattr(self, name)(*arguments)
            self.fault = None
            self.what_rows_hold_stays()
            self.check_levels()

    # These come with `several` alone, which does more at a time.
    match = evict_some = go_on = None

    def prompt(self, known, salt):
        """A known one goes on by a token, so that all of it can be hit."""
        if not isinstance(known, int):
            return known, salt
        served = [*self.model.meaning.values()]
        if not served:
            return [1, 1, 2], salt
        salt, tokens = served[known % len(served)]
        return [*tokens, 3][:MAX_LEN], salt

    def request(self, row, known, salt, steps, ends):
        self.serve(row, *self.prompt(known, salt), steps, ends)

    def all_away(self):
        self.evict(dict(self.serving.plan.num_blocks))

    def send(self, wait):
        with failing(self.fault) as raised:
            self.serving.send(wait)
        self.forget(raised)

    def lose_on_host(self, group, count):
        """Another's request takes blocks, as many as there are free and more."""
        names = [one.name for one in self.serving.spec.groups]
        name = names[group % len(names)]
        pools = self.serving.tier.pools
        before = len(self.model.host())
        taken = pools.allocate({name: min(pools.available()[name] + count, ROOMY)})
        if isinstance(taken, kv.tiers.Allocation):
            pools.release(taken)
            assert before - len(self.model.host()) == len(taken.reclaimed)
        self.uncertain = True
        self.serving.settle()

    def lose_in_store(self, nth):
        store = self.prefixes.store
        if store and nth < len(store.blocks):
            del store.blocks[[*store.blocks][nth]]

    def begin(self, known, salt):
        """A promotion."""
        tokens, salt = self.prompt(known, salt)
        serving = self.serving
        if len(serving.promotions) > 1:
            return
        before, _, everywhere = self.lengths(tokens, salt)
        with failing(self.fault) as raised:
            serving.state, coming = self.prefixes.start(
                serving.state, serving.storage, tokens, salt
            )
        self.forget(raised)
        serving.promotions += [coming] * bool(coming)
        serving.settle()
        self.listen()
        if coming:
            coming.asked, coming.removals = (tokens, salt), self.model.removals
            assert before < coming.found.length <= everywhere

    def receive(self, nth, wait):
        serving = self.serving
        for coming in serving.promotions[nth : nth + 1]:
            with failing(self.fault):
                try:
                    serving.storage = coming.receive(serving.storage, wait=wait)
                except Failure:
                    self.end(coming)

    def finish(self, nth):
        for coming in self.serving.promotions[nth : nth + 1]:
            self.end(coming)

    def end(self, coming):
        """Published, or given up."""
        serving = self.serving
        tokens, salt = coming.asked
        before = self.lengths(tokens, salt)[0]
        serving.state = self.prefixes.finish(serving.state, coming)
        serving.promotions.remove(coming)
        serving.settle()
        self.listen()
        after = self.lengths(tokens, salt)[0]
        assert after >= before if coming.done else after == before
        if coming.done and self.model.removals == coming.removals:
            assert after >= coming.found.length

    @rule(really=st.integers(0, 4))
    def clear(self, really):
        if not really:
            self.serving.state = self.prefixes.clear(self.serving.state)
            self.serving.settle()
            self.model.listen()
            self.pinned.clear()
            self.model.expected.clear()
            assert not any(self.model.held.values())
            reading = sum(len(coming.reading) for coming in self.serving.promotions)
            assert len(self.prefixes._host.everything()) <= reading

    def save_all(self):
        with failing(self.fault) as raised:
            serving = self.serving
            serving.state, _ = self.prefixes.save_all(serving.state, serving.storage)
        self.forget(raised)
        serving.settle()
        if self.roomy and not raised:
            kept = serving.cache.holdings.everything()
            assert {(one.node.key, one.place) for one in kept} <= self.model.host()

    # ---------------------------------------------------------------- what always holds
    @invariant()
    def levels(self):
        if hasattr(self, "model"):
            self.check_levels()

    def check_levels(self):
        """Right bytes everywhere; on the host what the policy says, and no block nobody has."""
        self.model.check_bytes()
        host, blocks = self.model.host(), self.prefixes._host.everything()
        if self.roomy and not self.prefixes._saves.under_way:
            if self.uncertain:
                self.model.expected &= host
            self.uncertain = False
            assert self.model.expected <= host
        pools, group_of = self.serving.tier.pools, self.prefixes._host.group_of
        held = dict.fromkeys(pools.available(), 0)
        for one in blocks:
            held[group_of(one.name)] += 1
        for entry in pools.entries:
            assert entry.pool.num_blocks - pools.available()[entry.name] == held[entry.name]
        reading = sum(len(coming.reading) for coming in self.serving.promotions)
        assert sum(one.readers for one in blocks) == reading

    def teardown(self):
        """When all have let go, everything is free."""
        if not hasattr(self, "prefixes"):
            return
        serving, self.fault = self.serving, None
        for coming in [*serving.promotions]:
            self.end(coming)
        for row in [*serving.tokens]:
            serving.release(row)
        serving.state = self.prefixes.clear(serving.state)
        assert serving.free() == serving.plan.num_blocks
        total = {entry.name: entry.pool.num_blocks for entry in serving.tier.pools.entries}
        assert serving.tier.pools.available() == total


class TierWithWindowsAlone(TierMachine):
    """No group keeps everything, and blocks differ in size."""

    layers: ClassVar = [
        kv.SlidingWindow(5, 1, 4, dtype="float32"),
        kv.ChunkedLocal(6, 1, 4, dtype="float32"),
    ]
    blocks: ClassVar = {"window5": 14, "chunk6": 10}
    sizes: ClassVar = {"chunk6": 4}
    tiny: ClassVar = {"window5": 3, "chunk6": 1}
    small: ClassVar = {"window5": 8, "chunk6": 4}


class TierWithEvenSizes(TierMachine):
    """Two groups that keep everything, in blocks of different sizes."""

    layers: ClassVar = [FULL, kv.LatentAttention(2, 2, dtype="float32"), WINDOW]
    blocks: ClassVar = {"full": 14, "latent": 7, "window4": 10}
    sizes: ClassVar = {"latent": 4}
    tiny: ClassVar = {"full": 3, "latent": 2, "window4": 2}
    small: ClassVar = {"full": 9, "latent": 6, "window4": 5}


TestTier = TierMachine.TestCase
TestTier.settings = settings(max_examples=15, stateful_step_count=10)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [TierMachine, TierWithWindowsAlone, TierWithEvenSizes])
def test_many_more_steps(machine):
    run_state_machine_as_test(machine, settings=settings(max_examples=150, stateful_step_count=25))
