"""Two processes: one prefills, the other decodes, and the cache between them is cut otherwise.

    python examples/prefill_decode.py
    python examples/prefill_decode.py --prefill-ranks 1 --decode-ranks 4

The process that prefills keeps its cache in four parts, as four devices would that share the heads;
the one that decodes in two. Both compute the same plan of what has to move. The text must be that
of one process with the whole cache in one part.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

import kvpool as kv
import prompts
from kvpool.transfer import Inbox, Offer, Sender, Shards, fetch, rows
from paged_memory import PagedMemory
from tiny_model import END, load

CHUNK = 64  # most tokens of a row in one prefill step


def cache_spec(config) -> kv.CacheSpec:
    """What the model keeps, with the channels of the convolution first, so that ranks can share."""
    heads = (config.kv_heads, config.head_dim)
    shapes = config.state_shapes
    (taps, channels), dtype = shapes["conv"]
    state = {"ssm": shapes["ssm"], "conv": ((channels, taps), dtype, (channels // 3,) * 3)}
    regions = {
        "full": kv.FullAttention(*heads, dtype=config.cache_dtype),
        "window": kv.SlidingWindow(config.window, *heads, dtype=config.cache_dtype),
        "recurrent": kv.RecurrentState(state),
    }
    return kv.CacheSpec.from_layers([regions[kind] for kind in config.pattern])


class ShardedMemory(PagedMemory):
    """`PagedMemory` over one storage a rank, each with its part of the heads and channels."""

    def __init__(self, config, spec, state, storages, num_tokens, width):
        super().__init__(config, spec, state, storages, num_tokens, width)
        self.ranks = len(storages)

    def put(self, layer, k, v):
        """Writes to every rank the heads that it has."""
        heads, storages = self.config.kv_heads, []
        for rank, storage in enumerate(self.storage):
            first = rank * heads // self.ranks
            mine = slice(first, first + max(1, heads // self.ranks))
            values = {"k": k[:, :, mine], "v": v[:, :, mine]}
            storages.append(kv.write(storage, self.view, layer, values))
        self.storage = tuple(storages)

    def past(self, layer, most):
        """The heads of all ranks; of ranks that have the same the first."""
        step = max(1, self.ranks // self.config.kv_heads)
        parts = [
            kv.read(storage, self.view, layer, max_blocks=most)[0]
            for storage in self.storage[::step]
        ]
        return {name: jnp.concatenate([p[name] for p in parts], axis=2) for name in ("k", "v")}

    def read_state(self, layer):
        """The state of all ranks."""
        parts = [kv.read_state(storage, self.view, layer) for storage in self.storage]
        shape = (parts[0]["conv"].shape[0], 3, -1, parts[0]["conv"].shape[-1])
        conv = jnp.concatenate([part["conv"].reshape(shape) for part in parts], axis=2)
        conv = conv.reshape(shape[0], -1, shape[-1])
        ssm = jnp.concatenate([part["ssm"] for part in parts], axis=1)
        return {"ssm": ssm, "conv": jnp.swapaxes(conv, 1, 2)}

    def write_state(self, layer, state):
        """Writes to every rank its heads and its third of queries, keys and values each."""
        conv = jnp.swapaxes(state["conv"], 1, 2)
        rows_, _, taps = conv.shape
        conv = jnp.split(conv.reshape(rows_, 3, -1, taps), self.ranks, axis=2)
        ssm = jnp.split(state["ssm"], self.ranks, axis=1)
        self.storage = tuple(
            kv.write_state(
                storage, self.view, layer, {"ssm": heads, "conv": part.reshape(rows_, -1, taps)}
            )
            for storage, heads, part in zip(self.storage, ssm, conv, strict=True)
        )


class Machine:
    """The model, and a cache in `ranks` parts with one bookkeeping, which is the same for all."""

    def __init__(self, ranks: int, num_rows: int):
        model = load()
        self.config, self.ranks = model.config, ranks
        self.graph, self.params = nnx.split(model)
        self.whole = cache_spec(model.config)
        self.spec = kv.per_rank(self.whole, ranks)
        length = model.config.context
        blocks = {
            group.name: num_rows * (1 if group.is_state else group.columns(length))
            for group in self.spec.groups
        }
        plan = kv.plan(self.spec, num_blocks=blocks, max_seqs=num_rows, max_seq_len=length)
        self.state = kv.init_state(self.spec, plan)
        self.storages = tuple(kv.init_storage(self.spec, plan) for _ in range(ranks))

    def step(self, tokens: np.ndarray, counts: np.ndarray) -> np.ndarray:
        """Runs counts i32[S] of tokens i32[S, T]; gives each row's best next token i32[S]."""
        self.state, self.storages, chosen = step(
            self.graph, self.spec, self.params, self.state, self.storages, tokens, counts
        )
        return np.asarray(chosen)

    def prefill(self, row: int, prompt: list[int]) -> None:
        """All of a prompt in a free row, chunk by chunk."""
        self.state, _ = kv.admit(self.state, [row])
        num_rows = self.state.plan.max_seqs
        for start in range(0, len(prompt), CHUNK):
            chunk = prompt[start : start + CHUNK]
            tokens, counts = np.zeros((num_rows, CHUNK), np.int32), np.zeros(num_rows, np.int32)
            tokens[row, : len(chunk)], counts[row] = chunk, len(chunk)
            self.step(tokens, counts)

    def decode(self, last: list[int], most: int) -> list[list[int]]:
        """Up to `most` tokens of every row after its `last`, which is not in the cache yet."""
        texts: list[list[int]] = [[] for _ in last]
        going, newest = np.ones(len(last), bool), np.array(last, np.int32)
        for _ in tqdm(range(most), desc="decoding", leave=False):
            newest = self.step(newest[:, None], going.astype(np.int32))
            for row in np.flatnonzero(going):
                texts[row].append(int(newest[row]))
            going &= newest != END
            if not going.any():
                break
        return texts


