"""A decode step of the example's model on kvpool and on dense arrays.

    python benchmarks/decode.py [--json FILE]

16 rows of 512 settled tokens choose 16 more, one by one in a scan on the device. The same model
runs on both memories; the dense one is preallocated, in the order that attention multiplies it,
and updated in place. Both take turns, and figures are medians of a step.
"""

import argparse
import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from reporting import Report, seconds_of, take_turns

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
import kvpool as kv
from memories import DenseCache
from paged_memory import PagedMemory, cache_spec
from tiny_model import Config, TinyModel

ROWS, CONTEXT, STEPS, CHUNK = 16, 512, 16, 64
CONFIG = Config()
SPEC = cache_spec(CONFIG)
GRAPH, PARAMS = nnx.split(TinyModel(CONFIG, nnx.Rngs(0)))


class DenseRows:
    """A step of one token for every row on dense arrays; `carry` is the arrays."""

    @staticmethod
    def empty():
        return DenseCache.zeros(CONFIG, ROWS, CONTEXT + STEPS, max_step=1)

    @staticmethod
    def open(arrays):
        return DenseCache(CONFIG, arrays, jnp.ones(ROWS, jnp.int32), 1)

    @staticmethod
    def close(memory, token):
        return memory.arrays


class PagedRows:
    """The same on kvpool; `carry` is (state, storage)."""

    @staticmethod
    def empty():
        limit = CONTEXT + STEPS
        bounds = {g.name: g.region.blocks_per_row(g.block_size, CHUNK, limit) for g in SPEC.groups}
        sizes = {name: ROWS * bound for name, bound in bounds.items()}
        plan = kv.plan(
            SPEC, num_blocks=sizes, max_seqs=ROWS, max_seq_len=limit, max_step_tokens=CHUNK
        )
        state, storage = kv.init(SPEC, plan)
        return kv.admit(state, np.arange(ROWS, dtype=np.int32))[0], storage

    @staticmethod
    def open(carry):
        state, storage = carry
        state, result = kv.reserve(state, jnp.ones(ROWS, jnp.int32), each=True)
        counts = result.granted.astype(jnp.int32)
        memory = PagedMemory(CONFIG, SPEC, state, storage, counts, 1)
        memory.state, memory.counts = state, counts
        return memory

    @staticmethod
    def close(memory, token):
        counts = jnp.where(token < 0, 0, memory.counts)
        return kv.advance(memory.state, counts), memory.storage


def whole(memory, token):
    """The model on a memory: the next token of every row."""
    model = nnx.merge(GRAPH, PARAMS)
    return jnp.argmax(model.logits(model(token[:, None], memory))[:, 0], axis=-1).astype(jnp.int32)


def bookkeeping(memory, token):
    """Nothing but opening and closing the step."""
    return token + (memory.positions[:, 0] < 0)


def write(memory, token):
    """What all layers store in a step."""
    k = jnp.full((ROWS, 1, CONFIG.kv_heads, CONFIG.head_dim), token[0], CONFIG.cache_dtype)
    for layer, kind in enumerate(CONFIG.pattern):
        if kind == "recurrent":
            shapes = CONFIG.state_shapes.items()
            values = {name: jnp.full((ROWS, *s), token[0], dtype) for name, (s, dtype) in shapes}
            memory.write_state(layer, values)
        else:
            memory.put(layer, k, k)
    return token


def read(memory, token):
    """What all layers read in a step, with the attention over it."""
    q = jnp.ones((ROWS, 1, CONFIG.query_heads, CONFIG.head_dim)) + token[:, None, None, None]
    for layer, kind in enumerate(CONFIG.pattern):
        if kind == "recurrent":
            q = q + sum(jnp.sum(x) for x in memory.read_state(layer).values())
        else:
            q = q + memory.look(layer, q)
    return (q[:, 0, 0, 0] > 1e9).astype(jnp.int32)


def scan_of(rows, part):
    """A measure of the donated step, STEPS times over: () -> [seconds of a step]."""

    def body(held, _):
        carry, token = held
        memory = rows.open(carry)
        token = part(memory, token)
        return (rows.close(memory, token), token), None

    @functools.partial(jax.jit, donate_argnums=0)
    def many(carry, token):
        return jax.lax.scan(body, (carry, token), length=STEPS)[0]

    full, token = filled(rows), jnp.zeros(ROWS, jnp.int32)

    def measure():
        carry = jax.block_until_ready(jax.tree.map(jnp.copy, full))
        return [seconds_of(many, carry, token) / STEPS]

    return measure


def filled(rows):
    """A carry with CONTEXT settled tokens in every row."""
    carry = rows.empty()
    if rows is DenseRows:
        return {**carry, "lengths": jnp.full(ROWS, CONTEXT, jnp.int32)}
    state, storage = carry
    for _ in range(CONTEXT // CHUNK):
        state, result = kv.reserve(state, np.full(ROWS, CHUNK, np.int32))
        assert result.ok
        state = kv.advance(state, np.full(ROWS, CHUNK, np.int32))
    kv.check(state)
    return state, storage


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    parts = (whole, bookkeeping, write, read)
    cases = {(r, part): scan_of(r, part) for part in parts for r in (PagedRows, DenseRows)}
    seconds = take_turns(cases, options.rounds)
    report = Report("decode step")
    ms = {case: value * 1e3 for case, value in seconds.items()}
    for name, rows in (("kvpool", PagedRows), ("dense", DenseRows)):
        report.add(f"{name}: whole step", ms[rows, whole], "ms")
        empty = ms[rows, bookkeeping]
        report.add(f"{name}: bookkeeping", empty, "ms")
        report.add(f"{name}: write", ms[rows, write] - empty, "ms")
        report.add(f"{name}: read and attention", ms[rows, read] - empty, "ms")
    ratio = ms[PagedRows, whole] / ms[DenseRows, whole]
    report.add("kvpool / dense", ratio, "x", "at most 1.2", ratio <= 1.2)
    report.finish(options.json)


if __name__ == "__main__":
    main()
