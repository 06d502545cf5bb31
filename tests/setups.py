"""Small caches for tests, as kvpool and the oracle know them."""

from __future__ import annotations

import dataclasses
import functools

from oracle import Group, Oracle, cdiv

import kvpool as kv


@dataclasses.dataclass(frozen=True)
class Setup:
    """A cache of one layer per kind: "all", ("window", W), ("chunk", C), ("comp", r), "state".

    `blocks` are explicit counts. Groups with None there share what fits into `memory` bytes; which
    have how many `heads` decides about the bytes of their blocks. Of "all" heads are keys' and
    values', of the other kinds the same or entries four times as long.
    """

    kinds: tuple
    blocks: tuple
    block: int = 2
    rows: int = 3
    max_len: int = 24
    step: int = 6
    dtype: str = "float32"
    pooling: str = "independent"
    memory: int | None = None
    slab: int | None = None
    heads: tuple | None = None

    @functools.cached_property
    def spec(self) -> kv.CacheSpec:
        layers = [self._region(*layer) for layer in zip(self.kinds, self._heads, strict=True)]
        return kv.CacheSpec.from_layers(layers, self.block, self.pooling)

    @property
    def _heads(self) -> tuple:
        return self.heads or (1,) * len(self.kinds)

    def shapes(self, layer: int) -> dict[str, tuple]:
        """The shape of an entry of each buffer."""
        kind, heads = self.kinds[layer], self._heads[layer]
        if kind == "state":
            return {"sum": (2 * heads,)}
        if kind[0] == "comp":
            return {"entry": (4 * heads,)}
        return {"k": (heads, 4), "v": (heads, 4)}

    def _region(self, kind, heads):
        if kind == "all":
            return kv.FullAttention(heads, 4, dtype=self.dtype)
        if kind == "state":
            return kv.RecurrentState({"sum": ((2 * heads,), "float32")})
        name, size = kind
        if name == "comp":
            return kv.Compressed(size, 4 * heads, dtype=self.dtype)
        make = {"window": kv.SlidingWindow, "chunk": kv.ChunkedLocal}[name]
        return make(size, heads, 4, dtype=self.dtype)

    @functools.cached_property
    def plan(self) -> kv.Plan:
        counts = {self.group(i): n for i, n in enumerate(self.blocks) if n is not None}
        sharing = {}
        if self.memory is not None:
            sharing = {"budget_bytes": self.memory, "charge_explicit": False}
        return kv.plan(
            self.spec,
            num_blocks=counts,
            max_seqs=self.rows,
            max_seq_len=self.max_len,
            max_step_tokens=self.step,
            slab_bytes=self.slab,
            **sharing,
        )

    def group(self, layer: int) -> str:
        """Name of the layer's group, by the naming rule and not by asking."""
        kind = self.kinds[layer]
        if isinstance(kind, str):
            return {"all": "full", "state": "state"}[kind]
        return {"comp": "compressed"}.get(kind[0], kind[0]) + str(kind[1])

    def oracle(self) -> Oracle:
        """The model of this cache; which groups share a pool, and its size, is the plan's."""
        groups, plan = [], self.plan
        for i, kind in enumerate(self.kinds):
            name, size = (kind, 0) if isinstance(kind, str) else kind
            ratio = size if name == "comp" else 1
            tokens = cdiv(self.block, ratio) * ratio
            pool = self.group(plan.pool_of.index(plan.pool_of[i]))
            groups.append(
                Group(self.group(i), "all" if name == "comp" else name, size, tokens, pool)
            )
        pools = {g.pool: n for g, n in zip(groups, plan.blocks, strict=True)}
        per_slab = {g.pool: k for g, k in zip(groups, plan.per_slab, strict=False) if k}
        return Oracle(groups, pools, self.rows, self.max_len, self.step, plan.slabs, per_slab)


# Every setup is compiled for anew, so the tests share these where the numbers allow it.
PLAIN = Setup(("all",), (12,), block=4, rows=4, max_len=24, step=12)
SMALL = Setup(("all",), (4,), block=4, rows=6, max_len=24, step=24)
MIXED = Setup(("all", ("window", 4), "state"), (12, 9, 6), block=2, max_len=18, step=5)
