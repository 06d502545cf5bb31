"""The requests that `memory.py` replays: of a recorded trace, or generated."""

import dataclasses
import json
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True)
class Traffic:
    """R requests in the order of their arrival."""

    name: str
    seconds: np.ndarray  # f64[R], when each arrives
    prompts: np.ndarray  # i64[R], tokens >= 1
    outputs: np.ndarray  # i64[R], tokens >= 1

    def __len__(self) -> int:
        return len(self.seconds)

    @property
    def longest(self) -> int:
        """Tokens of the longest request with its output."""
        return int((self.prompts + self.outputs).max())

    def part(self, start: int, stop: int) -> "Traffic":
        """Requests start..stop-1, the first of which arrives at 0."""
        part = slice(start, stop)
        seconds = self.seconds[part]
        return Traffic(self.name, seconds - seconds[0], self.prompts[part], self.outputs[part])

    def every(self, count: int) -> "Traffic":
        """About `count` requests, spread evenly over all of the trace; all of them for 0."""
        if not 0 < count < len(self):
            return self
        kept = np.linspace(0, len(self) - 1, count).astype(np.int64)
        stretch = count / len(self)  # as many requests a second as before
        return Traffic(
            self.name, self.seconds[kept] * stretch, self.prompts[kept], self.outputs[kept]
        )


def recorded(path: Path) -> Traffic:
    """A trace of one JSON object a line: timestamp in ms, input_length, output_length in tokens.

    Prefixes that requests share are not read: every request computes and holds all of its prompt.
    """
    with path.open() as file:
        lines = [json.loads(line) for line in file]
    columns = ("timestamp", "input_length", "output_length")
    times, prompts, outputs = (np.array([line[name] for line in lines]) for name in columns)
    order = np.argsort(times, kind="stable")
    lengths = (np.maximum(1, values[order]).astype(np.int64) for values in (prompts, outputs))
    return Traffic(path.stem, (times[order] - times.min()) / 1e3, *lengths)


def generated(count: int, seed: int = 0) -> Traffic:
    """Chats that give way to documents: what a split made from the first half cannot foresee.

    The share of documents grows from none to all. Prompts are log-normal, around 2,000 and 24,000
    tokens, outputs around 400 and 150, and requests come at random, four a second.
    """
    random = np.random.default_rng(seed)
    document = random.random(count) < np.linspace(0, 1, count)
    prompts = np.exp(random.normal(np.where(document, np.log(24000), np.log(2000)), 0.7))
    outputs = np.exp(random.normal(np.where(document, np.log(150), np.log(400)), 0.6))
    seconds = np.cumsum(random.exponential(0.25, count))
    lengths = (np.clip(values, 1, 120_000).astype(np.int64) for values in (prompts, outputs))
    return Traffic("generated", seconds - seconds[0], *lengths)


def traffics(path: str | None, count: int) -> list[Traffic]:
    """`count` requests of every trace at `path`, a file or a folder of .jsonl; None: generated."""
    if path is None:
        return [generated(count or 4000)]
    files = sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [Path(path)]
    if not files:
        raise SystemExit(f"no .jsonl in {path}")
    return [recorded(file).every(count) for file in files]
