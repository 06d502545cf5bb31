"""How much of a trace's prompts a prefix cache finds with more and more host memory behind it.

A prompt is given as one id for each block of tokens. The bookkeeping is the real one of every verb,
cache and tier; there are no bytes.
"""

from pathlib import Path

import numpy as np
from tqdm import tqdm

import kvpool as kv
from kvpool.tiers import HostTier, PrefixTier
from prefix_books import BLOCK, Replay
from prefix_cache import requests_of, tokens_of
from reporting import Report

MODELS = ("qwen3-next-80b-a3b", "llama-3.1-8b")
BUDGET_GIB = 64
RATIOS = (0, 1, 4, 16)

Requests = list[tuple[list[int], int]]  # (block ids, tokens)


class TierReplay(Replay):
    """A `Replay` whose cache has `ratio` blocks of a host tier behind each of its own."""

    def __init__(self, name: str, longest: int, ratio: float):
        super().__init__(name, BUDGET_GIB << 30, longest, "independent")
        self.prefixes = PrefixTier(self.cache, HostTier.of_ratio(self.plan, ratio, simulated=True))

    def match(self, tokens: np.ndarray) -> kv.Hit:
        """What device and host have of a prompt, on the device by now."""
        self.state, _, hit = self.prefixes.match(self.state, None, tokens)
        return hit

    def insert(self, tokens: np.ndarray) -> None:
        """Publishes what the row has."""
        self.state, _ = self.prefixes.insert(self.state, None, tokens, 0)

    def evict(self, short, hit: kv.Hit | None) -> None:
        """Makes room for what is short; what goes comes to the host."""
        self.state, _ = self.prefixes.evict(self.state, None, short=short, protect=hit)


def chats(sessions: int, turns: int) -> Requests:
    """Each session comes back now and then with all it said, and a turn more."""
    random = np.random.default_rng(1)
    said: list[list[int]] = [[0, 1]] * sessions  # all begin with the same
    following, requests = 2, []
    for session in random.permutation(np.repeat(np.arange(sessions), turns)):
        more = int(random.integers(4, 20))
        said[session] = [*said[session], *range(following, following + more)]
        following += more
        requests.append((said[session], len(said[session]) * BLOCK - int(random.integers(BLOCK))))
    return requests


def traces(path: str | None, count: int) -> dict[str, Requests]:
    """The first `count` requests (0: all) of each trace at `path`, a file or a folder of .jsonl.

    None: generated ones.
    """
    if path is None:
        return {"generated chats": chats(300, 8)[: count or None]}
    files = sorted(Path(path).glob("*.jsonl")) if Path(path).is_dir() else [Path(path)]
    if not files:
        raise SystemExit(f"no .jsonl in {path}")
    return {file.stem: requests_of(str(file), count) for file in files}


def hit_ratios(report: Report, trace: str, requests: Requests, name: str) -> None:
    """Tokens found of one trace with each size of the host tier."""
    longest = -(-max(tokens for _, tokens in requests) // BLOCK) * BLOCK
    title = f"{trace}, {len(requests):,} requests, {name}, {BUDGET_GIB} GiB"
    for ratio in RATIOS:
        replay = TierReplay(name, longest, ratio)
        what = f"{title}, host {ratio:g} x"
        for ids, tokens in tqdm(requests, desc=what, leave=False):
            replay.serve(tokens_of(ids, tokens))
        kv.check(replay.state)
        replay.prefixes.check(replay.state)
        report.add(f"{what}: tokens found", replay.hit / replay.tokens, "of all")
        each = sum(replay.seconds.values()) / len(requests)
        report.add("  match, insert and evict of a request", each * 1e3, "ms")
        report.add("  blocks that came back", replay.prefixes.counts().promoted, "")
