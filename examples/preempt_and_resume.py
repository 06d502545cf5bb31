"""Serve more requests than the device's blocks hold: rows go to host memory and come back.

    python examples/preempt_and_resume.py
    python examples/preempt_and_resume.py --blocks 64 --host-ratio 0.5

The same prompts as in decode_loop.py are served three times: with blocks for all, with too few of
them and rows that start over after they were put back, and with too few and a host tier. There a
row that has to go takes everything along, attention blocks, window and recurrent state, and goes
on later in another row and other blocks where it had stopped. All three write the same text.
"""

from __future__ import annotations

import argparse
import sys

import kvpool as kv
import prompts
from decode_loop import Request, Server, plan_of, serve
from kvpool import tiers
from paged_memory import cache_spec
from tiny_model import load


class CountingServer(Server):
    """A server that counts the tokens it computes."""

    def __init__(self, *args):
        super().__init__(*args)
        self.computed = 0
        self._begun = [0] * len(self.rows)  # tokens that each row's request came with

    def _enter(self, row: int, trial: kv.State) -> None:
        super()._enter(row, trial)
        self._begun[row] = self.rows[row].settled

    def _leave(self, row: int) -> Request:
        self.computed += self.rows[row].settled - self._begun[row]
        return super()._leave(row)

    def record(self, server: Server) -> None:
        """No picture is drawn."""


class ResumingServer(CountingServer):
    """A server whose rows go on where they stopped, unless the host is full too."""

    def __init__(self, *args, tier: tiers.HostTier):
        super().__init__(*args)
        self.tier = tier
        self.records: dict[int, tiers.Backup] = {}  # of requests that wait
        self.moved = 0  # bytes to the host and back

    def _preempt(self) -> None:
        """The newest row is backed up before it goes back to the head of the queue."""
        row = self.order[-1]
        record = tiers.backup(self.tier, self.state, self.storage, row)
        if isinstance(record, tiers.Backup):
            self.records[self.rows[row].index] = record
            self.moved += self._bytes(record)
        super()._preempt()

    def _enter(self, row: int, trial: kv.State) -> None:
        """A request that was backed up comes back; there is room, since `trial` has it."""
        record = self.records.pop(self.rows[row].index, None)
        if record is not None:
            trial, self.storage, result = tiers.restore(
                self.tier, self.state, self.storage, record, row, donate=True
            )
            if not result.ok:
                raise RuntimeError(f"no room for {record.length} tokens that just had room")
            self.rows[row].settled = record.length
            tiers.discard(self.tier, record)
            self.moved += self._bytes(record)
        super()._enter(row, trial)

    def _bytes(self, record: tiers.Backup) -> int:
        ids = record.allocation.ids
        return sum(len(ids[group.name]) * group.bytes_per_block for group in self.spec.groups)


def run(name: str, server: CountingServer, args: argparse.Namespace) -> list[list[int]]:
    """Serves all prompts; says what it took, and gives the tokens of every request."""
    requests = [
        Request(i, len(p), min(len(p) + args.max_new_tokens, server.plan.max_seq_len), p.tolist())
        for i, p in enumerate(prompts.prompts(args.requests, args.seed))
    ]
    serve(server, requests, args.steps, server)
    line = f"{name:<24}{server.preemptions:>3} preempted, {server.computed:>7,} tokens computed"
    if isinstance(server, ResumingServer):
        line += f", {server.moved / 2**20:,.1f} MiB moved"
        whole = {entry.name: entry.pool.num_blocks for entry in server.tier.pools.entries}
        if server.tier.pools.available() != whole:
            sys.exit("host blocks are missing")
    print(line)
    return [request.tokens for request in requests]


def main() -> None:
    """Serve three times, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--blocks", type=int, default=96, help="of full attention, too few")
    parser.add_argument("--host-ratio", type=float, default=2.0, help="host blocks for each one")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a dispatch")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    args = parser.parse_args()

    model = load()
    spec = cache_spec(model.config)
    many, few = (
        plan_of(spec, args.rows, blocks, model.config.context)
        for blocks in (args.rows * model.config.context // spec.block_size, args.blocks)
    )
    tier = tiers.HostTier.of_ratio(few, args.host_ratio)
    wanted = run("blocks for all", CountingServer(model, spec, many, args.seed, 0.0), args)
    again = run("too few, starting over", CountingServer(model, spec, few, args.seed, 0.0), args)
    resumed = ResumingServer(model, spec, few, args.seed, 0.0, tier=tier)
    texts = {"starting over": again, "resuming": run("too few, resuming", resumed, args)}
    for how, got in texts.items():
        same = sum(a == b for a, b in zip(got, wanted, strict=True))
        print(f"{how}: {same} of {len(wanted)} requests have the same text as with blocks for all")
        if same < len(wanted):
            sys.exit("the text differs")


if __name__ == "__main__":
    main()
