"""What a request holds beside what it needs: python benchmarks/sizing.py [--json FILE]

Efficiency is the bytes that the last query of a request reads over those the request holds then. At
1k, 8k, ... tokens every block is just full, so the mean over the 256 lengths up to there stands
beside it. Requests are counted by running the allocator: admitted one after another, each
prefilled in steps of 2,048 tokens with `tail_only`, until one is refused for want of blocks.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

import kvpool as kv
from kvpool.needs import block_bytes, needed_bytes, prefill_blocks, row_blocks
from reporting import Report

LENGTHS = (1 << 10, 1 << 13, 1 << 15, 1 << 17)
STEP = 2048
# Beside each limit what vLLM does on the same model or a like geometry.
EFFICIENCY = {"qwen3-next-80b-a3b": 0.948, "kimi-linear-48b-a3b": 0.884, "gemma3-27b": 0.936}
PEAKS = {"gemma3-27b": (0.70, 0.24), "mimo-v2-flash": (0.85, 0.10)}
REQUESTS = {
    "gemma3-27b": (5, 4),
    "gpt-oss-120b": (14, 13),
    "llama4-scout": (9, 9),
    "mimo-v2-flash": (21, 19),
    "gemma4-31b": (4, 2),
    "kimi-linear-48b-a3b": (55, 52),
}


def efficiency(spec: kv.CacheSpec, tokens) -> np.ndarray:
    """Bytes needed over bytes held, f64[R], by requests of `tokens` i64[R]."""
    groups = spec.groups
    held = block_bytes(groups) @ row_blocks(groups, tokens, writing=True)
    return needed_bytes(groups, tokens).sum(axis=0) / held


def prefill_efficiency(spec: kv.CacheSpec, tokens: int, step: int, tail_only: bool) -> float:
    """Bytes needed after a prefill over the most bytes held during it."""
    blocks = prefill_blocks(spec.groups, tokens, step, tail_only)
    peak = (block_bytes(spec.groups) @ blocks).max()
    return float(needed_bytes(spec.groups, [tokens]).sum() / peak)


@jax.jit
def prefill(state, row):
    """Admits a row and prefills it to the state's max_seq_len: (state, whether it all fitted)."""
    rows = state.seq_lens.shape[0]
    state, result = kv.admit(state, row[None])
    count = jnp.where(jnp.arange(rows) == row, state.plan.max_step_tokens, 0)

    def step(carry):
        state, ok, steps = carry
        state, result = kv.reserve(state, count, tail_only=True)
        state = kv.advance(state, jnp.where(result.granted, count, 0))
        return state, ok & result.ok, steps + 1

    steps = state.plan.max_seq_len // state.plan.max_step_tokens
    carry = (state, result.ok, 0)
    state, ok, _ = jax.lax.while_loop(lambda c: c[1] & (c[2] < steps), step, carry)
    return state, ok


def requests_that_fit(spec: kv.CacheSpec, budget: int, tokens: int) -> int:
    """Requests that the allocator takes until it refuses one, in the best pools of the budget."""
    limits = {"max_seqs": 128, "max_seq_len": tokens, "max_step_tokens": STEP}
    plan = kv.plan(spec, budget, request_tokens=tokens, tail_only=True, growing=False, **limits)
    assert plan.total_bytes <= budget
    state = kv.init_state(spec, plan)
    for row in range(128):
        state, ok = prefill(state, jnp.int32(row))
        if not ok:
            kv.check(state)
            return row
    raise AssertionError("never refused")


def add_efficiency(report: Report, name: str) -> None:
    """Rows of one preset: with blocks of 16, and with shorter ones for short windows."""
    spec = kv.preset(name, block_size=16)
    short = kv.with_window_blocks(spec)
    if name in EFFICIENCY:
        report.add(f"{name}, needed / held in vLLM", EFFICIENCY[name], "")
    variants = [("", spec)] if short == spec else [("", spec), (" (short window blocks)", short)]
    for tokens in LENGTHS:
        for which, variant in variants:
            value = float(efficiency(variant, [tokens])[0])
            mean = efficiency(variant, np.arange(tokens - 255, tokens + 1)).mean()
            wanted = ("at least 0.99", value >= 0.99) if tokens >= 8192 else ()
            report.add(f"{name}{which}, needed / held at {tokens:,}", value, "", *wanted)
            report.add(f"{name}{which}, the same on average", float(mean), "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    report = Report("sizing")
    begin = time.perf_counter()
    for name in kv.preset_names():
        kv.plan(kv.preset(name), 80 << 30, max_seqs=64, max_seq_len=1 << 17, max_step_tokens=STEP)
    seconds = time.perf_counter() - begin
    what = f"{len(kv.preset_names())} presets planned"
    report.add(what, seconds, "s", "at most 2", seconds <= 2)
    for name in kv.preset_names():
        add_efficiency(report, name)
    for name, (least, vllm) in PEAKS.items():
        value = prefill_efficiency(kv.preset(name, block_size=16), 8192, STEP, tail_only=True)
        report.add(
            f"{name}, needed / peak of a prefill", value, "", f"at least {least}", value >= least
        )
        report.add(f"{name}, the same in vLLM", vllm, "")
    for name, (least, vllm) in REQUESTS.items():
        count = requests_that_fit(kv.preset(name, block_size=16), 16 << 30, 1 << 15)
        report.add(
            f"{name}, requests of 32k in 16 GiB", count, "", f"at least {least}", count >= least
        )
        report.add(f"{name}, the same in vLLM", vllm, "")
    report.finish(arguments.json)


if __name__ == "__main__":
    main()
