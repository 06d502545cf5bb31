"""What the host tier costs: python benchmarks/tiers.py [--json FILE] [--rounds N]

Bytes each way take turns with a memcpy of as many blocks, all in one run; blocks lie at random
places at both ends, as they do after a while. A joint request takes and gives blocks of five pools.
The decode loop is the demo's, 16 rows and 16 steps a dispatch, with and without a copy to the host
that is moved on by a chunk with every dispatch. Last, how many tokens of a made-up trace of chats
are found, with real bookkeeping and no bytes, by a prefix cache with more and more host behind it.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

import decode
import kvpool as kv
from kvpool.tiers import HostPool, HostPoolGroup, HostTier, PoolEntry, PrefixTier, copies
from kvpool.tiers.host_blocks import HostBlocks, aligned
from reporting import Report, take_turns

POOL_BYTES = 192 << 20
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


def bandwidth(report: Report, kib: int, rounds: int, clock=time.perf_counter) -> None:
    """Blocks of one size to host memory and back, by the clock or by the processor's time."""
    by = "" if clock is time.perf_counter else ", processor time"
    block_bytes = kib << 10
    number, total = MOVED_BYTES // block_bytes, POOL_BYTES // block_bytes
    holder = [storage_of(block_bytes)]
    group = holder[0].plan.spec.groups[0]
    memory = {"full": HostBlocks(group, total)}
    source, target = (aligned(POOL_BYTES).reshape(total, block_bytes) for _ in range(2))
    source[:], target[:] = 1, 2

    def pieces(by_layer=False):
        ends = [{"full": RANDOM.permutation(total)[:number].tolist()} for _ in range(2)]
        return copies.pieces_of(memory, *ends, by_layer=by_layer)

    def timed(run, *arguments):
        begin = clock()
        result = run(*arguments)
        return result, [clock() - begin]

    def copy():
        places = zip(*(RANDOM.permutation(total)[:number].tolist() for _ in range(2)), strict=True)
        return timed(lambda: [np.copyto(target[i], source[j]) for i, j in places])[1]

    def save():
        saving = copies.Saving(memory, pieces())
        return timed(lambda: saving.send(holder[0], wait=True))[1]

    def load(by_layer=False):
        loading = copies.Loading(memory, pieces(by_layer))
        holder[0], seconds = timed(
            lambda: jax.block_until_ready(loading.receive(holder[0], donate=True, wait=True))
        )
        return seconds

    cases = {
        "memcpy": copy,
        "to the host": save,
        "back": load,
        "back, by layer": lambda: load(by_layer=True),
    }
    seconds = take_turns(cases, rounds)
    report.add(f"{kib} KiB blocks, memcpy{by}", MOVED_BYTES / seconds["memcpy"] / 1e9, "GB/s")
    for name in list(cases)[1:]:
        share = seconds["memcpy"] / seconds[name]
        limit = kib >= 256 and "layer" not in name
        report.add(f"{kib} KiB blocks {name}{by}", share, "x", "at least 0.6 x" if limit else "",
                   share >= 0.6 if limit else None)  # fmt: skip


def joint(report: Report, rounds: int) -> None:
    """A request of five pools with room to spare, and one for which something has to go."""
    for blocks in (1, 64):
        held: list = []
        group = HostPoolGroup(
            PoolEntry(name, HostPool(1 << 16), anchor=name == "a", reclaim=lambda held=held: held)
            for name in "abcde"
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
        seconds = [time.perf_counter() - begin]
        return seconds

    seconds = take_turns({copying: lambda c=copying: run(c) for copying in (False, True)}, rounds)
    report.add("a dispatch of the decode loop", seconds[False] * 1e3, "ms")
    ratio = seconds[True] / seconds[False]
    report.add("  with a chunk to the host", ratio, "x", "at most 1.1 x", ratio <= 1.1)


def chats(sessions: int, turns: int, block: int) -> list[np.ndarray]:
    """Prompts i32[T]: each session comes back now and then with all it said, and a turn more."""
    random = np.random.default_rng(1)
    said = [np.arange(2 * block, dtype=np.int32)] * sessions  # all begin with the same
    trace = []
    for session in random.permutation(np.repeat(np.arange(sessions), turns)):
        more = random.integers(1, 1 << 30, block * random.integers(2, 7), dtype=np.int32)
        said[session] = np.concatenate((said[session], more))
        trace.append(said[session])
    return trace


def hit_ratio(report: Report, trace: list[np.ndarray], block: int, ratio: float) -> None:
    """Tokens found of a hybrid model's prompts, with `ratio` host blocks for each device block."""
    longest, row = max(map(len, trace)), np.zeros(1, np.int32)
    layers = [kv.FullAttention(1, 1), kv.SlidingWindow(2 * block, 1, 1),
              kv.RecurrentState({"s": ((8,), "float32")})]  # fmt: skip
    spec = kv.CacheSpec.from_layers(layers, block)
    columns = longest // block + 1
    plan = kv.plan(spec, num_blocks={"full": 4 * columns, f"window{2 * block}": 2 * columns,
                                     "state": 48}, max_seqs=1, max_seq_len=longest)  # fmt: skip
    state = kv.init_state(spec, plan)
    prefixes = PrefixTier(kv.PrefixCache(spec, plan), HostTier.of_ratio(plan, ratio))
    found, begin = 0, time.perf_counter()
    for tokens in trace:
        state, _, hit = prefixes.match(state, None, tokens)
        found += hit.length
        for verb in (lambda s, hit=hit: kv.admit(s, row, hit.prefix), *(
            lambda s, stop=stop: kv.reserve(s, np.int32([stop]) - np.asarray(s.seq_lens))
            for stop in (*hit.stops, len(tokens))
        )):  # fmt: skip
            while not (result := verb(state))[1].ok:
                state, freed = prefixes.evict(state, None, short=result[1].shortfall, protect=hit)
                assert any(freed.values())
            state = result[0]
            room = np.asarray(state.room) - np.asarray(state.seq_lens)
            state, _ = prefixes.insert(kv.advance(state, room), None, tokens, 0)
        state = kv.release(state, row)
    each = (time.perf_counter() - begin) / len(trace)
    share = found / sum(map(len, trace))
    report.add(f"chats, host {ratio:g} x the device: tokens found", share, "of all")
    report.add("  a request's bookkeeping", each * 1e3, "ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    report = Report("the host tier")
    for kib in (64, 256, 1024, 4096):
        bandwidth(report, kib, args.rounds)
        # What other programs on the machine take does not count here, nor what two cores win.
        bandwidth(report, kib, args.rounds, time.process_time)
    joint(report, args.rounds)
    decoding(report, args.rounds * 2)
    trace = chats(40, 8, 16)
    for ratio in (0, 1, 4, 16):
        hit_ratio(report, trace, 16, ratio)
    report.finish(args.json)


if __name__ == "__main__":
    main()
