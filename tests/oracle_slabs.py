"""Slabs in plain Python: which block each pool gets, one after the other, and what is left."""

from __future__ import annotations


class Slabs:
    """`count` slabs for pools with `per_slab` blocks in each; stacks are lists, the top last."""

    def __init__(self, count: int, per_slab: list[int]):
        self.per_slab = per_slab
        self.free = list(range(count))[::-1]
        self.open: list[list[int]] = [[] for _ in per_slab]
        self.used: list[set[int]] = [set() for _ in range(count)]
        self.owner: list[int | None] = [None] * count

    def needed(self, blocks: list[int]) -> list[int]:
        """New slabs for so many blocks of each pool."""
        spare = [self.spare(pool) for pool in range(len(blocks))]
        pools = zip(blocks, spare, self.per_slab, strict=True)
        return [-(-max(0, n - have) // each) for n, have, each in pools]

    def spare(self, pool: int) -> int:
        """Unused blocks in the slabs of a pool."""
        mine = [slab for slab, owner in enumerate(self.owner) if owner == pool]
        return sum(self.per_slab[pool] - len(self.used[slab]) for slab in mine)

    def take(self, which: list[int], wanted: list[bool]) -> list[int]:
        """Ids, -1 where not wanted; pools take new slabs in their order, lowest places first."""
        ids = [-1] * len(which)
        for pool, each in enumerate(self.per_slab):
            for k, (mine, asked) in enumerate(zip(which, wanted, strict=True)):
                if mine != pool or not asked:
                    continue
                if not self.open[pool]:
                    slab = self.free.pop()
                    self.owner[slab] = pool
                    self.open[pool].append(slab)
                slab = self.open[pool][-1]
                place = min(set(range(each)) - self.used[slab])
                self.used[slab].add(place)
                ids[k] = slab * each + place
                if len(self.used[slab]) == each:
                    self.open[pool].pop()
        return ids

    def give(self, which: list[int], ids: list[int], freed: list[bool]) -> None:
        """Takes blocks back; slabs move in the order of the lowest block that each lost."""
        lost: dict[tuple[int, int], list] = {}  # (pool, slab): (place, k) of its blocks
        for k, (pool, block, gone) in enumerate(zip(which, ids, freed, strict=True)):
            if gone:
                slab, place = divmod(block, self.per_slab[pool])
                lost.setdefault((pool, slab), []).append((place, k))
        in_order = sorted(lost, key=lambda pair: min(lost[pair])[1])
        for pool, each in enumerate(self.per_slab):
            mine = [slab for owner, slab in in_order if owner == pool]
            full = {slab for slab in mine if len(self.used[slab]) == each}
            for slab in mine:
                self.used[slab] -= {place for place, _ in lost[pool, slab]}
            empty = [slab for slab in mine if not self.used[slab]]
            self._restack(self.open[pool], [slab for slab in empty if slab not in full])
            self.open[pool] += [slab for slab in mine if slab in full and self.used[slab]]
            self.free += empty
            for slab in empty:
                self.owner[slab] = None

    @staticmethod
    def _restack(stack: list[int], closed: list[int]) -> None:
        """The closed slabs leave; of as many at the top those that stay fill the gaps below."""
        stop = len(stack) - len(closed)
        stay = [slab for slab in stack[stop:] if slab not in closed]
        gaps = [stack.index(slab) for slab in closed if stack.index(slab) < stop]
        for gap, slab in zip(gaps, stay, strict=True):
            stack[gap] = slab
        del stack[stop:]
