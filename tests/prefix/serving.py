"""A small server over a prefix cache, whose storage says of every token which prompt it is of.

What a token writes is a number made of all tokens up to it, so a block or state of another prompt,
or of another position, shows. Blocks that nobody holds are filled with all-one bits, and both books
are checked, after every change.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

import kvpool as kv


def i32(values) -> np.ndarray:
    return np.asarray(values, np.int32)


def numbers_of(tokens) -> list[int]:
    """A number for each beginning of the tokens, exact in float32."""
    numbers, number = [], 1
    for token in tokens:
        number = (number * 131 + token + 7) % 60013
        numbers.append(number)
    return numbers


def _regions(spec):
    """(layer, tag, region) of all that is kept."""
    for layer in range(len(spec.layers)):
        for tag in spec.tags(layer):
            yield layer, tag, spec.group(spec.resolve(layer, tag)[0]).region


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def write_step(spec, storage, state, num, numbers, last):
    """Tokens of these numbers f32[S, T], and states of the numbers f32[S]."""
    view = kv.step_view(state, num)
    for layer, tag, region in _regions(spec):
        of_state = region.kind == "state"
        lead = last if of_state else numbers
        data = {}
        for index, buffer in enumerate(region.values):
            lanes = np.arange(np.prod(buffer.shape, dtype=int), dtype=np.float32)
            lanes = lanes.reshape(buffer.shape) / 8 + index
            shaped = lead.reshape(*lead.shape, *(1,) * len(buffer.shape))
            data[buffer.name] = (shaped + lanes).astype(buffer.dtype)
        write = kv.write_state if of_state else kv.write
        storage = write(storage, view, layer, data, tag=tag)
    return storage


@functools.partial(jax.jit, static_argnums=0)
def read_row(spec, storage, state, row):
    """All that the row's next query reads, masked places 0."""
    view = kv.step_view(state, jnp.zeros_like(state.seq_lens))
    seen = []
    for layer, tag, region in _regions(spec):
        if region.kind == "state":
            values = kv.read_state(storage, view, layer, tag=tag)
            seen.append(jax.tree.map(lambda value: value[row], values))
        else:
            seen.append(kv.read(storage, view, layer, tag=tag, rows=row[None]))
    return seen


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def fill_blocks(spec, storage, ids):
    for name, which in ids.items():
        data = kv.export_blocks(storage, name, which)
        storage = kv.import_blocks(storage, name, which, jnp.full_like(data, ~data.dtype.type(0)))
    return storage