@functools.partial(
    jax.jit, static_argnames=("graph", "spec"), donate_argnames=("state", "storages")
)
def step(graph, spec, params, state, storages, tokens, counts):
    """One step of all rows: (state, storages, best next token i32[S])."""
    model = nnx.merge(graph, params)
    state, _ = kv.reserve(state, counts)  # there is room for every row to its end
    memory = ShardedMemory(model.config, spec, state, storages, counts, tokens.shape[1])
    hidden = model(tokens, memory)
    newest = jnp.maximum(counts - 1, 0)[:, None, None]
    hidden = jnp.take_along_axis(hidden, newest, axis=1)[:, 0]
    chosen = jnp.argmax(model.logits(hidden), axis=-1).astype(jnp.int32)
    # Settling depends on the token chosen, so XLA sees that the tables are read before.
    state = kv.advance(state, jnp.where(chosen < 0, 0, counts))
    return state, memory.storage, chosen


async def serve_prefills(ranks: int, requests: list[list[int]]) -> None:
    """The process that prefills: offers every request at once, and fills the offers as it goes."""
    machine, shards = Machine(ranks, 1), Shards(ranks)
    senders = [Sender(timeout=120.0) for _ in range(ranks)]
    offers = [
        [Offer(number, machine.whole, len(prompt) - 1, shards, rank) for rank in range(ranks)]
        for number, prompt in enumerate(requests)
    ]
    for of_request in offers:
        for sender, offer in zip(senders, of_request, strict=True):
            sender.offer(offer)
    ports = [await sender.listen() for sender in senders]
    print(json.dumps(ports), flush=True)
    for prompt, of_request in zip(requests, offers, strict=True):
        await asyncio.to_thread(machine.prefill, 0, prompt[:-1])
        for storage, offer in zip(machine.storages, of_request, strict=True):
            rows.fill(offer, machine.state, storage, 0)
            offer.notify()
        machine.state = kv.release(machine.state, [0])  # an offer has bytes of its own
    for of_request in offers:
        for sender, offer in zip(senders, of_request, strict=True):
            await sender.delivered(offer)
    kv.check(machine.state)
    print(json.dumps(sum(sender.sent for sender in senders)), flush=True)
    for sender in senders:
        await sender.close()


