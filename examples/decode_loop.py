"""Serve real prompts with a small hybrid model on kvpool: continuous batching, end to end.

    python examples/decode_loop.py
    python examples/decode_loop.py --blocks 96      # too few: rows are preempted and recomputed

Prompts are headers and docstrings of standard-library functions the model has not seen. Each
goes through one of a few rows: admitted when it fits, prefilled in chunks while other rows decode
along, then decoded many steps at a time on the device. What does not fit is a value, so the
scheduler has no rollback: a refused row waits, and if that is not enough the newest row is put
back in the queue and recomputed later. At the end the text of some requests is compared with a
recomputation that uses no cache.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import hashlib
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

import kvpool as kv
import prompts
from block_map import Recorder
from memories import NoCache
from paged_memory import NONE, TRACES, cache_spec, choose, chunk_step, decode_steps
from tiny_model import END, TinyModel, load

CHUNK = 64  # most tokens of a row in one prefill step


@dataclasses.dataclass(eq=False)
class Request:
    """One prompt on its way. `tokens` are all known ones, of which `settled` are in the cache."""

    index: int
    prompt: int  # tokens of the prompt
    limit: int  # most tokens in all
    tokens: list[int]
    settled: int = 0
    preempted: int = 0

    @property
    def pending(self) -> list[int]:
        """Known tokens that the cache lacks: one while decoding, more before that."""
        return self.tokens[self.settled :]

    @property
    def left(self) -> int:
        """Tokens that it may still choose."""
        return 0 if self.tokens[-1] == END else self.limit - len(self.tokens)


class Server:
    """Rows, the queue before them, and the cache behind them."""

    def __init__(self, model: TinyModel, spec: kv.CacheSpec, plan: kv.Plan, seed, temperature):
        self.graph, self.params = nnx.split(model)
        self.spec, self.plan = spec, plan
        self.state, self.storage = kv.init(spec, plan)
        self.noise = (jnp.int32(seed), jnp.float32(temperature))
        self.rows: list[Request | None] = [None] * plan.max_seqs  # newest last in `order`
        self.order: list[int] = []
        self.waiting: collections.deque[Request] = collections.deque()
        self.done: list[Request] = []
        self.chunked, self.preemptions = False, 0  # what the last step ran; for the picture

    def admit(self) -> None:
        """Give free rows to waiting requests, in order, while everything known fits.

        Each is tried on a copy: if it and all running rows can have room for the tokens they
        know and a block more, the copy becomes the state, else it is dropped.
        """
        wanted = self._per_row(0)
        for row in self.order:
            wanted[row] = self._room(self.rows[row])
        for row in [row for row, request in enumerate(self.rows) if request is None]:
            if not self.waiting:
                break
            wanted[row] = self._room(self.waiting[0])
            trial, _ = kv.admit(self.state, self._padded([row]))
            _, result = kv.reserve(trial, wanted, tail_only=True)
            if not result.ok:
                break
            self.rows[row] = self.waiting.popleft()
            self.order.append(row)
            self._enter(row, trial)

    def _enter(self, row: int, trial: kv.State) -> None:
        """A request begins in a row, which is live in `trial`."""
        self.state = trial

    def _room(self, request: Request) -> int:
        block = self.spec.block_size
        return min(len(request.pending) + block, request.limit - request.settled)

    def step(self, steps: int) -> None:
        """One dispatch: a chunk for every row if any has a prompt to run, else `steps` tokens."""
        self.chunked = any(r and len(r.pending) > 1 for r in self.rows)
        refused = self._chunk() if self.chunked else self._decode(steps)
        finished = [row for row in self.order if not self.rows[row].left]
        for row in finished:
            self.done.append(self._leave(row))
        if refused and not finished:
            self._preempt()

    def _chunk(self) -> list[int]:
        tokens = np.zeros((len(self.rows), CHUNK), np.int32)
        counts, chooses = self._per_row(0), self._per_row(0) > 0
        for row in self.order:
            pending = self.rows[row].pending
            counts[row] = min(len(pending), CHUNK)
            tokens[row, : counts[row]] = pending[:CHUNK]
            chooses[row] = counts[row] == len(pending)
        self.state, self.storage, granted, chosen = chunk_step(
            self.graph, self.spec, self.params, self.state, self.storage,
            tokens, counts, chooses, self._sampling(),
        )  # fmt: skip
        granted, chosen = jax.device_get((granted, chosen))
        for row in self.order:
            self.rows[row].settled += int(counts[row]) * int(granted[row])
            self.rows[row].tokens += [int(chosen[row])] * int(chosen[row] != NONE)
        finished = [row for row in self.order if not self.rows[row].left]
        self.state = kv.release(self.state, self._padded(finished))
        return [row for row in self.order if not granted[row]]

    def _decode(self, steps: int) -> list[int]:
        last, left = self._per_row(0), self._per_row(0)
        for row in self.order:
            last[row], left[row] = self.rows[row].tokens[-1], self.rows[row].left
        self.state, self.storage, chosen = decode_steps(
            self.graph, self.spec, self.params, self.state, self.storage,
            last, left, self._sampling(), steps=steps,
        )  # fmt: skip
        chosen = np.asarray(chosen)
        for row in self.order:
            new = chosen[chosen[:, row] != NONE, row].tolist()
            self.rows[row].tokens += new
            self.rows[row].settled += len(new)
        return [row for row in self.order if self.rows[row].left and chosen[-1, row] == NONE]

    def _preempt(self) -> None:
        """Blocks ran out and nobody finished: the newest row goes back to the head of the queue."""
        row = self.order[-1]
        self.state = kv.release(self.state, self._padded([row]))
        request = self._leave(row)
        request.settled, request.preempted = 0, request.preempted + 1
        self.preemptions += 1
        self.waiting.appendleft(request)

    def _leave(self, row: int) -> Request:
        request, self.rows[row] = self.rows[row], None
        self.order.remove(row)
        return request

    def _sampling(self):
        indices = [request.index if request else 0 for request in self.rows]
        return np.array(indices, np.int32), *self.noise

    def _per_row(self, value: int) -> np.ndarray:
        return np.full(len(self.rows), value, np.int32)

    def _padded(self, rows: list[int]) -> np.ndarray:
        return np.array(rows + [-1] * (len(self.rows) - len(rows)), np.int32)


def serve(server: Server, requests: list[Request], steps: int, recorder: Recorder) -> float:
    """Run all requests to their end; gives tokens per second of the dispatches after compiling."""
    longest = np.full(len(server.rows), max(r.limit for r in requests), np.int32)
    if (np.asarray(kv.fits(server.state, longest)) == kv.Status.NEVER).any():
        sys.exit(f"a request of {longest[0]} tokens never fits: give more --blocks")
    server.waiting.extend(requests)
    seconds, chosen, before = 0.0, 0, sum(len(r.tokens) for r in requests)
    with tqdm(total=len(requests), desc="serving", unit="request") as bar:
        while server.waiting or server.order:
            begin, traces = time.perf_counter(), TRACES.total()
            server.admit()
            server.step(steps)
            after = sum(len(r.tokens) for r in requests)
            if traces == TRACES.total():
                seconds, chosen = seconds + time.perf_counter() - begin, chosen + after - before
            before = after
            recorder.record(server)
            bar.set_postfix_str(f"{chosen:,} tokens" if chosen else "compiling", refresh=False)
            bar.update(len(server.done) - bar.n)
    kv.check(server.state)
    return chosen / seconds


def recomputed(model: TinyModel, requests: list[Request], noise) -> int:
    """How many of the requests have the very tokens that a run without a cache chooses."""
    config = model.config
    tokens = np.full((len(requests), config.context), END, np.int32)
    for row, request in enumerate(requests):
        tokens[row, : len(request.tokens)] = request.tokens
    indices = jnp.asarray([request.index for request in requests], jnp.int32)

    @nnx.jit
    def next_tokens(model, tokens):
        logits = model.logits(model(tokens, NoCache(config, *tokens.shape)))
        positions = jnp.arange(1, config.context + 1, dtype=jnp.int32)
        at = lambda row, index: choose(  # noqa: E731
            row, positions, jnp.full_like(positions, index), *noise
        )
        return jax.vmap(at)(logits, indices)

    wanted = np.asarray(next_tokens(model, jnp.asarray(tokens)))
    return sum(
        wanted[row, r.prompt - 1 : len(r.tokens) - 1].tolist() == r.tokens[r.prompt :]
        for row, r in enumerate(requests)
    )


def plan_of(spec: kv.CacheSpec, rows: int, blocks: int, max_seq_len: int) -> kv.Plan:
    """`blocks` for full attention; the other groups get what the rows can use in chunks.

    `max_step_tokens` stays at its default, since admission tries a whole prompt at once.
    """
    sizes = {"full": blocks}
    for group in spec.groups:
        bound = group.region.blocks_per_row(group.block_size, CHUNK, max_seq_len)
        sizes.setdefault(group.name, max(rows * bound, group.columns(max_seq_len)))
    return kv.plan(spec, num_blocks=sizes, max_seqs=rows, max_seq_len=max_seq_len)


def main() -> None:
    """Serve, report, check."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--max-new-tokens", type=int, default=160)
    parser.add_argument("--blocks", type=int, default=320, help="of the full-attention group")
    parser.add_argument("--steps", type=int, default=16, help="decode steps of a dispatch")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0, help="of the prompts and of the samples")
    parser.add_argument("--sample", type=int, default=8, help="requests to recompute")
    parser.add_argument("--out", type=Path, default=Path("build/block_map.png"))
    args = parser.parse_args()

    model = load()
    spec = cache_spec(model.config)
    plan = plan_of(spec, args.rows, args.blocks, model.config.context)
    print(plan)
    server = Server(model, spec, plan, args.seed, args.temperature)
    requests = [
        Request(i, len(p), min(len(p) + args.max_new_tokens, plan.max_seq_len), p.tolist())
        for i, p in enumerate(prompts.prompts(args.requests, args.seed))
    ]
    recorder = Recorder(plan)
    rate = serve(server, requests, args.steps, recorder)
    report(args, requests, rate, recorder)

    preempted = [r for r in requests if r.preempted]  # the likeliest to differ go first
    sample = (preempted + [r for r in requests if not r.preempted])[: args.sample]
    same = recomputed(model, sample, server.noise)
    print(f"checked: {same} of {len(sample)} requests equal a recomputation without a cache")
    if same < len(sample):
        sys.exit("the cached tokens differ from the recomputed ones")


