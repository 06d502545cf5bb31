"""The bookkeeping that `prefix_cache.py` replays: real verbs on blocks of a few bytes each."""

import dataclasses
import itertools
import time

import jax
import numpy as np

import kvpool as kv
from kvpool.prefix.snapshots import Auto

BLOCK = 512
STEP = 4096  # most tokens of a step of a prefill


@dataclasses.dataclass
class Costs:
    """Bytes of what a model keeps."""

    block: int  # of a unit of tokens, in the groups that keep everything
    snapshot: int  # of the states and window tails where a prompt can be gone on from
    tails: dict[str, int]  # {group: blocks of a snapshot}


def costs_of(spec: kv.CacheSpec) -> Costs:
    """What a block and a snapshot of a spec cost."""
    block, snapshot, tails = 0, 0, {}
    for group in spec.groups:
        if group.is_state or group.region.span:
            length = 64 * BLOCK  # any multiple of the unit beyond the window
            first = 0 if group.is_state else group.dead_columns(length)
            tails[group.name] = 1 if group.is_state else group.ceil_columns(length) - first
            snapshot += tails[group.name] * group.bytes_per_block
        else:
            block += BLOCK // group.block_size * group.bytes_per_block
    return Costs(block, snapshot, tails)


def small(spec: kv.CacheSpec) -> kv.CacheSpec:
    """The same groups of one layer each, with an entry of a few bytes."""
    layers, sizes = [], {}
    for number, group in enumerate(spec.groups):
        region = group.region
        keeps = (region.kind, region.span) if region.span else region.kind
        buffers = {f"buffer{number}": ((1,), "uint8")}
        layers.append(kv.Region(keeps, buffers, tokens_per_entry=region.tokens_per_entry))
    made = kv.CacheSpec.from_layers(layers, BLOCK)
    for old, new in zip(spec.groups, made.groups, strict=True):
        if not old.is_state:
            sizes[new.name] = old.block_size
    return kv.CacheSpec.from_layers(layers, BLOCK, block_sizes=sizes)


def blocks_for(spec, costs: Costs, budget: int | None, blocks_each: float, longest: int) -> dict:
    """{group: blocks} of a budget, split so that there are `blocks_each` units for a snapshot."""
    if budget is None:
        units, snapshots = 1 << 18, 1 << 17
    else:
        snapshots = int(budget / (costs.snapshot + blocks_each * costs.block)) if costs.tails else 0
        units = (budget - snapshots * costs.snapshot) // costs.block
    counts = {}
    for group in spec.groups:
        if group.name in costs.tails:
            running = group.blocks_per_row(STEP, longest)
            counts[group.name] = max(2, snapshots * costs.tails[group.name]) + running
        else:
            counts[group.name] = max(longest // BLOCK, units) * (BLOCK // group.block_size)
    return counts


class Replay:
    """One row that serves a request after the other, through the verbs and the cache."""

    def __init__(self, name: str, budget, evictor, blocks_each: float, longest: int, policy=None):
        real = kv.preset(name, block_size=BLOCK)
        self.costs, spec = costs_of(real), small(real)
        names = {a.name: b.name for a, b in zip(real.groups, spec.groups, strict=True)}
        counts = blocks_for(real, self.costs, budget, blocks_each, longest)
        self.plan = kv.plan(
            spec,
            num_blocks={names[group]: count for group, count in counts.items()},
            max_seqs=1,
            max_seq_len=longest,
            max_step_tokens=min(STEP, longest),
        )
        self.state, self.storage = kv.init(spec, self.plan)
        policy = policy or Auto(BLOCK, self.costs.block, self.costs.snapshot)
        self.cache = kv.PrefixCache(spec, self.plan, evictor=evictor, snapshots=policy)
        self.need = {group.name: 1 for group in spec.groups if group.is_state}
        self.seconds = {"match": 0.0, "insert": 0.0, "evict": 0.0}
        self.tokens = self.hit = self.blocks = 0
        self._grow = jax.jit(_grow)
        self._admit = jax.jit(lambda state, prefix: kv.admit(state, np.zeros(1, np.int32), prefix))

    def _timed(self, what: str, call, *given, **options):
        begin = time.perf_counter()
        result = jax.block_until_ready(call(*given, **options))
        self.seconds[what] += time.perf_counter() - begin
        return result

    def serve(self, tokens: np.ndarray) -> None:
        """Serves one prompt, i64[T], and lets the row go."""
        hit = self._timed("match", self.cache.match, tokens)
        self.tokens, self.hit = self.tokens + len(tokens), self.hit + hit.length
        self.blocks += len(tokens) // BLOCK
        if self.need:
            self._evict(self.need, {}, hit)
        self._until(lambda state: self._admit(state, hit.prefix), hit)
        length = hit.length
        ends = sorted({*hit.stops, *range(length + STEP, len(tokens), STEP), len(tokens)})
        for before, stop in itertools.pairwise((length, *ends)):
            count = np.array([stop - before], np.int32)
            self._until(lambda state, count=count: self._grow(state, count), None)
            if stop < len(tokens) and stop not in hit.stops:
                continue
            if self.need:
                self._evict(self.need, {}, None)
            self.state, self.storage = self._timed(
                "insert", self.cache.insert, self.state, self.storage, tokens, 0
            )
        self.state = kv.release(self.state, np.zeros(1, np.int32))

    def _evict(self, need, short, hit) -> None:
        self.state, _ = self._timed(
            "evict", self.cache.evict, self.state, need, short=short, protect=hit
        )

    def _until(self, verb, hit) -> None:
        state, result = verb(self.state)
        if not bool(result.ok):
            self._evict({}, jax.device_get(result.shortfall), hit)
            state, result = verb(self.state)
        assert bool(result.ok), result
        self.state = state


def _grow(state, count):
    state, result = kv.reserve(state, count, tail_only=True)
    return kv.advance(state, count * result.granted), result
