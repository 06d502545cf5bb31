"""What the oracle keeps: groups, lengths, rows, and who holds which block.

Every question is answered by counting again; nothing is kept up to date beside the tables.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

ABSENT = None  # an id outside 0..N-1
UNHELD = "unheld"  # an id of the pool that nobody holds
WINDOWED = ("window", "chunk")


def cdiv(a: int, b: int) -> int:
    """The quotient a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True)
class Group:
    """One group: kind in all | window | chunk | state, its size, tokens a block, its pool."""

    name: str
    kind: str
    size: int
    block: int
    pool: str

    def first_read(self, n: int) -> int:
        """The first position that a query at n reads."""
        if self.kind == "window":
            return max(0, n - self.size + 1)
        return n // self.size * self.size if self.kind == "chunk" else 0

    def dead(self, n: int) -> int:
        """How many leading columns nobody reads any more once n tokens are settled."""
        return self.first_read(n) // self.block

    def bound(self, step: int) -> int:
        """The most blocks that one row can hold, for steps of `step` tokens."""
        return cdiv(self.size + step - 2, self.block) + 1


class Span(NamedTuple):
    """Lengths of a row: settled, reserved, and the gap a tail-only reserve leaves between."""

    n: int = 0
    room: int = 0
    solid: int = 0
    tail: int = 0

    @staticmethod
    def exact(n: int) -> Span:
        """A row with room for its settled tokens and no more."""
        return Span(n, n, n, n)


def columns(group: Group, span: Span) -> set[int]:
    """The columns that a row of these lengths holds: a closed form and nothing else."""
    if group.kind == "state":
        return {0} if span.room > 0 else set()
    first, last = group.dead(span.n), cdiv(span.room, group.block)
    if group.kind == "all" or span.solid == span.tail:
        return set(range(first, last))
    return set(range(first, cdiv(span.solid, group.block))) | set(
        range(group.dead(span.tail), last)
    )


@dataclass
class Row:
    """A live row: its lengths and, per group, the block in each column that it holds."""

    span: Span
    table: dict[str, dict[int, int]]


@dataclass
class Result:
    """What a verb answers; `copies` are owed."""

    status: list[str]
    ok: bool = True
    shortfall: dict[str, int] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    copies: dict[str, set] = field(default_factory=dict)
    blocks: dict[str, list] = field(default_factory=dict)

    @property
    def granted(self) -> list[bool]:
        return [s == "OK" for s in self.status]


