"""What moving bytes costs: python benchmarks/storage.py [--json FILE] [--rounds N]

Each verb, jitted and with the storage donated, takes turns with plain numpy or jax.numpy on the
same bytes at the same random places; figures are medians, ratios are of medians of one run.
Temporary memory is what the compiled program asks for beside its arguments and results.
"""

import argparse

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import kvpool as kv
from reporting import Report, on_fresh, take_turns

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
ROWS, LENGTH, BLOCK, TOKEN_BYTES = 512, 256, 16, 2048  # 512 * 256 tokens of 2 KB: 256 MB
TOKENS = 512
READ_ROWS = 32
STATE_ROWS, STATE_LAYERS, STATE_SHAPE = 8, 36, (32, 128, 128)
RANDOM = np.random.default_rng(0)


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def one_layer(dtype: str, layers: int = 1) -> tuple[kv.State, kv.Storage, tuple[int, int]]:
    """(state, storage, entry shape): k and v of 1 KB; rows have room, a block each in turn."""
    entry = (8, TOKEN_BYTES // 2 // 8 // numpy_dtype(dtype).itemsize)
    spec = kv.CacheSpec.from_layers([kv.FullAttention(*entry, dtype=dtype)] * layers, BLOCK)
    plan = kv.plan(
        spec, num_blocks={"full": ROWS * LENGTH // BLOCK}, max_seqs=ROWS, max_seq_len=LENGTH
    )
    state, storage = kv.init(spec, plan)
    state, _ = kv.admit(state, np.arange(ROWS, dtype=np.int32))
    for room in range(BLOCK, LENGTH + 1, BLOCK):
        state, result = kv.reserve(state, np.full(ROWS, room, np.int32))
        assert bool(result.ok)
    return jax.block_until_ready(state), storage, entry


def random_values(dtype: str, shape) -> np.ndarray:
    size = numpy_dtype(dtype).itemsize
    raw = RANDOM.integers(0, 64, (*shape[:-1], shape[-1] * size), dtype=np.uint8)
    return raw.view(numpy_dtype(dtype))


class Donated:
    """Runs step(storage, ...) -> storage again and again, each time on what the last one gave."""

    def __init__(self, step, storage):
        self.step = jax.jit(step, donate_argnums=0)
        self.storage = storage

    def __call__(self, *arguments):
        self.storage = self.step(self.storage, *arguments)
        return self.storage


def writes(report: Report, dtype: str, rounds: int) -> None:
    """512 tokens at random places, through a flat view that the step already has."""
    state, storage, entry = one_layer(dtype)
    values = random_values(dtype, (TOKENS, *entry))
    on_device = {"k": jnp.asarray(values), "v": jnp.asarray(values)}
    pools = [np.zeros((ROWS * LENGTH, *entry), numpy_dtype(dtype)) for _ in "kv"]

    def places():
        return (RANDOM.permutation(ROWS * LENGTH)[:TOKENS].astype(np.int32),)

    def view():
        (slots,) = places()
        return kv.ragged_view(state, slots // LENGTH, slots % LENGTH), on_device

    def assign(slots):
        for pool in pools:
            pool[slots] = values

    write = Donated(lambda storage, view, values: kv.write(storage, view, 0, values), storage)
    seconds = take_turns(
        {"kvpool": on_fresh(view, write), "numpy": on_fresh(places, assign)}, rounds
    )
    ratio = seconds["kvpool"] / seconds["numpy"]
    report.add(f"write {dtype}: {TOKENS} tokens", seconds["kvpool"] * 1e6, "us")
    limit = dtype == "bfloat16"
    report.add("  of numpy's indexed assignment", ratio, "x", "at most 3 x" if limit else "",
               ratio <= 3 if limit else None)  # fmt: skip


def reads(report: Report, dtype: str, rounds: int) -> None:
    """All blocks of 32 rows against jnp.take on typed arrays of the same shape."""
    state, storage, entry = one_layer(dtype)
    state = kv.advance(state, np.full(ROWS, LENGTH, np.int32))
    table = np.asarray(kv.block_table(state, "full"))
    view = kv.step_view(state, np.zeros(ROWS, np.int32))
    typed = [jnp.zeros((table.size, BLOCK, *entry), numpy_dtype(dtype)) for _ in "kv"]
    read = jax.jit(lambda storage, view, rows: kv.read(storage, view, 0, rows=rows))
    take = jax.jit(lambda typed, ids: [jnp.take(array, ids, axis=0) for array in typed])

    def rows():
        return RANDOM.permutation(ROWS)[:READ_ROWS].astype(np.int32)

    cases = {
        "kvpool": on_fresh(lambda: (storage, view, jnp.asarray(rows())), read),
        "take": on_fresh(lambda: (typed, jnp.asarray(table[rows()])), take),
    }
    seconds = take_turns(cases, rounds)
    gigabytes = READ_ROWS * LENGTH * TOKEN_BYTES / 1e9
    speed = seconds["take"] / seconds["kvpool"]
    report.add(f"read {dtype}: {READ_ROWS} rows", gigabytes / seconds["kvpool"], "GB/s")
    report.add("  of jnp.take's throughput", speed, "x", "at least 0.8 x", speed >= 0.8)


def share(step, storage, *arguments) -> float:
    """Temporary bytes of a jitted step that is given its storage, per byte of the storage."""
    memory = jax.jit(step, donate_argnums=0).lower(storage, *arguments).compile().memory_analysis()
    total = sum(array.nbytes for array in storage.blocks)
    assert memory.alias_size_in_bytes >= total
    return memory.temp_size_in_bytes / total


def temporaries(report: Report, dtype: str) -> None:
    """Of one token a row: by number of layer, through a scan over layers, and of a state."""
    layers = 4
    state, storage, entry = one_layer(dtype, layers)
    token = jnp.zeros((ROWS, 1, *entry), numpy_dtype(dtype))
    ones = np.ones(ROWS, np.int32)
    values = 2 * token.nbytes / sum(array.nbytes for array in storage.blocks)

    def write(storage, state, token, layer=0):
        return kv.write(storage, kv.step_view(state, ones), layer, {"k": token, "v": token})

    def scanned(storage, state, token):
        def body(storage, layer):
            return write(storage, state, token, layer), None

        return jax.lax.scan(body, storage, jnp.arange(layers))[0]

    for name, step in (("write", write), ("write in a scan", scanned)):
        found = share(step, storage, state, token)
        report.add(f"{name} {dtype}: temporary bytes", found * 100, "%",
                   f"{1 + 100 * values:.2f} % with values", found < 0.01 + values)  # fmt: skip


def states_of(dtype: str, layers: int):
    spec = kv.CacheSpec.from_layers([kv.RecurrentState({"ssm": (STATE_SHAPE, dtype)})] * layers)
    plan = kv.plan(spec, num_blocks={"state": STATE_ROWS}, max_seqs=STATE_ROWS, max_seq_len=64)
    state, storage = kv.init(spec, plan)
    state, _ = kv.admit(state, np.arange(STATE_ROWS, dtype=np.int32))
    ones = np.ones(STATE_ROWS, np.int32)
    state, _ = kv.reserve(state, ones)
    state = kv.advance(state, ones)
    state, _ = kv.reserve(state, ones)
    return kv.step_view(state, ones), storage


def states(report: Report, dtype: str, rounds: int) -> None:
    """A state of every row: 36 layers written in a scan, one layer read."""
    view, storage = states_of(dtype, STATE_LAYERS)
    values = random_values(dtype, (STATE_ROWS, *STATE_SHAPE))
    pool = np.zeros((STATE_ROWS, STATE_LAYERS, *STATE_SHAPE), numpy_dtype(dtype))
    order = np.arange(STATE_ROWS)[::-1]

    def every_layer(storage, ssm):
        def body(storage, layer):
            return kv.write_state(storage, view, layer, {"ssm": ssm}), None

        return jax.lax.scan(body, storage, jnp.arange(STATE_LAYERS))[0]

    def assign():
        for layer in range(STATE_LAYERS):
            pool[order, layer] = values

    on_device = jnp.asarray(values)
    found = share(every_layer, storage, on_device)
    write = Donated(every_layer, storage)
    seconds = take_turns(
        {"kvpool": on_fresh(lambda: (on_device,), write), "numpy": on_fresh(tuple, assign)}, rounds
    )
    what = f"{STATE_LAYERS} layers of {STATE_ROWS} {dtype} states"
    report.add(f"write_state: {what}", seconds["kvpool"] * 1e3, "ms")
    report.add("  of numpy's assignment", seconds["kvpool"] / seconds["numpy"], "x")
    limit = 0.01 + values.nbytes / pool.nbytes
    report.add("  temporary bytes", found * 100, "%", f"{limit:.2%} with values", found < limit)
    read = jax.jit(lambda storage, layer: kv.read_state(storage, view, layer))
    cases = {
        "kvpool": on_fresh(lambda: (write.storage, 3), read),
        "numpy": on_fresh(tuple, lambda: pool[order, 3]),
    }
    seconds = take_turns(cases, rounds)
    report.add(f"read_state: {STATE_ROWS} {dtype} states", seconds["kvpool"] * 1e3, "ms")
    report.add("  of numpy's take", seconds["kvpool"] / seconds["numpy"], "x")


def copies(report: Report, rounds: int) -> None:
    """64 blocks of 32 KB copied, the other 448 pairs being pads; and nothing but pads."""
    _, storage, _ = one_layer("bfloat16")
    blocks = ROWS * LENGTH // BLOCK
    pool = np.zeros((blocks, BLOCK * TOKEN_BYTES), np.uint8)

    def pairs(count, pads):
        ids = RANDOM.permutation(blocks)[: 2 * count].astype(np.int32).reshape(2, count)
        return tuple(np.concatenate([ids, np.full((2, pads), -1, np.int32)], axis=1))

    copy = Donated(lambda storage, *pairs: kv.copy_blocks(storage, {"full": pairs}), storage)

    def assign(src, dst):
        pool[dst] = pool[src]

    cases = {
        "some": on_fresh(lambda: jnp.asarray(pairs(64, ROWS - 64)), copy),
        "none": on_fresh(lambda: jnp.asarray(pairs(0, ROWS)), copy),
        "numpy": on_fresh(lambda: pairs(64, 0), assign),
    }
    seconds = take_turns(cases, rounds)
    report.add("copy_blocks: 64 of 32 KB", seconds["some"] * 1e6, "us")
    report.add("  of numpy's", seconds["some"] / seconds["numpy"], "x")
    report.add("copy_blocks: only pads", seconds["none"] * 1e6, "us")


def views(report: Report, rounds: int) -> None:
    """One token of 32 bytes for each of 1024 rows, the view built within the step."""
    spec = kv.CacheSpec.from_layers([kv.FullAttention(1, 8)], BLOCK)
    plan = kv.plan(spec, num_blocks={"full": 1 << 16}, max_seqs=1024, max_seq_len=1024)
    state, storage = kv.init(spec, plan)
    state, _ = kv.admit(state, np.arange(1024, dtype=np.int32))
    ones = jnp.ones(1024, jnp.int32)
    state, _ = kv.reserve(state, ones)
    token = jnp.ones((1024, 1, 1, 8), jnp.bfloat16)

    def step(storage, state, token):
        return kv.write(storage, kv.step_view(state, ones), 0, {"k": token, "v": token})

    write = Donated(step, storage)
    seconds = take_turns({"kvpool": on_fresh(lambda: (state, token), write)}, rounds)
    report.add("view and write: 1024 rows", seconds["kvpool"] * 1e6, "us")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="file to write the figures to")
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args(arguments)
    report = Report("storage")
    few = max(options.rounds // 6, 3)
    for dtype in DTYPES:
        writes(report, dtype, options.rounds)
    for dtype in DTYPES:
        reads(report, dtype, options.rounds)
    views(report, options.rounds)
    copies(report, options.rounds)
    for dtype in DTYPES:
        temporaries(report, dtype)
    for dtype in ("float32", "bfloat16"):
        states(report, dtype, few)
    report.finish(options.json)


if __name__ == "__main__":
    main()
