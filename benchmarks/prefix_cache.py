"""What a prefix cache saves: python benchmarks/prefix_cache.py TRACE... [--json FILE]

Replays traces of prompts, one JSON object a line with `input_length` in tokens and `hash_ids`, one
for each 512 tokens, through the policies of the prefix cache: where snapshots are taken, and what
is evicted from one memory for blocks and snapshots. Beside the hits in tokens stand LRU's, with a
snapshot at the end of each prompt and where it left another, and those of an infinite cache that
has a snapshot everywhere. `belady` is what the best eviction would find, of blocks, were snapshots
free. Of 10,000 blocks without snapshots stands how much of the way from LRU to that is gone.

Then the first --requests of each, unless that is 0, go through `kv.PrefixCache` itself, with admit,
reserve, advance, insert, evict and release, in one memory of the smallest budget, for its hits and
the time of each call. A last run repeats nothing: what the cache costs where it is of no use, over
the time that the prompts take to compute at --speed tokens a second.
"""

import argparse
import functools
import json
import pathlib

import numpy as np
from tqdm import tqdm

import kvpool as kv
from kvpool.prefix.eviction import LRU
from kvpool.prefix.reuse import Reuse
from kvpool.prefix.snapshots import Auto, PromptEnd
from kvpool.text import table
from prefix_books import BLOCK, Replay, costs_of
from prefix_policies import Books, belady
from reporting import Report

MODELS = (
    "kimi-linear-48b-a3b",
    "nemotron-3-nano-30b-a3b",
    "deepseek-v4-flash-fp8",
    "mimo-v2-flash",
    "qwen3-next-80b-a3b",
    "llama-3.1-8b",
)


def requests_of(path: str, count: int) -> list[tuple[list[int], int]]:
    """[(block ids, tokens)] of the first `count` requests, all for 0."""
    with open(path) as file:
        lines = [json.loads(line) for line in file]
    return [(line["hash_ids"], line["input_length"]) for line in lines][: count or None]


def tokens_of(ids: list[int], tokens: int) -> np.ndarray:
    """Tokens that are equal where the ids are, i32[T]."""
    return (np.array(ids)[:, None] * BLOCK + np.arange(BLOCK)).ravel()[:tokens].astype(np.int32)


def through_policies(requests, costs, budget, title: str, evictor, policy) -> Books:
    """Replays requests through the policies alone."""
    books = Books(*costs, budget, evictor, policy)
    for ids, tokens in tqdm(requests, desc=title, leave=False):
        books.serve(ids, tokens)
    return books


def gap(report: Report, trace: str, requests, capacity: int = 10_000) -> None:
    """How far eviction gets from LRU to the best possible, in blocks found of all blocks."""
    count = sum(len(ids) for ids, _ in requests)
    parts = [(ids, len(ids) * BLOCK) for ids, _ in requests]  # the last one is often partial
    plain = Books(1, 0, capacity, LRU(), None)
    books = Books(1, 0, capacity, Reuse(), None)
    for part, whole in zip(parts, requests, strict=True):
        plain.serve(*part)
        books.serve(*whole)
    best = belady(requests, capacity)
    least, found = plain.found / count, books.found / count
    for label, value in (("LRU", least), ("reuse", found), ("belady", best)):
        report.add(f"{trace}, {capacity:,} blocks, {label}", value, "")
    closed = (found - least) / (best - least)
    title = f"{trace}, {capacity:,} blocks, of the gap closed"
    report.add(title, closed, "", "at least 0.25", closed >= 0.25)


