"""Chats with a common system prompt, with and without a prefix cache: one text, less to compute.

    python examples/shared_prompts.py
    python examples/shared_prompts.py --blocks 144     # too few to keep every chat: some is evicted

Every chat begins with the same system prompt and goes through several turns: a function's header
comes in, the model writes on, and the next header comes after that. A turn is a request of its own,
whose prompt is all that was said so far. Without a cache all of it is computed again; with one, a
request begins with what others, and its own earlier turns, have published.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import kvpool as kv
import prompts
from paged_memory import NONE, cache_spec, chunk_step
from tiny_model import END, TinyModel, load

CHUNK = 64  # most tokens of a row in one prefill step

copy_blocks = functools.partial(jax.jit, donate_argnums=0)(kv.copy_blocks)


@dataclasses.dataclass(eq=False)
class Chat:
    """What was said so far, and the headers that are still to come."""

    index: int
    tokens: list[int]
    headers: list[list[int]]
    settled: int = 0  # tokens in the cache of the row that computes the present turn
    stops: tuple[int, ...] = ()  # where that row is to be published
    limit: int = 0  # of tokens, for this turn's answer

    def next_turn(self, answer: int) -> None:
        """The next header comes in, and up to `answer` tokens are to be written."""
        self.tokens += self.headers.pop(0)
        self.settled, self.limit = 0, len(self.tokens) + answer

    @property
    def answered(self) -> bool:
        """Whether this turn is done."""
        return len(self.tokens) >= self.limit or self.tokens[-1] == END


class Server:
    """Rows, chats that wait for one, and a prefix cache or none."""

    def __init__(self, model: TinyModel, plan: kv.Plan, use_cache: bool):
        self.graph, self.params = nnx.split(model)
        self.spec = plan.spec
        self.state, self.storage = kv.init(self.spec, plan)
        self.cache = kv.PrefixCache(self.spec, plan, model="tiny") if use_cache else None
        self.rows: list[Chat | None] = [None] * plan.max_seqs
        self.waiting: collections.deque[Chat] = collections.deque()
        self.computed = 0  # tokens that went through the model

    def admit(self) -> None:
        """Gives free rows to waiting chats, each at the end of what is cached of its tokens."""
        for row in [row for row, chat in enumerate(self.rows) if chat is None]:
            if not self.waiting:
                return
            chat = self.waiting[0]
            hit = self.cache.match(chat.tokens) if self.cache else None
            prefix = hit.prefix if hit else None
            state, result = kv.admit(self.state, [row], prefix)
            if not result.ok and self.cache:
                self.state, _ = self.cache.evict(self.state, short=result.shortfall, protect=hit)
                state, result = kv.admit(self.state, [row], prefix)
            if not result.ok:
                return
            self.state, self.storage = state, copy_blocks(self.storage, result.copies)
            self.rows[row] = self.waiting.popleft()
            chat.settled, chat.stops = (hit.length, hit.stops) if hit else (0, ())

    def step(self) -> None:
        """One dispatch: a chunk for rows with a prompt to run, a token for the others."""
        counts = np.array([self._count(chat) for chat in self.rows], np.int32)
        if self.cache:
            _, result = kv.reserve(self.state, counts, each=True)
            if not result.ok:
                self.state, _ = self.cache.evict(self.state, short=result.shortfall)
        tokens = np.zeros((len(counts), CHUNK if counts.max() > 1 else 1), np.int32)
        chooses = np.zeros(len(counts), bool)
        for row, chat in self._active():
            known = chat.tokens[chat.settled : chat.settled + counts[row]]
            tokens[row, : len(known)] = known
            chooses[row] = chat.settled + counts[row] == len(chat.tokens)
        sampling = (np.zeros(len(counts), np.int32), jnp.int32(0), jnp.float32(0))
        self.state, self.storage, granted, chosen = chunk_step(
            self.graph, self.spec, self.params, self.state, self.storage,
            tokens, counts, chooses, sampling,
        )  # fmt: skip
        granted, chosen = jax.device_get((granted, chosen))
        if not granted.any():
            sys.exit("no row can go on: give more --blocks")
        for row, chat in self._active():
            if granted[row]:
                chat.settled += int(counts[row])
                self.computed += int(counts[row])
                chat.tokens += [int(chosen[row])] * int(chosen[row] != NONE)
                self._publish(row, chat)

    def _count(self, chat: Chat | None) -> int:
        """Tokens of the next step, which ends where the row is to be published."""
        if chat is None:
            return 0
        stop = next((stop for stop in chat.stops if stop > chat.settled), len(chat.tokens))
        return min(stop - chat.settled, CHUNK)

    def _publish(self, row: int, chat: Chat) -> None:
        """Puts a row into the cache at its stops and at its end, where it is released."""
        if self.cache and (chat.settled in chat.stops or chat.answered):
            self.state, self.storage = self.cache.insert(self.state, self.storage, chat.tokens, row)
        if chat.answered:
            self.state = kv.release(self.state, [row])
            self.rows[row] = None

    def _active(self) -> list[tuple[int, Chat]]:
        return [(row, chat) for row, chat in enumerate(self.rows) if chat]


def converse(server: Server, system: list[int], chats: list[Chat], answer: int) -> float:
    """Runs all turns of all chats, and gives the seconds it took."""
    begin = time.perf_counter()
    warm_up = Chat(-1, [], [system])
    warm_up.next_turn(1)  # computes the system prompt once, before anyone asks
    run(server, [warm_up])
    if server.cache:
        server.cache.pin(system)
    while any(chat.headers for chat in chats):
        asking = [chat for chat in chats if chat.headers]
        for chat in asking:
            chat.next_turn(answer)
        run(server, asking)
    kv.check(server.state)
    return time.perf_counter() - begin


def run(server: Server, chats: list[Chat]) -> None:
    """Runs one turn of each chat to its end."""
    server.waiting.extend(chats)
    while server.waiting or any(server.rows):
        server.admit()
        server.step()


def new_chats(count: int, turns: int, system: list[int]) -> list[Chat]:
    """Chats whose headers no two of them share."""
    headers = [h.tolist() for h in prompts.prompts(count * turns, shortest=30, longest=70)]
    parts = [headers[index * turns : (index + 1) * turns] for index in range(count)]
    return [Chat(index, list(system), part) for index, part in enumerate(parts)]


def main() -> None:
    """Converse with and without a cache, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chats", type=int, default=8)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--answer", type=int, default=32, help="most tokens of an answer")
    parser.add_argument("--blocks", type=int, default=256, help="of each attention group")
    parser.add_argument("--snapshots", type=int, default=64, help="of the recurrent states")
    args = parser.parse_args()

    model = load()
    spec = cache_spec(model.config)
    blocks = {
        group.name: args.rows + args.snapshots if group.is_state else args.blocks
        for group in spec.groups
    }
    limits = {"max_seqs": args.rows, "max_seq_len": model.config.context, "max_step_tokens": CHUNK}
    plan = kv.plan(spec, num_blocks=blocks, **limits)
    print(plan)
    system = prompts.prompts(1, shortest=120, longest=160)[0].tolist()
    texts, computed = {}, {}
    for use_cache in (False, True):
        server = Server(model, plan, use_cache)
        chats = new_chats(args.chats, args.turns, system)
        seconds = converse(server, system, chats, args.answer)
        texts[use_cache] = [chat.tokens for chat in chats]
        computed[use_cache] = server.computed
        name = "with a prefix cache" if use_cache else "without"
        print(f"{name}: {server.computed:,} tokens computed, {seconds:.1f} s with compiling")
    report(server.cache, texts, computed)


def report(cache: kv.PrefixCache, texts: dict, computed: dict) -> None:
    """Prints the end of a chat and what the cache did."""
    print(f"\n--- the end of a chat\n{prompts.decode(np.array(texts[True][0][-160:]))}\n---\n")
    stats = cache.stats()
    print(f"{stats.hits} of {stats.matches} requests hit,", end=" ")
    print(f"{stats.tokens_hit:,} of {stats.tokens:,} tokens")
    for group, held in stats.held.items():
        print(f"{group}: {held} blocks cached, {stats.removed[group]} evicted")
    print(f"tokens computed: {computed[True]:,} instead of {computed[False]:,}")
    same = sum(a == b for a, b in zip(texts[True], texts[False], strict=True))
    print(f"checked: {same} of {len(texts[True])} chats have the same text without a cache")
    if same < len(texts[True]):
        sys.exit("the texts differ")


if __name__ == "__main__":
    main()
