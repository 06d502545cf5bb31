"""A plain-Python model of the bookkeeping: lists, dicts and whole numbers, one row after the other.

Blocks are numbered in the order in which they are handed out and never used again, so the model
says nothing about which id an allocator picks: whoever compares keeps a bijection per pool.
Statuses are the names of `kv.Status`. Nothing here is fast, and nothing imports kvpool.
"""

from __future__ import annotations

from collections import Counter

from oracle_ledger import ABSENT, UNHELD, WINDOWED, Group, Ledger, Result, Row, Span, cdiv, columns

__all__ = ["ABSENT", "UNHELD", "Group", "Oracle", "Result", "Row", "Span", "cdiv", "columns"]


class Oracle(Ledger):
    """The verbs. Rows are ints, ids are the model's blocks, ABSENT or UNHELD."""

    def admit(self, rows, lengths=None, blocks=None) -> Result:
        """`lengths[i]`, `blocks[i] = {group: [block | ABSENT | UNHELD, ...]}` for a prefix."""
        own, needs, named = [], [], set()
        for i, r in enumerate(rows):
            length = lengths[i] if lengths else 0
            fault = self._admit_fault(r, length, blocks[i] if blocks else {}, named)
            if fault != "SKIPPED":
                named.add(r)
            own.append(fault)
            needs.append(self._own_blocks(length) if fault is None else Counter())
        result = self._serve(own, needs)
        for i, r in enumerate(rows):
            if result.granted[i]:
                self._place(r, lengths[i] if lengths else 0, blocks[i] if blocks else {}, result)
        return result

    def _admit_fault(self, r, length, blocks, named) -> str | None:
        if r == -1 or length < 0:
            return "SKIPPED"
        if not self._inside(r):
            return "BAD_ARGUMENT"
        if self.rows[r] or r in named:
            return "BUSY"
        if length > self.max_len:
            return "TOO_LONG"
        for g in self.groups:
            if not self._readable(g, length, dict(enumerate(blocks.get(g.name, [])))):
                return "UNREACHABLE"
        return None

    def reserve(self, num, each: bool = False, tail_only: bool = False) -> Result:
        own, needs, spans = [], [], []
        for r, k in enumerate(num):
            span = self._grown(self.span(r), self.span(r).n + k, tail_only)
            spans.append(span)
            need = Counter()
            for g in self.groups:
                held = self.rows[r].table[g.name] if self.rows[r] else {}
                need[g.pool] += len(columns(g, span) - set(held)) if k > 0 else 0
            fault = self._reserve_fault(r, k, span)
            own.append(fault)
            needs.append(need)
        result = self._serve(own, needs, each)
        for r, granted in enumerate(result.granted):
            if granted:
                self._settle(self.rows[r], spans[r])
        return result

    def _reserve_fault(self, r: int, k: int, span: Span) -> str | None:
        if k <= 0:
            return "SKIPPED"
        if self.rows[r] is None:
            return "FREE_ROW"
        if span.n + k > self.max_len:
            return "TOO_LONG"
        if k > self.max_step:
            return "STEP_TOO_LONG"
        total = Counter()
        for g in self.groups:
            total[g.pool] += len(columns(g, span))
        return "NEVER" if self.too_much(total) else None

    def advance(self, num) -> None:
        for r, k in enumerate(num):
            if k <= 0:
                continue
            s = self.span(r)
            if self.rows[r] is None or s.n + k > s.room:
                self.fault = True
            elif s.n + k <= s.solid:
                self._settle(self.rows[r], s._replace(n=s.n + k))
            elif all(g.dead(s.n + k) >= g.dead(s.tail) for g in self._gaps(s)):
                self._settle(self.rows[r], Span(s.n + k, s.room, s.room, s.room))
            else:
                self.fault = True

    def truncate(self, lens) -> Result:
        own = [self._truncate_fault(r, m) for r, m in enumerate(lens)]
        fresh = [self._cuts(r, m) if own[r] is None else {} for r, m in enumerate(lens)]
        needs = [Counter(g.pool for g in self.groups if g.name in f) for f in fresh]
        result = self._serve(own, needs)
        for r, m in enumerate(lens):
            if not result.granted[r]:
                continue
            for g in self.groups:
                table, c = self.rows[r].table[g.name], m // g.block
                if g.name in fresh[r]:
                    old, table[c] = table.get(c, ABSENT), self._take()
                    self._goes_on(table[c], m % g.block, old)
                    if old is not ABSENT:
                        result.copies[g.name].add((old, table[c]))
                elif g.kind != "state" and m % g.block:
                    self._goes_on(table[c], m % g.block, table[c])
            self._settle(self.rows[r], Span.exact(m))
        return result

    def _truncate_fault(self, r: int, m: int) -> str | None:
        s = self.span(r)
        if m < 0 or (m == 0 and self.rows[r] is None):
            return "SKIPPED"
        if self.rows[r] is None:
            return "FREE_ROW"
        if m > s.n:
            return "BAD_ARGUMENT"
        for g in self.groups:
            lost = g.kind == "state" and 0 < m < s.n
            if lost or not self._readable(g, m, self.rows[r].table[g.name]):
                return "UNREACHABLE"
        return None

    def _cuts(self, r: int, m: int) -> dict[str, int]:
        """Group -> tail column for which a cut at m needs a block of its own."""
        out = {}
        for g in self.groups:
            if g.kind != "state" and m % g.block:
                c = m // g.block
                block = self.rows[r].table[g.name].get(c)
                if block is None or self.holders(g.pool)[block] > 1:
                    out[g.name] = c
        return out

    def fork(self, src, dst) -> Result:
        own, named = [], set()
        for s, d in zip(src, dst, strict=True):
            own.append(self._fork_fault(s, d, named))
            if own[-1] != "SKIPPED":
                named.add(d)
        spans = [self.span(s) if f is None else Span() for s, f in zip(src, own, strict=True)]
        result = self._serve(own, [self._own_blocks(s.n) for s in spans])
        for s, d, granted in zip(src, dst, result.granted, strict=True):
            if granted:
                n = self.rows[s].span.n
                blocks = {
                    name: [t.get(c, ABSENT) for c in range(max(t, default=-1) + 1)]
                    for name, t in self.rows[s].table.items()
                }
                self._place(d, n, blocks, result)
        return result

    def _fork_fault(self, s: int, d: int, named: set) -> str | None:
        if s == -1 or d == -1:
            return "SKIPPED"
        if not self._inside(s):
            return "BAD_ARGUMENT"
        if self.rows[s] is None:
            return "FREE_ROW"
        if not self._inside(d):
            return "BAD_ARGUMENT"
        return "BUSY" if self.rows[d] or d in named or d == s else None

    def snapshot(self, rows) -> Result:
        own, named = [], set()
        for r in rows:
            fault = "SKIPPED" if r == -1 else None if self._inside(r) else "BAD_ARGUMENT"
            if fault is None:
                fault = "FREE_ROW" if self.rows[r] is None else "BUSY" if r in named else None
            named.add(r)
            own.append(fault)
        states = [g for g in self.groups if g.kind == "state"]
        needs = [
            Counter(g.pool for g in states if own[i] is None and self.span(r).n > 0)
            for i, r in enumerate(rows)
        ]
        result = self._serve(own, needs)
        result.blocks = {g.name: [ABSENT] * len(rows) for g in states}
        for i, r in enumerate(rows):
            for g in states if result.granted[i] and self.span(r).n else []:
                result.blocks[g.name][i] = new = self._take()
                self.retained[g.pool][new] += 1
                result.copies[g.name].add((self.rows[r].table[g.name][0], new))
        return result

    def release(self, rows) -> None:
        for r in rows:
            if r == -1:
                continue
            if not self._inside(r) or self.rows[r] is None:
                self.fault = True
            else:
                self.rows[r] = None

    def retain(self, ids: dict[str, list]) -> None:
        for g in self.groups:
            held = self.holders(g.pool)
            for block in ids.get(g.name, []):
                if block is not ABSENT and held[block] == 0:
                    self.fault = True
                elif block is not ABSENT:
                    self.retained[g.pool][block] += 1

    def drop(self, ids: dict[str, list]) -> None:
        for g in self.groups:
            for block in ids.get(g.name, []):
                if block is not ABSENT and self.retained[g.pool][block] == 0:
                    self.fault = True
                elif block is not ABSENT:
                    self.retained[g.pool][block] -= 1

    def fits(self, num, keep_free: int = 0) -> list[str]:
        """OK, LATER or NEVER per row."""
        return [self._fits(r, k, keep_free) for r, k in enumerate(num)]

    def _fits(self, r: int, k: int, keep_free: int) -> str:
        s, need, top = self.span(r), Counter(), Counter()
        if k <= 0:
            return "OK"
        if s.n + k > self.max_len:
            return "NEVER"
        for g in self.groups:
            held = len(self.rows[r].table[g.name]) if self.rows[r] else 0
            want = len(columns(g, self._grown(s, s.n + k, False)))
            if g.kind in WINDOWED and k > self.max_step:
                want = max(held, min(cdiv(s.n + k, g.block) - g.dead(s.n), g.bound(self.max_step)))
            need[g.pool] += want - held
            top[g.pool] += len(columns(g, Span.exact(s.n + k)))
        if self.too_much(top):
            return "NEVER"
        if not self.too_much(need + self._held(r)):
            return "OK" if self.fit(need, keep_free) else "LATER"
        # Steps of that size never fit; a token at a time may.
        begin = s.n or self.max_step
        path = [Span(m, m + 1, m + 1, m + 1) for m in range(begin, s.n + k)]
        if any(self.too_much(self._on_the_way(span, s.n + k)) for span in path):
            return "NEVER"
        fits = all(
            self.fit(self._more(r, span), keep_free) for span in (*path, Span.exact(s.n + k))
        )
        return "OK" if fits else "LATER"

    def _held(self, r: int) -> Counter:
        held: Counter = Counter()
        for g in self.groups:
            held[g.pool] += len(self.rows[r].table[g.name]) if self.rows[r] else 0
        return held

    def _on_the_way(self, span: Span, target: int) -> Counter:
        """What no way to the target can do without: a chunk's begin and W = 1 hold nothing."""
        least: Counter = Counter()
        for g in self.groups:
            passable = g.kind == "chunk" or (g.kind == "window" and g.size == 1)
            least[g.pool] += len(columns(g, Span.exact(target) if passable else span))
        return least

    def _more(self, r: int, span: Span) -> Counter:
        more: Counter = Counter()
        for g in self.groups:
            held = len(self.rows[r].table[g.name]) if self.rows[r] else 0
            more[g.pool] += max(0, len(columns(g, span)) - held)
        return more

    def clear_faults(self) -> None:
        self.fault = False
