"""The best fixed split of a budget among the groups, for traffic that is known."""

import dataclasses

import numpy as np

import kvpool as kv
from kvpool.needs import block_bytes
from memory_books import ModelBooks
from memory_replay import Clock, replay
from memory_traffic import Traffic

QUANTILES = (0.5, 0.75, 0.9, 0.99)
STEPS = (0.1, 0.03)  # by how much of itself a group's share is changed in the search


def best_split(spec: kv.CacheSpec, traffic: Traffic, budget: int, clock: Clock, limits: dict):
    """The plan of fixed pools in which the most of these requests run at a time.

    It begins with `kv.plan(request_tokens=...)` for lengths of the traffic, and with the shares of
    the memory that the groups take where any free byte serves anyone, serves the traffic with each,
    and then changes the shares of the best, one group's at a time, for as long as that helps.
    Groups that share a pool get together what the others leave.

    Args:
      limits: max_seqs, max_seq_len and max_step_tokens.

    Raises:
      kv.SpecError: where no split serves a request of middling length.
    """
    search = _Search(spec, traffic, budget, clock, limits)
    for tokens in np.quantile(traffic.prompts + traffic.outputs, QUANTILES):
        search.try_length(int(tokens))
    for shares in search.taken_of_the_bound():
        search.try_shares(shares)
    for step in STEPS:
        search.improve(step)
    return search.best


@dataclasses.dataclass
class _Search:
    """The best plan so far, and what it is judged by."""

    spec: kv.CacheSpec
    traffic: Traffic
    budget: int
    clock: Clock
    limits: dict
    best: kv.Plan | None = None
    most: float = float("-inf")
    tried: set[tuple] = dataclasses.field(default_factory=set)

    def _try(self, plan: kv.Plan) -> bool:
        """Whether the plan serves the traffic better than the best one, which it then replaces."""
        about = tuple(np.round(np.log(plan.blocks), 3).tolist())
        if about in self.tried:  # a change taken back, or the like change of the other group
            return False
        self.tried.add(about)
        run = replay(ModelBooks.of(plan), self.traffic, self.spec.groups, self.clock, plan.max_seqs)
        value = run.concurrency - 1e6 * run.rejected
        if self.best is not None and value <= self.most + 1e-3 * abs(self.most):
            return False
        self.best, self.most = plan, value
        return True

    def try_length(self, tokens: int) -> None:
        """The split for requests of one length."""
        limits = {"request_tokens": tokens, "tail_only": True, **self.limits}
        try:
            self._try(kv.plan(self.spec, self.budget, **limits))
        except kv.SpecError:
            if self.best is None:  # the shortest of them: longer ones may be too long for a split
                raise

    def taken_of_the_bound(self) -> np.ndarray:
        """Bytes f64[quantiles, G] that the groups hold where any free byte serves anyone."""
        groups, rows = self.spec.groups, self.limits["max_seqs"]
        books = ModelBooks.bound(groups, self.budget, rows, self.clock.chunk)
        run = replay(books, self.traffic, groups, self.clock, rows)
        return np.quantile(run.held[run.loaded], QUANTILES, axis=0)

    def try_shares(self, shares: np.ndarray) -> bool:
        """The budget split in proportion to f64[G]."""
        groups, pools = self.spec.groups, self.best.pool_of
        blocks = shares / shares.sum() * self.budget // block_bytes(groups)
        counts = {
            group.name: int(count)
            for group, count, pool in zip(groups, blocks, pools, strict=True)
            if pools.count(pool) == 1
        }
        rest = {} if len(counts) == len(groups) else {"charge_explicit": True}
        try:
            plan = kv.plan(self.spec, self.budget, num_blocks=counts, **rest, **self.limits)
        except kv.SpecError:  # a group gets too little for one row
            return False
        return self._try(plan)

    def improve(self, step: float) -> None:
        """Changes one group's share at a time, up or down by `step`, until nothing helps."""
        better = True
        while better:
            better = False
            for group in range(len(self.spec.groups)):
                for factor in (1 + step, 1 / (1 + step)):
                    shares = block_bytes(self.spec.groups) * np.array(self.best.blocks, float)
                    shares[group] *= factor
                    better |= self.try_shares(shares)
