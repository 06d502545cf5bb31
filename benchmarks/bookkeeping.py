"""What the bookkeeping of a step costs: python benchmarks/bookkeeping.py [--json FILE]

1024 rows over full + sliding-window + state groups, the rows at random places within a block, so
that in every step about one row in sixteen needs a block and as many give one back. Pools of both
sizes take turns, and figures are medians.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from reporting import Report, take_turns

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


def on_copies(function, state, *arguments, check=None):
    """A thunk to time: the donated state is copied outside the measured part."""

    def prepare():
        return jax.block_until_ready(jax.tree.map(jnp.copy, state))

    def run(copied):
        return jax.block_until_ready(function(copied, *arguments))

    if check is not None:
        check(run(prepare()))
    return prepare, run


def all_moved(state: kv.State) -> None:
    """The measured step did its work: every row settled one more token, and nothing is broken."""
    assert not state.faults
    kv.check(state)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    report = Report("bookkeeping")

    short = {name: prepared(blocks, 32, 48, 64) for name, blocks in POOLS.items()}
    rows = np.random.default_rng(1).permutation(ROWS)[:32].astype(np.int32)
    cases = {}
    for name, state in short.items():
        cases["in a scan", name] = on_copies(many_steps, state, check=all_moved)
        cases["one call", name] = on_copies(one_step, state, check=all_moved)
        cases["release", name] = on_copies(release, state, rows, check=all_moved)
    long = prepared(1 << 20, 128, 1024, 2048)
    cases["in a scan", "long"] = on_copies(many_steps, long, check=all_moved)
    cases["one call", "long"] = on_copies(one_step, long, check=all_moved)
    cases["release", "long"] = on_copies(release, long, rows, check=all_moved)
    seconds = take_turns(cases, options.repeats)
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
