"""What the kernels reach of a card's memory bandwidth.

    python benchmarks/kernels.py [--json FILE] [--only REGEX] [--rounds N]
    python benchmarks/kernels.py --check [--only REGEX]

On a Hopper GPU or a later one every move of every shape takes turns, in one run, on the GPU
kernels, on the XLA implementation and as a plain copy of as many bytes; a decode scatter also
against a kernel that does nothing. The time of a call is that of a chain of programs of many calls
each. Every call of a program has other blocks and values, and where a call moves 4 MB or more the
program moves more than an L2 holds. GB/s count bytes read and written. Results are compared with
the reference before anything is timed. All of it takes a while; --only takes a part.

Without such a GPU the table is of predicted floors. `--check` makes all moves, small, on the XLA
implementation against the reference, and measures nothing.
"""

import argparse
import functools
import json
import math
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from tqdm import tqdm

from kernel_moves import Move, Scale, moves_of
from pallas_kernels import target
from pallas_kernels.mosaic_gpu import versions
from reporting import seconds_of, take_turns
from shapes import SHAPES

BANDWIDTH = {"H200": 4.8e12, "B200": 8.0e12}  # bytes/s, as the cards' data sheets say
LAUNCH = 2.5e-6  # seconds that a kernel takes which does nothing: assumed where nothing runs
LEAST_SECONDS = 5e-3  # of a chain of programs, so that starting it does not count
SLOW_SECONDS = 1  # a program that takes longer is not run again: XLA's loop over many blocks
DECODE_SETS = 16  # of ids and values of a decode scatter, whose cost is not in the bytes
RESULTS = Path(__file__).parent / "results"
RANDOM = np.random.default_rng(0)


def program(move: Move, implementation: str | None, calls: int):
    """(blocks, arguments of the calls, values) -> (blocks, what was read), blocks donated."""
    operation = functools.partial(move.operation, implementation=implementation)

    def many(blocks, ids, values):
        read = []
        for call in range(calls):
            given = ids[call % len(ids)], values[call % len(values)]
            result = move.run(operation, blocks, call % move.shape.layers, *given)
            if move.in_place:
                blocks = result
            else:
                read.append(result)
        return blocks, read

    return jax.jit(many, donate_argnums=0)


