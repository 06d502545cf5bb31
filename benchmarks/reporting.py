"""Timing by turns and the table that every benchmark prints."""

import json
import platform
import statistics
import time

import jax
from tqdm import tqdm


def take_turns(cases: dict, repeats: int) -> dict:
    """Median seconds of each case.

    Args:
      cases: {name: (prepare, run)}; `prepare()` is not measured, `run(prepared)` is and blocks.
      repeats: rounds; every case runs once a round, so that noise falls on all alike.
    """
    seconds = {name: [] for name in cases}
    for name, (prepare, run) in cases.items():
        run(prepare())  # compiles
    for _ in tqdm(range(repeats), desc="rounds", leave=False):
        for name, (prepare, run) in cases.items():
            prepared = prepare()
            begin = time.perf_counter()
            run(prepared)
            seconds[name].append(time.perf_counter() - begin)
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
        machine = f"{platform.machine()}, {jax.default_backend()}, jax {jax.__version__}"
        print(f"{self.title}  ({machine})")
        width = max(len(row["what"]) for row in self.rows)
        for row in self.rows:
            verdict = {None: "", True: "holds", False: "MISSED"}[row["holds"]]
            line = f"  {row['what']:<{width}}  {row['value']:>10,.3g} {row['unit']:<5}"
            print(f"{line}  {row['wanted']:<16} {verdict}".rstrip())
        if path is not None:
            with open(path, "w") as file:
                json.dump({"title": self.title, "machine": machine, "rows": self.rows}, file, indent=1)