class Serving:
    """Rows, their tokens and a cache.

    Args:
      blocks: of every group, or {group: blocks}.
      budget: bytes of slabs that the groups share, in the place of blocks.
      options: of the PrefixCache.
    """

    def __init__(
        self,
        layers,
        block=4,
        blocks=64,
        rows=3,
        max_len=64,
        step=None,
        sizes=None,
        budget=None,
        **options,
    ):
        pooling = "elastic" if budget else "independent"
        self.spec = kv.CacheSpec.from_layers(layers, block, pooling, block_sizes=sizes)
        counts = blocks if isinstance(blocks, dict) else {g.name: blocks for g in self.spec.groups}
        limits = {"max_seqs": rows, "max_seq_len": max_len, "max_step_tokens": step or max_len}
        size = {"budget_bytes": budget} if budget else {"num_blocks": counts}
        self.plan = kv.plan(self.spec, **size, **limits)
        self.state, self.storage = kv.init(self.spec, self.plan)
        self.cache = kv.PrefixCache(self.spec, self.plan, **options)
        self.tokens: dict[int, list[int]] = {}
        self.width = step or max_len
        self.settle()

    # ---------------------------------------------------------------- a request
    def admit(self, row, tokens, salt=None, hit=True):
        """Starts a row with what is cached of its tokens, or from nothing; the hit."""
        hit = self.cache.match(tokens, salt) if hit is True else hit
        prefix = hit.prefix if hit else None
        self.state, result = kv.admit(self.state, i32([row]), prefix)
        assert bool(result.ok), kv.Status(int(result.status[0]))
        self.storage = kv.copy_blocks(self.storage, result.copies)
        self.tokens[row] = list(tokens)
        self.settle()
        return hit

    def run(self, row, length):
        """Computes the row's tokens up to `length` in one step."""
        n = self.n(row)
        num = self._vector(row, length - n)
        self.state, result = kv.reserve(self.state, num, each=True)
        assert bool(result.ok), kv.Status(int(result.status[row]))
        numbers = numbers_of(self.tokens[row][:length])
        values = np.full((len(num), self.width), np.nan, np.float32)
        values[row, : length - n] = numbers[n:]
        last = np.full(len(num), numbers[-1], np.float32)
        self.storage = write_step(self.spec, self.storage, self.state, num, values, last)
        self.state = kv.advance(self.state, num)
        self.settle()

    def admit_or_evict(self, row, tokens):
        """Admits a row with its hit; makes room as often as blocks are short."""
        hit = self.cache.match(tokens)
        while True:
            _, result = kv.admit(self.state, i32([row]), hit.prefix)
            if bool(result.ok):
                return self.admit(row, tokens, hit=hit)
            assert sum(self.evict(short=result.shortfall, protect=hit).values()), "no room"

    def run_or_evict(self, row, length):
        """Runs a row; makes room as often as blocks are short."""
        while True:
            num = self._vector(row, length - self.n(row))
            _, result = kv.reserve(self.state, num, each=True)
            if bool(result.ok):
                return self.run(row, length)
            assert sum(self.evict(short=result.shortfall).values()), "no room"

    def insert(self, row, salt=None, **options):
        self.state, self.storage = self.cache.insert(
            self.state, self.storage, self.tokens[row], row, salt, **options
        )
        self.settle()

    def release(self, row):
        self.state = kv.release(self.state, i32([row]))
        del self.tokens[row]
        self.settle()

    def evict(self, need=(), **options):
        self.state, freed = self.cache.evict(self.state, dict(need), **options)
        self.settle()
        return freed

    def serve(self, row, tokens, stops=(), salt=None, **options):
        """Admits, computes all tokens, publishes at the stops and at the end; the hit."""
        hit = self.admit(row, tokens, salt)
        for stop in sorted({*(stop for stop in stops if stop < len(tokens)), len(tokens)}):
            if stop > self.n(row):
                self.run(row, stop)
                self.insert(row, salt, **options)
        return hit

    def fill(self, tokens, row=0):
        """Caches all that can be of these tokens, and releases the row."""
        unit = self.cache.unit
        self.admit(row, tokens, hit=False)
        for length in range(unit, len(tokens) + 1, unit):
            self.run(row, length)
            self.insert(row)
        self.release(row)

    def lose(self, group, tokens, columns):
        """Makes a hole: takes blocks, or a snapshot, of these columns from the cache."""
        from kvpool.prefix import publish

        holdings, places = self.cache.holdings, self.cache._places
        of_group = next(g for g in places.groups if g.name == group)
        raw = np.asarray(tokens, "<i4").tobytes()
        chain = self.cache._tree.walk(None, raw, len(tokens) // self.cache.unit)
        for column in columns:
            node = chain[column // of_group.count]
            gone = holdings.lose(node.kept[of_group.first + column % of_group.count])
            self.state = publish.drop(self.state, places, gone)
        self.settle()

    # ---------------------------------------------------------------- looks
    def settle(self):
        """Checks all books, and fills what nobody holds."""
        kv.check(self.state)
        self.cache.check(self.state)
        if any(self.plan.pool_per_slab):
            return  # what nobody holds may be another group's
        self.count_holders()
        pool, ids = self.state.pool, {}
        holders = np.asarray(pool.holders)
        for group, at, size in zip(self.spec.groups, pool.offsets, pool.sizes, strict=True):
            free = holders[at : at + size] == 0
            ids[group.name] = np.where(free, np.arange(size, dtype=np.int32), -1)
        self.storage = fill_blocks(self.spec, self.storage, ids)

    def count_holders(self):
        """free + held by rows + held only by the cache = N, for each group."""
        for group in self.spec.groups:
            table = np.asarray(kv.block_table(self.state, group.name))
            rows = {block for block in table.reshape(-1).tolist() if block >= 0}
            cached = set(self.cached_blocks(group.name))
            total = self.free()[group.name] + len(rows) + len(cached - rows)
            assert total == self.plan.num_blocks[group.name]

    def cached_blocks(self, group) -> list[int]:
        of_place = self.cache._places.of_place
        everything = self.cache.holdings.everything()
        return [one.block for one in everything if of_place[one.place].name == group]

    def free(self) -> dict[str, int]:
        return {group: int(free) for group, free in kv.free_blocks(self.state).items()}

    def n(self, row) -> int:
        return int(self.state.seq_lens[row])

    def same_content(self, one, other):
        """Whether two rows hold the same words in full blocks, and read the same."""
        n = self.n(one)
        assert n == self.n(other)
        for group in self.spec.groups:
            ids = np.asarray(kv.block_table(self.state, group.name))[[one, other]]
            full = 1 if group.is_state else n // group.block_size
            held = ids[:, :full] >= 0
            assert (held[0] == held[1]).all(), group.name
            words = [
                np.asarray(kv.export_blocks(self.storage, group.name, i)) for i in ids[:, :full]
            ]
            assert words[0].tobytes() == words[1].tobytes(), group.name
        seen = [jax.device_get(read_row(self.spec, self.storage, self.state, i32(r)))
                for r in (one, other)]  # fmt: skip
        for a, b in zip(*map(jax.tree.leaves, seen), strict=True):
            assert a.tobytes() == b.tobytes()

    def verify(self, row):
        """Whether a row without compressed or quantised regions reads what its tokens wrote."""
        n, numbers = self.n(row), i32(numbers_of(self.tokens[row])).astype(np.float32)
        seen = jax.device_get(read_row(self.spec, self.storage, self.state, i32(row)))
        for (_, _, region), values in zip(_regions(self.spec), seen, strict=True):
            if region.kind == "state":
                assert n == 0 or values[region.values[0].name].reshape(-1)[0] == numbers[n - 1]
                continue
            values, mask = values
            buffer = region.values[0]
            lanes = values[buffer.name].reshape(mask.shape[1], int(np.prod(buffer.shape)))
            got = lanes[mask[0], 0]
            assert got.tolist() == numbers[region.first_read(n) : n].tolist()

    def _vector(self, row, value):
        vector = np.zeros(self.plan.max_seqs, np.int32)
        vector[row] = value
        return vector
