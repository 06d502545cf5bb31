"""What the host tier costs and finds: python benchmarks/tiers.py [TRACES] [--json FILE]

Bytes each way take turns with a memcpy of as many blocks, all in one run; blocks lie at random
places at both ends, as they do after a while. A joint request takes and gives blocks of five pools.
The decode loop is the demo's, 16 rows and 16 steps a dispatch, with and without a copy to the host
that is moved on by a chunk with every dispatch. Last, how many tokens of the first --requests of a
trace are found, with real bookkeeping and no bytes, by prefix caches with more and more host behind
them. TRACES is a file of one JSON object a line, with `input_length` in tokens and `hash_ids`, one
for each 512 tokens, or a folder of such .jsonl files; without it chats are generated.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

import decode
import kvpool as kv
from kvpool.tiers import HostPool, HostPoolGroup, HostTier, PoolEntry, copies
from kvpool.tiers.host_blocks import HostBlocks, aligned
from reporting import Report, take_turns
from tier_trace import MODELS, hit_ratios, traces

POOL_BYTES = 192 << 20
PARTS = ("copies", "joint", "decoding", "hits")
MOVED_BYTES = 96 << 20  # more than a cache holds
RANDOM = np.random.default_rng(0)


def storage_of(block_bytes: int) -> kv.Storage:
    """Blocks of 16 tokens of 4 layers."""
    heads = block_bytes // (16 * 4 * 2 * 2 * 128)
    spec = kv.CacheSpec.from_layers([kv.FullAttention(heads, 128)] * 4, 16)
    (group,) = spec.groups
    assert group.bytes_per_block == block_bytes
    blocks = POOL_BYTES // block_bytes
    plan = kv.plan(spec, num_blocks={"full": blocks}, max_seqs=4, max_seq_len=blocks * 4)
    return kv.init_storage(spec, plan)


class Moves:
    """Blocks of one size, moved to host memory and back; each move returns its seconds."""

    def __init__(self, kib: int, clock):
        block_bytes = kib << 10
        self.number, self.total = MOVED_BYTES // block_bytes, POOL_BYTES // block_bytes
        self.clock, self.storage = clock, storage_of(block_bytes)
        self.memory = {"full": HostBlocks(self.storage.plan.spec.groups[0], self.total)}
        self.source, self.target = (
            aligned(POOL_BYTES).reshape(self.total, block_bytes) for _ in range(2)
        )
        self.source[:], self.target[:] = 1, 2  # memory that is really there

    def chosen(self) -> list[int]:
        """Blocks in any order."""
        return RANDOM.permutation(self.total)[: self.number].tolist()

    def pieces(self, by_layer=False):
        """Those of one move."""
        ends = [{"full": self.chosen()} for _ in range(2)]
        return copies.pieces_of(self.memory, *ends, by_layer=by_layer)

    def copy(self) -> list[float]:
        """By memcpy."""
        places = list(zip(self.chosen(), self.chosen(), strict=True))
        begin = self.clock()
        for to, came_from in places:
            np.copyto(self.target[to], self.source[came_from])
        return [self.clock() - begin]

    def save(self) -> list[float]:
        """To the host."""
        saving = copies.Saving(self.memory, self.pieces())
        begin = self.clock()
        saving.send(self.storage, True)
        return [self.clock() - begin]

    def load(self, by_layer=False) -> list[float]:
        """To the device."""
        loading = copies.Loading(self.memory, self.pieces(by_layer))
        begin = self.clock()
        storage = loading.receive(self.storage, donate=True, wait=True)
        self.storage = jax.block_until_ready(storage)
        return [self.clock() - begin]


def bandwidth(report: Report, kib: int, rounds: int, clock=time.perf_counter) -> None:
    """Blocks of one size to host memory and back, by the clock or by the processor's time."""
    by = "" if clock is time.perf_counter else ", processor time"
    moves = Moves(kib, clock)
    cases = {
        "memcpy": moves.copy,
        "to the host": moves.save,
        "back": moves.load,
        "back, by layer": functools.partial(moves.load, by_layer=True),
    }
    seconds = take_turns(cases, rounds)
    report.add(f"{kib} KiB blocks, memcpy{by}", MOVED_BYTES / seconds["memcpy"] / 1e9, "GB/s")
    for name in list(cases)[1:]:
        share = seconds["memcpy"] / seconds[name]
        limit = kib >= 256 and "layer" not in name
        report.add(f"{kib} KiB blocks {name}{by}", share, "x", "at least 0.6 x" if limit else "",
                   share >= 0.6 if limit else None)  # fmt: skip


