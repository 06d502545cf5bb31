"""What a transfer moves and how fast: python benchmarks/transfer.py [--json FILE] [--table]

Six models, prompts of 1k to 128k tokens, equal and unequal degrees of sharding: bytes that the
receivers need, bytes that are sent, pieces, and what a planner sends that knows neither regions nor
shards. Then one rank's bytes over loopback between two processes, beside a raw socket, by turns in
the same run.

"Whole blocks" is what is sent when every sender sends each receiver that shares something with it
its whole blocks of the whole past, windows and chunks included.
"""

import argparse
import asyncio
import multiprocessing
import socket
import statistics
import time

import numpy as np
from tqdm import tqdm

import kvpool as kv
from kvpool.transfer import Inbox, Offer, Sender, Shards, fetch, shards
from kvpool.transfer.parcels import outline
from kvpool.transfer.shards import rank_groups
from reporting import Report

MODELS = (
    "gemma3-27b", "qwen3-next-80b-a3b", "deepseek-v4-flash-fp8", "llama4-scout", "gpt-oss-120b",
    "kimi-linear-48b-a3b",
)  # fmt: skip
TOKENS = (1024, 8192, 32768, 131072)
DEGREES = ((8, 8), (4, 2), (2, 4), (8, 1), (1, 8))
MIB = 1 << 20
CHUNK = 4 << 20  # bytes of a call to a raw socket


def whole_blocks(spec: kv.CacheSpec, tokens: int, sender: int, receiver: int) -> int:
    """Bytes that a planner without regions and shards sends."""
    everything = kv.without_regions(spec)
    plan = kv.transfer.plan(everything, tokens, Shards(sender), Shards(receiver))
    blocks = [group.bytes_per_block for group in rank_groups(everything, sender)]
    each = sum(
        len(plan.items(group.name)) * size
        for group, size in zip(everything.groups, blocks, strict=True)
    )
    return each * len(plan.pairs)


def planned(models, tokens, degrees) -> list[dict]:
    """A row for every model, length and pair of degrees that divides its heads."""
    rows = []
    cases = [(m, n, d) for m in models for n in tokens for d in degrees]
    for model, length, (sender, receiver) in tqdm(cases, desc="plans", leave=False):
        spec, seconds = kv.preset(model), []
        try:
            for _ in range(3):
                for remembered in (shards._lanes, shards._rank_groups):
                    remembered.cache_clear()
                begin = time.perf_counter()
                plan = kv.transfer.plan(spec, length, Shards(sender), Shards(receiver))
                sent, _ = plan.bytes_sent, plan.digest
                seconds.append(time.perf_counter() - begin)
        except kv.SpecError:
            continue
        rows.append({
            "model": model, "tokens": length, "sender": sender, "receiver": receiver,
            "needed": plan.bytes_needed, "sent": sent,
            "pieces": sum(len(outline(plan, *pair).parcels) for pair in plan.pairs),
            "whole blocks": whole_blocks(spec, length, sender, receiver),
            "plan ms": 1e3 * min(seconds),
        })  # fmt: skip
    return rows


def print_table(rows: list[dict]) -> None:
    """All that was planned, in MiB."""
    print(f"{'model':<22} {'tokens':>7}  ranks   {'needed':>10} {'sent':>10} {'pieces':>7} "
          f"{'whole blocks':>12} {'plan ms':>8}")  # fmt: skip
    for row in rows:
        needed, sent, whole = (row[name] / MIB for name in ("needed", "sent", "whole blocks"))
        print(f"{row['model']:<22} {row['tokens']:>7}  {row['sender']} to {row['receiver']}  "
              f"{needed:>10,.1f} {sent:>10,.1f} {row['pieces']:>7,} {whole:>12,.0f} "
              f"{row['plan ms']:>8.2f}")  # fmt: skip


def serve(pipe, spec: dict, tokens: int, shards: int, rounds: int) -> None:
    """The sending process: one rank's offer, once a round, and a raw socket for as many bytes."""

    async def run():
        sender = Sender()
        pipe.send(await sender.listen())
        for number in range(rounds):
            offer = Offer(number, kv.CacheSpec.from_dict(spec), tokens, Shards(shards))
            for group, blocks in zip(offer.spec.groups, offer.blocks, strict=True):
                blocks[:] = 7  # memory that is really there
                offer.put(group.name, blocks)
            sender.offer(offer)
            pipe.send(sum(blocks.nbytes for blocks in offer.blocks))
            await sender.delivered(offer)
            await asyncio.to_thread(pipe.recv)
            await asyncio.to_thread(raw_send, pipe, int(pipe.recv()))
        await sender.close()

    asyncio.run(run())


