"""How many requests one memory serves: python benchmarks/memory.py [TRACES] [--requests 0]

Replays the requests of traces through the bookkeeping, for several models in 64 GiB, with the
memory divided in several ways, and counts the requests that run at a time:

  first half    independent pools, the best split for the first half of the trace
  all seen      independent pools, the best split for all of the trace
  shared        one pool for the groups whose blocks have the same bytes; what still has to be
                split is split best for the first half
  elastic       one memory for all groups
  bound         a model in which any free byte serves anyone; nothing can do better

TRACES is a file of one JSON object a line (timestamp in ms, input_length and output_length in
tokens), or a folder of such .jsonl files; without it requests are generated. The rules of the
scheduler stand in memory_replay.py. A mean is over the ticks at which requests wait. Elastic is to
reach 0.95 of the bound, and no less than the split that saw the whole trace.
"""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import NamedTuple

import kvpool as kv
from kvpool.text import table
from memory_books import KvBooks, ModelBooks
from memory_replay import Clock, Run, replay
from memory_splits import best_split
from memory_traffic import Traffic, traffics
from reporting import Report

MODELS = (
    "gemma3-27b",
    "gpt-oss-120b",
    "qwen3-next-80b-a3b",
    "kimi-linear-48b-a3b",
    "mimo-v2-flash",
    "nemotron-3-nano-30b-a3b",
    "deepseek-v4-flash",
)
HALF, SEEN, SHARED, ELASTIC, BOUND = "first half", "all seen", "shared", "elastic", "bound"
MEMORIES = (HALF, SEEN, SHARED, ELASTIC)
LEAST = {BOUND: 0.95, SEEN: 1.0}  # what elastic is to reach of it


class Served(NamedTuple):
    """One replay: what became of the requests, and in which memory."""

    run: Run
    spec: kv.CacheSpec
    plan: kv.Plan | None = None  # none for the bound
    refused: dict[str, int] | None = None  # {group: entries refused for want of it}, by kvpool