def report(args: argparse.Namespace, requests: list[Request], rate: float, recorder) -> None:
    """Print some texts and the figures of the run, and draw the picture."""
    ended = [request for request in requests if request.tokens[-1] == END]
    print(f"\n{len(ended)} of {len(requests)} functions came to an end by themselves, such as")
    for request in ended[:4]:
        header = prompts.decode(np.array(request.tokens[: request.prompt]))
        written = prompts.decode(np.array(request.tokens[request.prompt :]))
        on, off = ("\033[36m", "\033[0m") if sys.stdout.isatty() else ("", "")
        print(f"\n--- request {request.index}\n{header}{on}{written}{off}")
    new = sum(len(r.tokens) - r.prompt for r in requests)
    print(f"\n{len(requests)} requests, {new:,} tokens written, {rate:,.0f} tokens per second")
    text = hashlib.sha256(repr([request.tokens for request in requests]).encode()).hexdigest()
    print(f"preempted: {sum(r.preempted for r in requests)}; digest of all text: {text[:12]}")
    for name, held, ideal in recorder.averages():
        print(f"blocks of {name}: {held:.1f} held on average, {ideal:.1f} ideally needed")
    print("traces: " + ", ".join(f"{name} {count}" for name, count in TRACES.items()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    recorder.draw(args.out)
    print(f"picture: {args.out}")


if __name__ == "__main__":
    main()
