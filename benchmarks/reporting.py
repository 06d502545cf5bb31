"""Timing by turns and the table that every benchmark prints."""

import json
import os
import platform
import statistics
import time

import jax
from tqdm import tqdm


def seconds_of(function, *arguments) -> float:
    """Seconds until the function's result is there."""
    begin = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - begin


def on_fresh(prepare, run):
    """A measure for `take_turns`: run(*prepare()), of which only the run counts."""
    return lambda: [seconds_of(run, *jax.block_until_ready(prepare()))]


def take_turns(cases: dict, rounds: int) -> dict:
    """Median seconds of each case.

    Args:
      cases: {name: measure}; `measure()` gives a list of seconds. Each case has its turn in every
        round, so that noise falls on all alike.
      rounds: how often.
    """
    seconds: dict = {name: [] for name in cases}
    for measure in cases.values():
        measure()  # compiles
    for _ in tqdm(range(rounds), desc="rounds", leave=False):
        for name, measure in cases.items():
            seconds[name] += measure()
    return {name: statistics.median(values) for name, values in seconds.items()}


class Report:
    """Collects figures, prints them as a table, and writes them as JSON."""

    def __init__(self, title: str):
        self.title = title
        self.rows: list[dict] = []

    def add(self, what: str, value: float, unit: str, wanted: str = "", holds: bool | None = None):
        """One figure; `wanted` and `holds` where the project has set itself a limit."""
        self.rows.append(
            {"what": what, "value": value, "unit": unit, "wanted": wanted, "holds": holds}
        )

    def finish(self, path: str | None = None) -> None:
        threads = os.environ.get("PJRT_NPROC", len(os.sched_getaffinity(0)))
        machine = (
            f"{platform.machine()} with {os.cpu_count()} cores, {jax.default_backend()}, "
            f"{threads} XLA threads, jax {jax.__version__}"
        )
        print(f"{self.title}  ({machine})")
        width = max(len(row["what"]) for row in self.rows)
        for row in self.rows:
            verdict = {None: "", True: "holds", False: "MISSED"}[row["holds"]]
            line = f"  {row['what']:<{width}}  {row['value']:>10,.3g} {row['unit']:<5}"
            print(f"{line}  {row['wanted']:<16} {verdict}".rstrip())
        if path is not None:
            with open(path, "w") as file:
                figures = {"title": self.title, "machine": machine, "rows": self.rows}
                json.dump(figures, file, indent=1)
