"""What the bookkeeping of a step costs: python benchmarks/bookkeeping.py [--json FILE]

1024 rows over full + sliding-window + state groups, the rows at random places within a block, so
that in every step about one row in sixteen needs a block and as many give one back. Pools of both
sizes take turns, and figures are medians.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from reporting import Report, seconds_of, take_turns

import kvpool as kv

ROWS, BLOCK, STEPS = 1024, 16, 16
POOLS = {"4,096": 4096, "1,048,576": 1 << 20}


def prepared(blocks: int, window: int, tokens: int, max_seq_len: int) -> kv.State:
    """1024 rows of `tokens` settled tokens, give or take half a block."""
    spec = kv.CacheSpec.from_layers(
        [
            kv.FullAttention(1, 8),
            kv.SlidingWindow(window, 1, 8),
            kv.RecurrentState({"ssm": ((4,), "float32")}),
        ],
        block_size=BLOCK,
    )
    sizes = {"full": blocks, f"window{window}": blocks, "state": ROWS}
    plan = kv.plan(
        spec, num_blocks=sizes, max_seqs=ROWS, max_seq_len=max_seq_len, max_step_tokens=BLOCK
    )
    state = kv.init_state(spec, plan)
    state, _ = kv.admit(state, np.arange(ROWS, dtype=np.int32))
    lengths = np.random.default_rng(0).integers(tokens - BLOCK + 1, tokens + 1, ROWS)
    while (np.asarray(state.seq_lens) < lengths).any():
        step = np.minimum(lengths - np.asarray(state.seq_lens), BLOCK).astype(np.int32)
        state, _ = kv.reserve(state, step)
        state = kv.advance(state, step)
    kv.check(state)
    return jax.block_until_ready(state)


def one_token(state: kv.State) -> kv.State:
    ones = jnp.ones(ROWS, jnp.int32)
    state, result = kv.reserve(state, ones, each=True)
    return kv.advance(state, jnp.where(result.granted, ones, 0))


@functools.partial(jax.jit, donate_argnums=0)
def one_step(state):
    return one_token(state)


@functools.partial(jax.jit, donate_argnums=0)
def many_steps(state):
    return jax.lax.scan(lambda state, _: (one_token(state), None), state, length=STEPS)[0]


@functools.partial(jax.jit, donate_argnums=0)
def release(state, rows):
    return kv.release(state, rows)


def copies(state, number):
    return [jax.block_until_ready(jax.tree.map(jnp.copy, state)) for _ in range(number)]


def each_on_a_copy(function, state, *arguments):
    """Seconds on fresh copies, since the state is donated; the first call of a turn is not counted."""
    all_moved(function(*copies(state, 1), *arguments))
    return lambda: [seconds_of(function, copy, *arguments) for copy in copies(state, 6)][1:]


def one_after_another(function, state):
    """Seconds of calls that each go on from the last, as in a serving loop."""

    def measure():
        (current,), seconds = copies(state, 1), []
        for _ in range(STEPS):
            begin = time.perf_counter()
            current = jax.block_until_ready(function(current))
            seconds.append(time.perf_counter() - begin)
        return seconds[1:]

    return measure


def all_moved(state: kv.State) -> None:
    """The measured step did its work: every row settled one more token, and nothing is broken."""
    assert not state.faults
    kv.check(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    report = Report("bookkeeping")

    short = {name: prepared(blocks, 32, 48, 64) for name, blocks in POOLS.items()}
    rows = np.random.default_rng(1).permutation(ROWS)[:32].astype(np.int32)
    states = {**short, "long": prepared(1 << 20, 128, 1024, 2048)}
    cases = {}
    for name, state in states.items():
        cases["in a scan", name] = each_on_a_copy(many_steps, state)
        cases["one call", name] = one_after_another(one_step, state)
        cases["release", name] = each_on_a_copy(release, state, rows)
    seconds = take_turns(cases, options.rounds)
    labels = {
        "in a scan": (f"reserve + advance, a step of a {STEPS}-step scan", STEPS, 30),
        "one call": ("reserve + advance, one jitted call", 1, 150),
        "release": ("release 32 rows", 1, 150),
    }
    for case, (label, divisor, limit) in labels.items():
        small, big = (seconds[case, name] / divisor * 1e6 for name in POOLS)
        for name, figure in zip(POOLS, (small, big), strict=True):
            report.add(f"{label}, pools of {name}", figure, "us", f"at most {limit}", figure <= limit)
        ratio = big / small
        report.add(f"{label}, large pool / small", ratio, "x", "at most 1.15", ratio <= 1.15)
        figure = seconds[case, "long"] / divisor * 1e6
        report.add(f"{label}, rows of 1,024 tokens", figure, "us")
    report.finish(options.json)


if __name__ == "__main__":
    main()
