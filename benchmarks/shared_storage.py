"""What sharing one array costs the moves: python benchmarks/shared_storage.py [--json FILE]

The same steps on the same rows with memory of each group's own, with pools that groups share, and
with slabs; they take turns, and ratios are of medians of one run. Full attention and windows are in
bfloat16, the recurrent state in float32.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

import kvpool as kv
from reporting import Report, on_fresh, take_turns

ROWS, LENGTH, BLOCK, LAYERS = 64, 1024, 16, 4
POOLINGS = ("independent", "shared", "elastic")
ONES = np.ones(ROWS, np.int32)
ENTRIES = {"full": (4, 128), "window": (8, 128)}
STATE = (16, 64, 64)


def rows_of(pooling: str) -> tuple[kv.State, kv.Storage]:
    """64 rows of about 1,000 tokens, with room for one more."""
    layer = {
        "full": kv.FullAttention(*ENTRIES["full"]),
        "window": kv.SlidingWindow(256, *ENTRIES["window"]),
        "state": kv.RecurrentState({"ssm": (STATE, "float32")}),
    }
    spec = kv.CacheSpec.from_layers([layer] * LAYERS, BLOCK, pooling)
    plan = kv.plan(spec, 2 << 30, max_seqs=ROWS, max_seq_len=LENGTH, max_step_tokens=LENGTH)
    state, storage = kv.init(spec, plan)
    state, _ = kv.admit(state, np.arange(ROWS, dtype=np.int32))
    lengths = LENGTH - 1 - np.random.default_rng(0).integers(0, BLOCK, ROWS).astype(np.int32)
    for settle in (lengths, ONES):
        state, result = kv.reserve(state, settle)
        assert bool(result.ok)
        state = kv.advance(state, settle) if settle is lengths else state
    return jax.block_until_ready(state), storage


def one_token(name: str) -> dict:
    values = np.random.default_rng(1).standard_normal((ROWS, 1, *ENTRIES[name]), np.float32)
    return dict.fromkeys("kv", jnp.asarray(values, jnp.bfloat16))


def over_layers(body, storage):
    return jax.lax.scan(lambda held, layer: (body(held, layer), None), storage,
                        jnp.arange(LAYERS))[0]  # fmt: skip


def cases(pooling: str) -> dict:
    """{what: a call to measure}."""
    state, storage = rows_of(pooling)
    view = kv.step_view(state, ONES)
    ssm = jnp.ones((ROWS, *STATE), jnp.float32)

    def written(name, values):
        return lambda storage: over_layers(
            lambda held, layer: kv.write(held, view, layer, values, tag=name), storage
        )

    def states(storage):
        return over_layers(
            lambda held, layer: kv.write_state(held, view, layer, {"ssm": ssm}, tag="state"),
            storage,
        )

    measured, some = {}, np.arange(ROWS // 8, dtype=np.int32)
    held = [storage]  # one for all of them, which every write donates

    def donated(run):
        compiled = jax.jit(run, donate_argnums=0)

        def call():
            held[0] = compiled(held[0])
            return held[0]

        return call

    for name in ENTRIES:
        measured[f"write {name}"] = donated(written(name, one_token(name)))
        read = jax.jit(
            lambda storage, view, name=name: kv.read(storage, view, 1, tag=name, rows=some)
        )
        measured[f"read {name}"] = lambda read=read: read(held[0], view)
    measured["write state"] = donated(states)
    read_state = jax.jit(lambda storage, view: kv.read_state(storage, view, 1, tag="state"))
    measured["read state"] = lambda: read_state(held[0], view)
    ids = kv.block_table(state, "full")[: ROWS // 8].reshape(-1)
    export = jax.jit(lambda storage: kv.export_blocks(storage, "full", ids))
    measured["export full"] = lambda: export(held[0])
    return measured


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args(arguments)
    report = Report("shared_storage")
    by_pooling = {pooling: cases(pooling) for pooling in POOLINGS}
    for what in by_pooling["independent"]:
        turns = {pooling: on_fresh(tuple, made[what]) for pooling, made in by_pooling.items()}
        seconds = take_turns(turns, options.rounds)
        alone = seconds["independent"]
        report.add(f"{what}, memory of its own", alone * 1e6, "us")
        for pooling in POOLINGS[1:]:
            ratio = seconds[pooling] / alone
            report.add(f"  {pooling}", ratio, "x", "at most 1.05 x", ratio <= 1.05)
    report.finish(options.json)


if __name__ == "__main__":
    main()