async def fetch_row(machine: Machine, row: int, tokens: int, sender_ranks: int, peers) -> dict:
    """Fetches one request into a row; gives what it took."""
    plan = kv.transfer.plan(machine.whole, tokens, Shards(sender_ranks), Shards(machine.ranks))
    machine.state, result = rows.begin(machine.state, row, tokens)
    if not bool(result.ok):
        sys.exit("the receiver is full")
    inboxes = [Inbox(plan, rank) for rank in range(machine.ranks)]
    await asyncio.gather(*(fetch(box, row, peers, timeout=120.0) for box in inboxes))
    seconds = time.perf_counter() - min(box.began for box in inboxes)
    settled, storages = machine.state, []
    for storage, inbox in zip(machine.storages, inboxes, strict=True):
        settled, storage = rows.finish(machine.state, storage, row, inbox)
        storages.append(storage)
    machine.state, machine.storages = settled, tuple(storages)
    parcels = [len(o.parcels) for box in inboxes for o in box.arrivals.outlines.values()]
    return {
        "tokens": tokens,
        "needed": plan.bytes_needed,
        "sent": sum(box.received for box in inboxes),
        "pieces": sum(parcels),
        "seconds": seconds,
    }


def start_prefills(args: argparse.Namespace) -> tuple[subprocess.Popen, dict]:
    """The other process, and where its ranks listen."""
    command = [sys.executable, __file__, "--role", "prefill", "--requests", str(args.requests),
               "--prefill-ranks", str(args.prefill_ranks)]  # fmt: skip
    other = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    ports = json.loads(other.stdout.readline())
    return other, {rank: ("127.0.0.1", port) for rank, port in enumerate(ports)}


def main() -> None:
    """Decode what the other process prefills, and compare with doing both here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--prefill-ranks", type=int, default=4, choices=(1, 2, 4))
    parser.add_argument("--decode-ranks", type=int, default=2, choices=(1, 2, 4))
    parser.add_argument("--role", choices=("decode", "prefill"), default="decode",
                        help="prefill is what the other process runs")  # fmt: skip
    args = parser.parse_args()
    requests = [prompt.tolist() for prompt in prompts.prompts(args.requests)]
    if args.role == "prefill":
        asyncio.run(serve_prefills(args.prefill_ranks, requests))
        return
    other, peers = start_prefills(args)
    machine = Machine(args.decode_ranks, len(requests))

    async def fetch_all() -> list[dict]:
        return [
            await fetch_row(machine, row, len(prompt) - 1, args.prefill_ranks, peers)
            for row, prompt in enumerate(tqdm(requests, desc="fetching", leave=False))
        ]

    figures = asyncio.run(fetch_all())
    last = [prompt[-1] for prompt in requests]
    texts = machine.decode(last, args.max_new_tokens)
    kv.check(machine.state)
    sent = json.loads(other.stdout.readline())
    if other.wait() != 0:
        sys.exit("the process that prefills failed")
    report(args, figures, sent)

    alone = Machine(1, len(requests))
    for row, prompt in enumerate(requests):
        alone.prefill(row, prompt[:-1])
    same = sum(a == b for a, b in zip(texts, alone.decode(last, args.max_new_tokens), strict=True))
    print(f"\n--- request 0\n{prompts.decode(np.array(requests[0] + texts[0]))}\n---")
    print(f"checked: {same} of {len(texts)} requests have the text of one process")
    if same < len(texts):
        sys.exit("the texts differ")


def report(args: argparse.Namespace, figures: list[dict], sent: int) -> None:
    """Prints what every request took."""
    print(f"{args.prefill_ranks} ranks prefill, {args.decode_ranks} decode")
    print("request  tokens  bytes needed    bytes sent  pieces  ms from the first  ms a piece")
    for number, row in enumerate(figures):
        milliseconds = 1e3 * row["seconds"]
        print(
            f"{number:>7} {row['tokens']:>7} {row['needed']:>13,} {row['sent']:>13,} "
            f"{row['pieces']:>7} {milliseconds:>18.1f} {milliseconds / row['pieces']:>11.2f}"
        )
    needed = sum(row["needed"] for row in figures)
    print(f"bytes sent / needed: {sent / needed:.2f}")


if __name__ == "__main__":
    main()