class Calls:
    """The calls of one move, by whatever implementation, on one block array."""

    def __init__(self, move: Move, scale: Scale, least_seconds: float):
        self.move, self.calls, self.least_seconds = move, move.calls(scale), least_seconds
        self.sets = min(self.calls, DECODE_SETS) if move.most_launches else self.calls
        self.blocks = move.random_blocks()
        self.values = [move.random_values(seed) for seed in range(self.sets)]

    def ids(self) -> list:
        """New ones for every set."""
        ids = [self.move.ids(RANDOM) for _ in range(self.sets)]
        return jax.block_until_ready(jax.device_put(ids))

    def check(self, implementation: str | None) -> None:
        """Exits where the first calls do not give the bits of the reference."""
        differences = self.move.differences(implementation)
        for call, ids, values in zip(range(2), self.ids(), self.values, strict=False):
            wrong = int(differences(self.blocks, call % self.move.shape.layers, ids, values))
            if wrong:
                sys.exit(f"{label(self.move)}, {implementation}: {wrong:,} words are wrong")

    def measure(self, implementation: str | None):
        """A measure for `take_turns`: [seconds of a call]."""
        run = program(self.move, implementation, self.calls)

        def step(ids):
            self.blocks, read = run(self.blocks, ids, self.values)
            return self.blocks, read

        return self._chain(step, self.ids)

    def copy(self):
        """The same of plain copies that read and write as many bytes."""
        size = max(1, self.move.moved // 8)
        arrays = [jnp.full(size, number, jnp.uint32) for number in range(self.calls)]
        return self._chain(jax.jit(plain_copies), lambda: arrays)

    def empty(self):
        """The same of kernels that do nothing."""
        flag = jnp.zeros(1, jnp.int32)
        return self._chain(jax.jit(functools.partial(empty_launches, self.calls)), lambda: flag)

    def _chain(self, step, prepare):
        """Programs in a queue, of which only the last is waited for."""
        step(prepare())  # compiles
        once = seconds_of(step, prepare())
        if once > SLOW_SECONDS:
            return lambda: [once / self.calls]
        programs = math.ceil(self.least_seconds / once) or 1

        def measure():
            argument = prepare()
            begin = time.perf_counter()
            for _ in range(programs):
                result = step(argument)
            jax.block_until_ready(result)
            return [(time.perf_counter() - begin) / programs / self.calls]

        return measure


def plain_copies(arrays: list) -> list:
    """A copy of each, one after the other and none merged with another."""
    copies = []
    for array in arrays:
        if copies:
            array, copies[-1] = jax.lax.optimization_barrier((array, copies[-1]))
        copies.append(jnp.copy(array))
    return copies


def empty_launches(count: int, flag):
    """Kernels that read one word, i32[1] of 0, and write nothing."""

    def kernel(flag):
        @pl.when(flag[0] != 0)  # which the compiler does not know
        def _():
            flag[0] = jnp.int32(0)

    for _ in range(count):
        flag = versions.in_place(kernel, flag, programs=1, name="empty")
    return flag


def floor(move: Move, bandwidth: float) -> float:
    """Seconds that a call takes at least: its bytes at the peak of the memory, and its launches."""
    return move.moved / bandwidth + move.launches * LAUNCH


def label(move: Move) -> str:
    return f"{move.shape.name}: {move.name}"


def measured(move: Move, scale: Scale, rounds: int) -> dict:
    """The row of a move in the table, from a GPU."""
    calls = Calls(move, scale, LEAST_SECONDS)
    for implementation in ("mosaic_gpu", "xla"):
        calls.check(implementation)
    cases = {name: calls.measure(name) for name in ("mosaic_gpu", "xla")} | {"copy": calls.copy()}
    if move.most_launches:
        cases["empty"] = calls.empty()
    seconds = take_turns(cases, rounds)
    taken, share = seconds["mosaic_gpu"], seconds["copy"] / seconds["mosaic_gpu"]
    row = {
        **sizes(move),
        "us": taken * 1e6,
        "GB/s": move.moved / taken / 1e9,
        "of copy": share,
        "x XLA": seconds["xla"] / taken,
        "x empty": taken / seconds["empty"] if move.most_launches else None,
    }
    if move.least_share:
        return row | {"holds": share >= move.least_share}
    return row | {"holds": row["x empty"] <= move.most_launches if move.most_launches else None}


def sizes(move: Move) -> dict:
    """The columns that tables of both kinds have."""
    wanted = f"copy >= {move.least_share:.0%}" if move.least_share else ""
    if move.most_launches:
        wanted = f"empty <= {move.most_launches} x"
    return {"what": label(move), "KB": move.piece / 1e3, "MB": move.moved / 1e6, "wanted": wanted}


def predicted(move: Move) -> dict:
    """The row of a move in the table where nothing runs."""
    floors = {f"{card} us": floor(move, speed) * 1e6 for card, speed in BANDWIDTH.items()}
    return sizes(move) | floors


def heading() -> dict:
    """What ran where: everything that a figure hangs on."""
    device = jax.devices()[0]
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown\n"
    return {
        "card": device.device_kind,
        "driver": driver.splitlines()[0],
        "runtime": device.client.platform_version.splitlines()[0],
        "jax": jax.__version__,
        "command": shlex.join(["python", *sys.argv]),
    }


def show(title: str, head: dict, rows: list[dict], path: Path | None) -> None:
    """Prints the table and writes it as JSON."""
    print(title)
    print("  " + ", ".join(f"{key} {value}" for key, value in head.items()))
    marks = {None: "", True: "holds", False: "MISSED"}
    text = [[_text(marks[v] if k == "holds" else v) for k, v in row.items()] for row in rows]
    table = [list(rows[0]), *text]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        cells = [f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True)]
        print("  ".join([f"  {line[0]:<{widths[0]}}", *cells]).rstrip())
    if path is not None:
        path.write_text(json.dumps({"title": title, **head, "rows": rows}, indent=1) + "\n")


def _text(value) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}" if value < 100 else f"{value:,.0f}"
    return "" if value is None else str(value)


def check(moves: list[Move], scale: Scale) -> None:
    """Every move by XLA against the reference, and one timed chain of its program."""
    for move in tqdm(moves, desc="moves", leave=False):
        calls = Calls(move, scale, 0)
        calls.check("xla")
        calls.measure("xla")()
        calls.copy()()
    print(f"checked: {len(moves)} moves by XLA give the bits of the reference; nothing measured")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    parser.add_argument("--only", default="", help="moves whose name has this expression")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--check", action="store_true", help="small, without kernels or timing")
    options = parser.parse_args(arguments)
    scale = Scale.tiny() if options.check else Scale()
    moves = [move for shape in SHAPES for move in moves_of(shape, scale)]
    moves = [move for move in moves if re.search(options.only, label(move))]
    if not moves:
        parser.error(f"--only: no move has {options.only!r} in its name")
    if options.check:
        check(moves, scale)
    elif target.target() == "gpu":
        rows = [measured(move, scale, options.rounds) for move in tqdm(moves, desc="moves")]
        head = heading()
        card = re.sub(r"\W+", "-", head["card"]).lower()
        show("kernels", head, rows, options.json or RESULTS / f"kernels-{card}.json")
    else:
        peaks = ", ".join(f"{card} {speed / 1e12} TB/s" for card, speed in BANDWIDTH.items())
        title = f"predicted floors, no kernel was run: bytes / peak of the memory ({peaks})"
        title += f" + {LAUNCH * 1e6} us a launch"
        head = {"jax": jax.__version__, "command": shlex.join(["python", *sys.argv])}
        show(title, head, [predicted(move) for move in moves], options.json)


if __name__ == "__main__":
    main()