def policies(report: Report, trace: str, requests, models, budgets) -> None:
    """The hits of each model in each budget (GiB; 0: without limit)."""
    rows = [("model", "GiB", "LRU", "reuse", "belady", "snapshots taken", "kept")]
    for name in models:
        costs = costs_of(name)
        for gib in budgets:
            budget = int(gib * 2**30) if gib else None
            title = f"{trace}, {name}, " + (f"{gib:g} GiB" if gib else "without limit")
            run = functools.partial(through_policies, requests, costs, budget, title)
            plain = run(LRU(), PromptEnd(BLOCK))
            books = run(Reuse(), Auto(BLOCK, *costs))
            best = belady(requests, budget // costs[0] if budget else 1 << 40)
            ratios = plain.hit / plain.tokens, books.hit / books.tokens, best
            kept = len(books.snapshots)
            rows.append((name, f"{gib:g}" if gib else "-", *(f"{one:.4f}" for one in ratios),
                         f"{books.taken:,}", f"{kept:,}"))  # fmt: skip
            for label, value in zip(("LRU", "reuse", "belady"), ratios, strict=True):
                report.add(f"{title}, {label}", value, "")
            report.add(f"{title}, snapshots taken", books.taken, "")
    print(table(rows), flush=True)


def real(report: Report, trace: str, requests, name: str, gib, speed: float, pooling: str) -> None:
    """Times of the cache itself, on a trace and where nothing repeats."""
    longest = -(-max(tokens for _, tokens in requests) // BLOCK) * BLOCK
    fresh = without_repeats(requests)
    for what, some in (("trace", requests), ("no repeats", fresh)):
        replay = Replay(name, int(gib * 2**30), longest, pooling)
        for number, (ids, tokens) in enumerate(tqdm(some, desc=f"{name}, {what}", leave=False)):
            if number == 20:  # all is compiled
                replay.seconds = dict.fromkeys(replay.seconds, 0.0)
                replay.blocks = replay.tokens = replay.hit = 0
            replay.serve(tokens_of(ids, tokens))
        kv.check(replay.state)
        replay.cache.check(replay.state)
        count = max(1, len(some) - 20)
        title = f"{trace}, {name}, {gib:g} GiB, {what}"
        report.add(f"{title}, tokens hit", replay.hit / replay.tokens, "")
        for verb, seconds in replay.seconds.items():
            report.add(f"{title}, {verb} a request", seconds / count * 1e6, "us")
            report.add(f"{title}, {verb} a block", seconds / max(1, replay.blocks) * 1e6, "us")
        if some is fresh:
            share = sum(replay.seconds.values()) / (replay.tokens / speed)
            wanted = ("at most 0.02", share <= 0.02)
            report.add(f"{title}, cost / computing", share, "", *wanted)


def without_repeats(requests):
    """Prompts as long as those of the requests, without a block in common."""
    ids, start = [], 0
    for blocks, tokens in requests:
        ids.append((list(range(start, start + len(blocks))), tokens))
        start += len(blocks)
    return ids


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("traces", nargs="+", metavar="TRACE", help=".jsonl files")
    option("--models", nargs="+", default=MODELS, metavar="NAME", help="names of presets")
    option("--gib", nargs="+", type=float, default=(64, 256, 1024, 0), help="budgets; 0: no limit")
    option("--requests", type=int, default=1000, help="that go through the cache itself")
    option("--speed", type=float, default=20_000, help="tokens that a second of prefill computes")
    option("--pooling", default="elastic", help="of the memory of the cache itself")
    option("--quick", action="store_true", help="two models and 64 GiB, 1,500 and 100 requests")
    option("--json", metavar="FILE")
    given = parser.parse_args()
    report = Report("prefix cache")
    models = given.models[:2] if given.quick else given.models
    count = min(100, given.requests) if given.quick else given.requests
    for path in given.traces:
        trace, requests = pathlib.Path(path).stem, requests_of(path, 1500 if given.quick else 0)
        gap(report, trace, requests, 1000 if given.quick else 10_000)
        policies(report, trace, requests, models, given.gib[:1] if given.quick else given.gib)
        for name in (models[:1] if given.quick else models) if count else ():
            real(report, trace, requests[:count], name, given.gib[0], given.speed, given.pooling)
    report.finish(given.json)


if __name__ == "__main__":
    main()