def serve(name: str, traffic: Traffic, budget: int, clock: Clock, rows: int, memories, modelled):
    """{how the memory is divided: Served} for one model; what kvpool refuses is left out.

    Args:
      memories: those beside the bound.
      modelled: those of them that the model of fixed pools serves instead of kvpool's verbs.
    """
    spec = kv.preset(name)
    books = ModelBooks.bound(spec.groups, budget, rows, clock.chunk)
    bound = Served(_replay(books, spec, traffic, clock, rows, f"{name}, bound"), spec)
    limits = {
        "max_seqs": min(rows, bound.run.peak * 5 // 4 + 8),  # so that rows are not the limit
        "max_seq_len": -(-traffic.longest // clock.chunk) * clock.chunk,
        "max_step_tokens": clock.chunk,
    }
    served = {}
    for which in memories:
        try:
            plan = _planned(which, spec, traffic, budget, clock, limits)
        except kv.SpecError as error:
            print(f"SKIPPED: {name}, {which}: {error}")
            continue
        assert plan.total_bytes <= budget
        title = f"{name}, {which}"
        if which in modelled:
            books = ModelBooks.of(plan)
            run = _replay(books, plan.spec, traffic, clock, plan.max_seqs, title)
            served[which] = Served(run, plan.spec, plan)
        else:
            served[which] = _through_kvpool(plan, traffic, clock, title)
    return served | {BOUND: bound}


def _planned(which: str, spec, traffic: Traffic, budget: int, clock: Clock, limits) -> kv.Plan:
    if which == ELASTIC:
        return kv.plan(_pooled(spec, ELASTIC), budget, **limits)
    seen = traffic if which == SEEN else traffic.part(0, len(traffic) // 2)
    split = _pooled(spec, SHARED) if which == SHARED else spec
    return best_split(split, seen, budget, clock, limits)


def _pooled(spec: kv.CacheSpec, pooling: str) -> kv.CacheSpec:
    sizes = dict(spec.block_sizes)
    return kv.CacheSpec.from_layers(
        spec.layers, spec.block_size, pooling, block_sizes=sizes, drafts=spec.drafts
    )


def _through_kvpool(plan: kv.Plan, traffic: Traffic, clock: Clock, title: str) -> Served:
    books = KvBooks(plan)
    run = _replay(books, plan.spec, traffic, clock, plan.max_seqs, title)
    kv.check(books.state)  # all is free again, and nothing was misused
    assert not books.state.live.any()
    most = int(run.held.sum(axis=1).max())
    assert most <= plan.total_bytes, f"{title}: {most:,} bytes held of {plan.total_bytes:,}"
    return Served(run, plan.spec, plan, books.refused)


def _replay(books, spec, traffic: Traffic, clock: Clock, rows: int, title: str) -> Run:
    run = replay(books, traffic, spec.groups, clock, rows, title)
    if run.without_row:
        print(f"NOT ONLY MEMORY: {title}: requests waited for one of {rows} rows")
    if not run.ticks[-1].waiting and run.loaded.all():
        print(f"NOT MEMORY: {title}: no request ever waited")
    return run


def show(title: str, served: dict[str, Served], budget: int) -> None:
    """Prints the table of one model and trace."""
    head = (
        "memory",
        "running",
        "of the bound",
        "peak",
        "preempted",
        "rejected",
        "use",
        "ticks",
        "refused for",
    )
    rows = [head]
    for which, (run, _, _, refused) in served.items():
        short = [f"{name} {count:,}" for name, count in (refused or {}).items() if count]
        rows.append(
            (
                which,
                f"{run.concurrency:.1f}",
                f"{run.concurrency / served[BOUND].run.concurrency:.3f}",
                f"{run.peak:,}",
                f"{run.preempted:,}",
                f"{run.rejected:,}",
                f"{run.use(budget):.1%}",
                f"{run.loaded.sum():,} of {len(run.ticks):,}",
                ", ".join(short) or "-",
            )
        )
    print(f"\n{title}\n{table(rows)}", flush=True)


def add(report: Report, title: str, served: dict[str, Served], budget: int) -> None:
    """The figures of one model and trace."""
    for which, (run, _, plan, refused) in served.items():
        report.add(f"{title}, {which}", run.concurrency, "rows")
        report.rows[-1] |= {
            "peak": run.peak,
            "preempted": run.preempted,
            "rejected": run.rejected,
            "use": run.use(budget),
            "loaded_ticks": int(run.loaded.sum()),
            "ticks": len(run.ticks),
            "books": "model" if refused is None else "kvpool",
            "refused_for": refused,
            "num_blocks": plan.num_blocks if plan else None,
        }
    reached = {which: one.run.concurrency for which, one in served.items()}
    for other, least in LEAST.items():
        if {ELASTIC, other} <= set(reached):
            ratio = reached[ELASTIC] / reached[other]
            wanted = (f"at least {least}", ratio >= least)
            report.add(f"{title}, {ELASTIC} / {other}", ratio, "", *wanted)


def keep_others(report: Report, path: Path) -> None:
    """Puts the figures that the file has, and this run has not, before those of this run."""
    if path.exists():
        new = {row["what"] for row in report.rows}
        old = json.loads(path.read_text())["rows"]
        report.rows[:0] = [row for row in old if row["what"] not in new]


def summary(rows: list[dict]) -> str:
    """The running requests of every model and trace, and whether elastic reaches what it is to."""
    served: dict[str, dict[str, dict]] = {}
    for row in rows:
        title, which = row["what"].rsplit(", ", 1)
        served.setdefault(title, {})[which] = row
    ratios = [f"{ELASTIC} / {other}" for other in LEAST]
    lines = [("requests that run", *MEMORIES, BOUND, *ratios, "verdict")]
    for title, of in served.items():
        counts = [f"{of[which]['value']:.1f}" if which in of else "-" for which in lines[0][1:6]]
        reached = [of[ratio] for ratio in ratios if ratio in of]
        values = [f"{of[ratio]['value']:.3f}" if ratio in of else "-" for ratio in ratios]
        verdict = "holds" if all(row["holds"] for row in reached) else "MISSED"
        lines.append((title, *counts, *values, verdict if len(reached) == len(ratios) else "-"))
    return table(lines)


def options(arguments: list[str]) -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("traces", nargs="?", help="a .jsonl file, or a folder of them")
    option("--models", nargs="+", default=MODELS, metavar="NAME", help="names of presets")
    option("--memories", nargs="+", default=MEMORIES, choices=MEMORIES, help="beside the bound")
    option(
        "--modelled", nargs="+", default=(), choices=(HALF, SEEN, SHARED),
        help="served by the model of fixed pools, which does what the verbs do and is faster",
    )  # fmt: skip
    option(
        "--requests",
        type=int,
        default=4000,
        help="of each trace, evenly spread; 0: all, or 4,000 generated ones",
    )
    option("--gib", type=float, default=64, help="memory")
    option("--rows", type=int, default=2048, help="most rows that any model may take")
    option("--decode", type=int, default=8, help="tokens that a row decodes in a tick")
    option("--chunk", type=int, default=2048, help="tokens of a step of a prefill")
    option("--seconds", type=float, default=16, help="of the trace in a tick")
    option("--picture", metavar="PNG", help="draws the first model on the first trace")
    option("--json", metavar="FILE")
    option("--keep", action="store_true", help="what FILE has of other runs stays in it")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Runs the models on the traces, and tells what came of it."""
    arguments = sys.argv[1:] if arguments is None else arguments
    given = options(arguments)
    clock, budget = Clock(given.decode, given.chunk, given.seconds), int(given.gib * 2**30)
    report, picture = Report("memory"), given.picture
    for traffic in traffics(given.traces, given.requests):
        for name in given.models:
            title = f"{name}, {len(traffic):,} requests of {traffic.name}"
            served = serve(name, traffic, budget, clock, given.rows, given.memories, given.modelled)
            show(title, served, budget)
            add(report, title, served, budget)
            if picture:
                from memory_picture import draw

                draw(picture, title, served, budget)
                picture = None
    for row in report.rows:
        row["command"] = f"python benchmarks/memory.py {shlex.join(arguments)}".strip()
    if given.keep and given.json:
        keep_others(report, Path(given.json))
    report.finish(given.json)
    print("\n" + summary(report.rows))


if __name__ == "__main__":
    main()
