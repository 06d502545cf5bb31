"""The bookkeeping that `prefix_cache.py` replays: the real verbs, without the bytes."""

import itertools
import time

import jax
import numpy as np

import kvpool as kv
from kvpool.prefix.places import Places

BLOCK = 512
STEP = 4096  # most tokens of a step of a prefill
ROWS = 64  # of which one at a time serves


def costs_of(name: str) -> tuple[int, int]:
    """Bytes of a block of tokens and of a snapshot of a preset, as its prefix cache counts them."""
    spec = kv.preset(name, block_size=BLOCK)
    return Places.of(plan_for(spec, 1 << 40, 64 * BLOCK)).costs


def plan_for(spec: kv.CacheSpec, budget: int, longest: int) -> kv.Plan:
    """The memory as a server of ROWS rows would have it, a fourth of it for snapshots."""
    states = sum(group.bytes_per_block for group in spec.groups if group.is_state)
    return kv.plan(
        spec,
        budget,
        max_seqs=ROWS,
        max_seq_len=longest,
        max_step_tokens=min(STEP, longest),
        snapshots=budget // 4 // states if states else 0,
    )


class Replay:
    """One row that serves a request after the other, through the verbs and the cache, no bytes."""

    def __init__(self, name: str, budget: int, longest: int, pooling: str):
        spec = kv.with_pooling(kv.preset(name, block_size=BLOCK), pooling)
        self.plan = plan_for(spec, budget, longest)
        self.state = kv.init_state(spec, self.plan)
        self.cache = kv.PrefixCache(spec, self.plan)
        self.seconds = {"match": 0.0, "insert": 0.0, "evict": 0.0}
        self.tokens = self.hit = self.blocks = 0
        self._grow = jax.jit(_grow)
        self._admit = jax.jit(lambda state, prefix: kv.admit(state, np.zeros(1, np.int32), prefix))

    def _timed(self, what: str, call, *given):
        begin = time.perf_counter()
        result = call(*given)
        jax.block_until_ready(self.state)
        self.seconds[what] += time.perf_counter() - begin
        return result

    def match(self, tokens: np.ndarray) -> kv.Hit:
        """What is cached of a prompt."""
        return self.cache.match(tokens)

    def insert(self, tokens: np.ndarray) -> None:
        """Publishes what the row has."""
        self.state, _ = self.cache.insert(self.state, None, tokens, 0)

    def evict(self, short, hit: kv.Hit | None) -> None:
        """Makes room for what is short."""
        self.state, _ = self.cache.evict(self.state, short=short, protect=hit)

    def serve(self, tokens: np.ndarray) -> None:
        """Serves one prompt, i64[T], and lets the row go."""
        hit = self._timed("match", self.match, tokens)
        self.tokens, self.hit = self.tokens + len(tokens), self.hit + hit.length
        self.blocks += len(tokens) // BLOCK
        self._until(lambda state: self._admit(state, hit.prefix), hit)
        length = hit.length
        ends = sorted({*hit.stops, *range(length + STEP, len(tokens), STEP), len(tokens)})
        for before, stop in itertools.pairwise((length, *ends)):
            count = np.zeros(ROWS, np.int32)
            count[0] = stop - before
            self._until(lambda state, count=count: self._grow(state, count), None)
            if stop < len(tokens) and stop not in hit.stops:
                continue
            self._timed("insert", self.insert, tokens)
        self.state = kv.release(self.state, np.zeros(1, np.int32))

    def _until(self, verb, hit) -> None:
        state, result = verb(self.state)
        while not bool(result.ok):
            before = int(self.state.pool.num_cached.sum())
            short = jax.device_get(result.shortfall)
            self._timed("evict", self.evict, short, hit)
            assert int(self.state.pool.num_cached.sum()) < before, result
            state, result = verb(self.state)
        self.state = state


def _grow(state, count):
    state, result = kv.reserve(state, count, tail_only=True)
    return kv.advance(state, count * result.granted), result