def raw_send(pipe, size: int) -> None:
    """Sends so many bytes through one plain socket."""
    data = np.full(size, 7, np.uint8)  # as much memory as a transfer reads
    with socket.create_server(("127.0.0.1", 0)) as server:
        pipe.send(server.getsockname()[1])
        sock, _ = server.accept()
        with sock:
            for start in range(0, size, CHUNK):
                sock.sendall(data[start : start + CHUNK])


def raw_receive(port: int, size: int) -> float:
    """Seconds to receive so many bytes into one array."""
    into = memoryview(np.ones(size, np.uint8))  # memory that is really there
    with socket.create_connection(("127.0.0.1", port)) as sock:
        begin = time.perf_counter()
        while into:
            into = into[sock.recv_into(into[:CHUNK]) :]
        return time.perf_counter() - begin


def loopback(model: str, tokens: int, sender: int, receiver: int, streams: int, rounds: int):
    """(bytes, bytes a second of a transfer, of a raw socket, share) from rank 0 to rank 0.

    Every round has one of each; all are medians over the rounds. A transfer's time
    includes connecting and the agreement.
    """
    spec = kv.preset(model)
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs, spec.to_dict(), tokens, sender, rounds)
    )
    process.start()
    port = ours.recv()
    plan = kv.transfer.plan(spec, tokens, Shards(sender), Shards(receiver))
    speeds: dict[str, list[float]] = {"transfer": [], "raw": []}
    for number in tqdm(range(rounds), desc=f"{model} {sender} to {receiver}", leave=False):
        ours.recv()
        inbox = Inbox(plan, 0)
        inbox.arrivals.outlines = {0: inbox.arrivals.outlines[0]}  # rank 0 alone sends
        for blocks in inbox.blocks:
            blocks[:] = 0
        begin = time.perf_counter()
        asyncio.run(fetch(inbox, number, {0: ("127.0.0.1", port)}, streams=streams))
        speeds["transfer"].append(inbox.received / (time.perf_counter() - begin))
        ours.send("next")
        ours.send(inbox.received)
        speeds["raw"].append(inbox.received / raw_receive(ours.recv(), inbox.received))
    process.join()
    shares = [ours / raw for ours, raw in zip(*speeds.values(), strict=True)]
    return inbox.received, *map(statistics.median, (*speeds.values(), shares))


def main() -> None:
    """Plans, moves, reports."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--table", action="store_true", help="every model, length and degree")
    parser.add_argument("--rounds", type=int, default=5, help="of the loopback")
    parser.add_argument("--streams", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192, help="of the loopback")
    args = parser.parse_args()

    rows = planned(MODELS, TOKENS, DEGREES)
    if args.table:
        print_table(rows)
    report = Report("transfer between machines")
    worst = max(row["sent"] / row["needed"] for row in rows)
    report.add("bytes sent / bytes needed, worst", worst, "x", "1.00", worst == 1)
    slowest = max(row["plan ms"] for row in rows)
    report.add("planning, slowest, best of 3", slowest, "ms", "at most 10", slowest <= 10)
    for row in rows:
        if row["tokens"] == 32768 and (row["sender"], row["receiver"]) == (4, 2):
            report.add(f"{row['model']}, 32k, 4 to 2: sent", row["sent"] / MIB, "MiB")
            report.add("  in whole blocks of the whole past", row["whole blocks"] / MIB, "MiB")
    for model, sender, receiver in (("gemma3-27b", 1, 1), ("gemma3-27b", 4, 2),
                                    ("qwen3-next-80b-a3b", 1, 1)):  # fmt: skip
        size, ours, raw, share = loopback(
            model, args.tokens, sender, receiver, args.streams, args.rounds
        )
        name = f"{model}, {args.tokens} tokens, {sender} to {receiver}"
        report.add(f"{name}: {size / MIB:,.0f} MiB over TCP", ours / 1e9, "GB/s")
        report.add("  a raw socket in the same run", raw / 1e9, "GB/s")
        report.add("  share of the raw socket", share, "x", "at least 0.7", share >= 0.7)
    report.finish(args.json)


if __name__ == "__main__":
    main()