def joint(report: Report, rounds: int) -> None:
    """A request of five pools with room to spare, of few blocks and of many."""
    for blocks in (1, 64):
        group = HostPoolGroup(
            PoolEntry(name, HostPool(1 << 16), anchor=name == "a", reclaim=list) for name in "abcde"
        )
        request = dict.fromkeys("abcde", blocks)

        def once(group=group, request=request):
            begin = time.perf_counter()
            group.release(group.allocate(request))
            return [time.perf_counter() - begin]

        microseconds = take_turns({"once": once}, rounds * 100)["once"] * 1e6
        report.add(f"five pools, {blocks} blocks each: allocate and release", microseconds, "us",
                   "at most 100 us", microseconds <= 100)  # fmt: skip


def decoding(report: Report, rounds: int) -> None:
    """A dispatch of the demo's decode loop, alone and with a chunk on its way."""

    def step(carry, _):
        held, token = carry
        memory = decode.PagedRows.open(held)
        token = decode.whole(memory, token)
        return (decode.PagedRows.close(memory, token), token), None

    @functools.partial(jax.jit, donate_argnums=0)
    def dispatch(held, token):
        return jax.lax.scan(step, (held, token), length=decode.STEPS)[0]

    full, token = decode.filled(decode.PagedRows), np.zeros(decode.ROWS, np.int32)
    tier = HostTier.of_ratio(full[0].plan, 1.0)
    ids = {name: list(range(number)) for name, number in full[0].plan.num_blocks.items()}

    def run(copying):
        held = jax.block_until_ready(jax.tree.map(jnp.copy, full))
        saving = copies.Saving(tier.memory, copies.pieces_of(tier.memory, ids, ids))
        begin = time.perf_counter()
        (_, storage), chosen = dispatch(held, token)
        if copying:
            saving.send(storage)
        np.asarray(chosen)
        if copying:
            saving.send(storage)
        return [time.perf_counter() - begin]

    cases = {copying: functools.partial(run, copying) for copying in (False, True)}
    seconds = take_turns(cases, rounds)
    report.add("a dispatch of the decode loop", seconds[False] * 1e3, "ms")
    ratio = seconds[True] / seconds[False]
    report.add("  with a chunk to the host", ratio, "x", "at most 1.1 x", ratio <= 1.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = parser.add_argument
    option("traces", nargs="?", metavar="TRACES", help="a .jsonl file, or a folder of them")
    option("--requests", type=int, default=2000, help="of each trace; 0: all")
    option("--rounds", type=int, default=15)
    option("--parts", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=" ".join(PARTS))
    option("--json", metavar="FILE")
    args = parser.parse_args()
    report = Report("the host tier")
    for kib in (64, 256, 1024, 4096) if "copies" in args.parts else ():
        bandwidth(report, kib, args.rounds)
        # What other programs on the machine take does not count here, nor what two cores win.
        bandwidth(report, kib, args.rounds, time.process_time)
    if "joint" in args.parts:
        joint(report, args.rounds)
    if "decoding" in args.parts:
        decoding(report, args.rounds * 2)
    if "hits" in args.parts:
        for trace, requests in traces(args.traces, args.requests).items():
            for name in MODELS:
                hit_ratios(report, trace, requests, name)
    report.finish(args.json)


if __name__ == "__main__":
    main()
