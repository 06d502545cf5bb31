"""What the bookkeeping of a step costs: python benchmarks/bookkeeping.py [--json FILE]

1024 rows over full + sliding-window + state groups, the rows at random places within a block, so
that in every step about one row in sixteen needs a block and as many give one back. Pools of both
sizes take turns, and figures are medians.

With PJRT_NPROC=1 in the environment XLA has one CPU thread, which is what a host wants that keeps
the books of an accelerator: the operations are too small to be worth a hand-over between threads.
"""

import argparse
import functools
import itertools
import time

import jax
import jax.numpy as jnp
import numpy as np

import kvpool as kv
from reporting import Report, take_turns

ROWS, BLOCK, STEPS = 1024, 16, 16
POOLS = {"4,096": 4096, "1,048,576": 1 << 20}


def empty_rows(blocks: int, window: int, max_seq_len: int, pooling="independent") -> kv.State:
    """1024 rows without a token; where pools share memory, they do the same bytes."""
    spec = kv.CacheSpec.from_layers(
        [
            kv.FullAttention(1, 8),
            kv.SlidingWindow(window, 2, 8),
            kv.RecurrentState({"ssm": ((64,), "float32")}),
        ],
        block_size=BLOCK,
        pooling=pooling,
    )
    limits = {"max_seqs": ROWS, "max_seq_len": max_seq_len}
    if pooling == "independent":
        sizes = {"full": blocks, f"window{window}": blocks, "state": ROWS}
        plan = kv.plan(spec, num_blocks=sizes, **limits)
    else:
        sizes = [blocks, blocks, ROWS]
        memory = sum(n * g.bytes_per_block for n, g in zip(sizes, spec.groups, strict=True))
        plan = kv.plan(spec, budget_bytes=memory, **limits)
    state = kv.init_state(spec, plan)
    return kv.admit(state, np.arange(ROWS, dtype=np.int32))[0]


@functools.partial(jax.jit, donate_argnums=0, static_argnames="tokens")
def fill(state, tokens):
    """All rows begin again, with `tokens` settled ones but for up to 15 each."""
    rows = jnp.arange(ROWS, dtype=jnp.int32)
    state = kv.clear_faults(kv.release(state, rows))  # some may be free already
    state, _ = kv.admit(state, rows)
    lengths = tokens - np.random.default_rng(0).integers(0, BLOCK, ROWS).astype(np.int32)
    state, _ = kv.reserve(state, lengths, tail_only=True)
    return kv.advance(state, lengths)


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


def after_filling(run, state, tokens: int, times: int, warm: int, settles: int = 0):
    """Measures run(state), `times` in a row on rows just filled, the first `warm` not counted.

    The arrays stay the same ones. Each run must settle `settles` tokens of every row; nothing is
    measured that was refused.
    """
    held = [state]

    def measure():
        held[0] = jax.block_until_ready(fill(held[0], tokens))
        before, seconds = int(held[0].seq_lens.sum()), []
        for _ in range(times):
            begin = time.perf_counter()
            held[0] = jax.block_until_ready(run(held[0]))
            seconds.append(time.perf_counter() - begin)
        assert not held[0].faults
        assert not settles or int(held[0].seq_lens.sum()) == before + ROWS * settles * times
        return seconds[warm:]

    return measure


def steps(name: str, make, tokens: int) -> dict:
    """{(case, name): measure} of steps of one token a row."""
    settling = functools.partial(after_filling, tokens=tokens - 3 * STEPS, times=3, warm=2)
    scanned = settling(many_steps, make(), settles=STEPS)
    settling = functools.partial(after_filling, tokens=tokens - STEPS, times=STEPS, warm=2)
    return {
        ("in a scan", name): scanned,
        ("one call", name): settling(one_step, make(), settles=1),
    }


LABELS = {
    "in a scan": (f"reserve + advance, a step of a {STEPS}-step scan", STEPS, 30),
    "one call": ("reserve + advance, one jitted call", 1, 150),
    "release": ("release 32 rows", 1, 150),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    report = Report("bookkeeping")

    rows = np.random.default_rng(1).permutation(ROWS).astype(np.int32).reshape(-1, 32)
    sizes = {name: (blocks, 32, 64) for name, blocks in POOLS.items()}
    sizes["long"] = (1 << 20, 128, 1024)
    cases = {}
    for name, (blocks, window, tokens) in sizes.items():
        make = functools.partial(empty_rows, blocks, window, tokens)
        cases |= steps(name, make, tokens)
        some = itertools.cycle(rows)
        releasing = functools.partial(after_filling, tokens=tokens, times=4, warm=1)
        release_some = lambda state, some=some: release(state, next(some))  # noqa: E731
        cases["release", name] = releasing(release_some, make())
    # Rows of 16,384 tokens can use that many blocks; there are no more slabs than rows can use.
    for name, blocks in POOLS.items():
        long = max(64, 16 * blocks // ROWS)
        cases |= steps(
            f"slabs, {name}", functools.partial(empty_rows, blocks, 32, long, "elastic"), 64
        )
    seconds = take_turns(cases, options.rounds)
    for case, (label, divisor, limit) in LABELS.items():
        small, big = (seconds[case, name] / divisor * 1e6 for name in POOLS)
        for name, figure in zip(POOLS, (small, big), strict=True):
            what = f"{label}, pools of {name}"
            report.add(what, figure, "us", f"at most {limit}", figure <= limit)
        ratio = big / small
        report.add(f"{label}, large pool / small", ratio, "x", "at most 1.15", ratio <= 1.15)
        figure = seconds[case, "long"] / divisor * 1e6
        report.add(f"{label}, rows of 1,024 tokens", figure, "us")
        for name in POOLS if case != "release" else ():
            ratio = seconds[case, f"slabs, {name}"] / seconds[case, name]
            what = f"{label}, slabs for {name} / pools of their own"
            report.add(what, ratio, "x", "at most 2", ratio <= 2)
    report.finish(options.json)


if __name__ == "__main__":
    main()
