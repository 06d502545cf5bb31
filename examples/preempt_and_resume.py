"""Serve more requests than the device's blocks hold: rows go to host memory and come back.

    python examples/preempt_and_resume.py
    python examples/preempt_and_resume.py --blocks 64 --host-ratio 0.5
    python examples/preempt_and_resume.py --store prefixes   # twice: the second one finds them

The same prompts as in decode_loop.py are served three times: with blocks for all, with too few of
them and rows that start over after they were put back, and with too few and a host tier. There a
row that has to go takes everything along, attention blocks, window and recurrent state, and goes
on later in another row and other blocks where it had stopped. All three write the same text.

With a store there is a fourth: the beginnings of prompts are kept in a prefix cache, and what it
has to let go of, and all that is left at the end, goes to the host and the store. A run that finds
them there computes fewer tokens, and writes the same text again.
"""

from __future__ import annotations

import argparse
import sys

import kvpool as kv
import prompts
from decode_loop import CHUNK, Request, Server, plan_of, serve
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

    def finish(self) -> None:
        """All requests are done."""

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


class StoringServer(ResumingServer):
    """A server that begins with what it, or an earlier run, computed of a prompt."""

    def __init__(self, *args, tier: tiers.HostTier, store: tiers.Store):
        super().__init__(*args, tier=tier)
        cache = kv.PrefixCache(self.spec, self.plan, model="tiny")
        self.prefixes = tiers.PrefixTier(cache, tier, store)

    def admit(self) -> None:
        """As before; what only the cache holds makes room."""
        super().admit()
        while self.waiting and None in self.rows and self._make_room():
            super().admit()

    def _make_room(self) -> bool:
        """Whether the cache let go of anything."""
        free = kv.free_blocks(self.state)
        need = {g.name: int(free[g.name]) + len(self.rows) for g in self.spec.groups}
        self.state, freed = self.prefixes.evict(self.state, self.storage, need)
        return any(freed.values())

    def _preempt(self) -> None:
        if not self._make_room():
            super()._preempt()

    def _enter(self, row: int, trial: kv.State) -> None:
        request = self.rows[row]
        if request.index not in self.records:
            self.state, self.storage, hit = self.prefixes.match(
                self.state, self.storage, request.tokens, donate=True
            )
            trial, result = kv.admit(self.state, self._padded([row]), hit.prefix)
            if result.ok:
                self.storage = kv.copy_blocks(self.storage, result.copies)
                request.settled = hit.length
            else:  # no block is left for the state that it would begin with
                trial, _ = kv.admit(self.state, self._padded([row]))
        super()._enter(row, trial)

    def _chunk(self) -> list[int]:
        """Publishes what stands at the end of a whole chunk, where it has its recurrent state."""
        refused = super()._chunk()
        for row in self.order:
            request = self.rows[row]
            if request.settled and request.settled % CHUNK == 0 and request.left:
                self.state, self.storage = self.prefixes.insert(
                    self.state, self.storage, request.tokens, row
                )
        return refused

    def finish(self) -> None:
        """What the cache has goes to the store, and the host is empty."""
        self.state, stored = self.prefixes.save_all(self.state, self.storage, 60.0)
        if not stored:
            sys.exit("the store did not take everything")
        self.state = self.prefixes.clear(self.state)


def run(name: str, server: CountingServer, args: argparse.Namespace) -> list[list[int]]:
    """Serves all prompts; says what it took, and gives the tokens of every request."""
    requests = [
        Request(i, len(p), min(len(p) + args.max_new_tokens, server.plan.max_seq_len), p.tolist())
        for i, p in enumerate(prompts.prompts(args.requests, args.seed))
    ]
    serve(server, requests, args.steps, server)
    server.finish()
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
    parser.add_argument("--store", help="a folder or URL where prefixes outlive the run")
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
    if args.store:
        store = tiers.Store(args.store, spec, model="tiny")
        storing = StoringServer(model, spec, few, args.seed, 0.0, tier=tier, store=store)
        texts["storing"] = run("too few, with a store", storing, args)
        print(f"store: {store.counts.hits} blocks found, {store.counts.written} written")
    for how, got in texts.items():
        same = sum(a == b for a, b in zip(got, wanted, strict=True))
        print(f"{how}: {same} of {len(wanted)} requests have the same text as with blocks for all")
        if same < len(wanted):
            sys.exit("the text differs")


if __name__ == "__main__":
    main()