class Ledger:
    """The rows and the pools; how blocks change hands, and who is granted."""

    def __init__(
        self, groups, pools: dict[str, int], rows, max_len, max_step, slabs=0, per_slab=()
    ):
        """`per_slab`: {pool: blocks in each of the `slabs`} of the pools that draw from them."""
        self.groups, self.pools = list(groups), dict(pools)
        self.slabs, self.per_slab = slabs, dict(per_slab)
        self.ids: dict[str, dict[int, int]] = {p: {} for p in pools}  # where held blocks lie
        self.max_len, self.max_step = max_len, max_step
        self.rows: list[Row | None] = [None] * rows
        self.retained = {p: Counter() for p in pools}
        self.never = defaultdict(set)  # block -> its places that were neither written nor copied
        self.fault = False
        self._next = 0

    # ---------------------------------------------------------------- what is held
    def holders(self, pool: str) -> Counter:
        """Block -> number of places that name it."""
        held = Counter(self.retained[pool])
        for row in filter(None, self.rows):
            for g in self.groups:
                if g.pool == pool:
                    held.update(row.table[g.name].values())
        return held

    def cached(self, pool: str) -> int:
        """Blocks that nobody but retains holds."""
        return sum(n == self.retained[pool][b] for b, n in (+self.holders(pool)).items())

    def spare(self, pool: str) -> int:
        """Blocks that nobody holds in the slabs of the pool: those with a block that is held."""
        lie = [self.ids[pool][block] // self.per_slab[pool] for block in +self.holders(pool)]
        return len(set(lie)) * self.per_slab[pool] - len(lie)

    def owned(self, pool: str) -> int:
        """Slabs in which a block of the pool lies that somebody holds."""
        return (self.spare(pool) + len(+self.holders(pool))) // self.per_slab[pool]

    def free_slabs(self) -> int:
        """Slabs without a block that somebody holds."""
        return self.slabs - sum(self.owned(pool) for pool in self.per_slab)

    def new_slabs(self, asked) -> dict[str, int]:
        """Pool -> slabs it must take for the blocks asked, pool -> blocks."""
        return {p: cdiv(max(0, asked[p] - self.spare(p)), k) for p, k in self.per_slab.items()}

    def free(self, slabs: dict[str, int] | None = None) -> dict[str, int]:
        """Pool -> blocks that it could get with so many slabs, None: all that are free."""
        free = {p: n - len(+self.holders(p)) for p, n in self.pools.items()}
        for pool, each in self.per_slab.items():
            count = self.free_slabs() if slabs is None else slabs[pool]
            free[pool] = self.spare(pool) + count * each
        return free

    def fit(self, asked, keep: int = 0) -> bool:
        """Whether the blocks asked can be had together, and `keep` of each pool after that."""
        wanted, free = Counter({p: asked[p] + keep for p in self.pools}), self.free()
        alone = all(wanted[p] <= free[p] for p in self.pools)
        return alone and sum(self.new_slabs(wanted).values()) <= self.free_slabs()

    def too_much(self, blocks) -> bool:
        """Whether the blocks, pool -> blocks, do not fit into the empty pools."""
        filled = sum(cdiv(blocks[p], each) for p, each in self.per_slab.items())
        return filled > self.slabs or any(blocks[p] > n for p, n in self.pools.items())

    def shortfall(self, asked) -> dict[str, int]:
        """Group -> blocks that its pool lacks of those asked when the others are served first."""
        new = self.new_slabs(asked)
        left = {p: max(0, self.free_slabs() - sum(new.values()) + new[p]) for p in new}
        free = self.free(left)
        return {g.name: max(0, asked[g.pool] - free[g.pool]) for g in self.groups}

    def span(self, r: int) -> Span:
        """Lengths of row r; a free row counts as empty."""
        return self.rows[r].span if self.rows[r] else Span()

    def _inside(self, r: int) -> bool:
        return 0 <= r < len(self.rows)

    def _take(self) -> int:
        self._next += 1
        return self._next

    def _settle(self, row: Row, span: Span) -> None:
        """Gives the row these lengths: takes what it lacks, gives back what is not held."""
        row.span = span
        for g in self.groups:
            table, want = row.table[g.name], columns(g, span)
            row.table[g.name] = {c: table[c] if c in table else self._take() for c in sorted(want)}

    # ---------------------------------------------------------------- who is granted
    def _serve(self, own: list[str | None], needs: list[Counter], each: bool = True) -> Result:
        """Statuses from each row's own fault (None: well-formed) and blocks asked per pool."""
        asked: Counter = Counter()
        status = list(own)
        for i, fault in enumerate(own):
            if fault is None:
                asked.update(needs[i])
                fits = self.fit(asked)
                status[i] = "OK" if fits or not +needs[i] else "OUT_OF_BLOCKS"
        short = self.shortfall(asked)
        assert self.fit(asked) == (not any(short.values()))
        if not each:
            fits = self.fit(asked)
            faulty = any(f not in (None, "SKIPPED") for f in own)
            word = "OUT_OF_BLOCKS" if not fits else "HELD_BACK" if faulty else "OK"
            status = [word if f is None else f for f in own]
        result = Result(status, all(s in ("OK", "SKIPPED") for s in status), short)
        result.cached = {g.name: self.cached(g.pool) for g in self.groups}
        result.copies = {g.name: set() for g in self.groups}
        return result

    def _goes_on(self, block, place: int, source=ABSENT) -> None:
        """A row writes on in `block` from `place`; what comes before is what `source` has of it."""
        before = set(range(place))
        self.never[block] = before if source in (ABSENT, UNHELD) else before & self.never[source]

    def _readable(self, g: Group, length: int, blocks: dict) -> bool:
        """Whether blocks {column: block} have every position that a query at `length` reads."""
        if g.kind == "state":
            return length == 0 or blocks.get(0, ABSENT) not in (ABSENT, UNHELD)
        return all(
            blocks.get(p // g.block, ABSENT) not in (ABSENT, UNHELD)
            and p % g.block not in self.never[blocks[p // g.block]]
            for p in range(g.first_read(length), length)
        )

    def _own_blocks(self, n: int) -> Counter:
        """Blocks that cannot be shared at length n: half-full tails and states."""
        return Counter(g.pool for g in self.groups if n > 0 and (g.kind == "state" or n % g.block))

    def _place(self, r, length, blocks, result) -> None:
        """Row r starts at `length` from these blocks; copies what must be its own."""
        row = self.rows[r] = Row(Span.exact(length), {g.name: {} for g in self.groups})
        for g in self.groups:
            ids = blocks.get(g.name, [])
            for c in sorted(columns(g, row.span)):
                src = ids[c] if c < len(ids) else ABSENT
                if g.kind != "state" and c < length // g.block:
                    row.table[g.name][c] = src
                    continue
                row.table[g.name][c] = own = self._take()
                self._goes_on(own, 0 if g.kind == "state" else length % g.block, src)
                if src not in (ABSENT, UNHELD):
                    result.copies[g.name].add((src, own))

    def _gaps(self, span: Span) -> list[Group]:
        """The groups in which these lengths leave columns out."""
        return [
            g
            for g in self.groups
            if g.kind in WINDOWED and cdiv(span.solid, g.block) < g.dead(span.tail)
        ]

    def _grown(self, s: Span, t: int, tail_only: bool) -> Span:
        """Lengths with room for t tokens."""
        t = min(t, 4 * self.max_len)  # absurd lengths are refused before anything is made of them
        if not tail_only:
            top = max(t, s.room)
            return s if t <= s.solid else Span(s.n, top, top, top)
        if s.solid < t < s.tail:
            return Span(s.n, s.room, s.room, s.room)  # a query there reads what the gap lacks
        if t <= s.room:
            return s
        if s.solid < s.tail:
            return s._replace(room=t)
        gapped = Span(s.n, t, s.room, t)
        return gapped if self._gaps(gapped) else Span(s.n, t, t, t)
