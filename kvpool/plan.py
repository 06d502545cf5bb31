"""Plan: how many blocks each group gets, and the sizes of the state that follow from it."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvpool import plan_checks, schema
from kvpool.group import Group
from kvpool.needs import bytes_of, largest, prefill_blocks
from kvpool.plan_text import describe
from kvpool.regions import positive, token_count
from kvpool.spec import CacheSpec


class Peak(NamedTuple):
    """The moment of a prefill at which a row holds the most bytes."""

    total_bytes: int
    blocks: dict[str, int]  # {group name: blocks held then}
    settled: int  # tokens settled before the step in question


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """Block counts and row limits for a spec.  Build with `plan`.

    `blocks` are counts per group, in the order of `spec.groups`. `pool_of` names the pool of each
    group: groups with the same number draw from the same blocks. `kept` are the blocks of each pool
    that admission is to leave free for the rows that run; none where it is empty.

    Pools of an elastic cache draw from one array of `slabs` of `slab_bytes`; `per_slab` says for
    each group how many of its blocks a slab holds, 0 for a group with memory of its own. The blocks
    of such a pool are those it has if it gets every slab: block id = slab * per_slab + place.
    """

    spec: CacheSpec
    blocks: tuple[int, ...]
    max_seqs: int
    max_seq_len: int
    max_step_tokens: int
    snapshots: int
    pool_of: tuple[int, ...]
    kept: tuple[int, ...] = ()
    slabs: int = 0
    slab_bytes: int = 0
    per_slab: tuple[int, ...] = ()

    @property
    def num_blocks(self) -> dict[str, int]:
        """{group name: blocks}."""
        return {g.name: n for g, n in zip(self.spec.groups, self.blocks, strict=True)}

    @functools.cached_property
    def pool_sizes(self) -> tuple[int, ...]:
        """Blocks of each pool."""
        return tuple(dict(zip(self.pool_of, self.blocks, strict=True)).values())

    @functools.cached_property
    def pool_per_slab(self) -> tuple[int, ...]:
        """Blocks of each pool in a slab; 0 for a pool with memory of its own."""
        per_slab = self.per_slab or (0,) * len(self.pool_of)
        return tuple(dict(zip(self.pool_of, per_slab, strict=True)).values())

    @functools.cached_property
    def array_of(self) -> tuple[int, ...]:
        """The block array that each group lives in: one for all slabs, one for each other pool."""
        homes = [-1 if self.pool_per_slab[pool] else pool for pool in self.pool_of]
        numbers = {home: number for number, home in enumerate(dict.fromkeys(homes))}
        return tuple(numbers[home] for home in homes)

    @functools.cached_property
    def slab_array(self) -> int | None:
        """The block array that is cut into slabs, None where there is none."""
        homes = zip(self.array_of, self.pool_of, strict=True)
        return next((array for array, pool in homes if self.pool_per_slab[pool]), None)

    @functools.cached_property
    def array_rows(self) -> tuple[int, ...]:
        """Rows of each block array: slabs, or blocks of its pool."""
        rows: dict[int, int] = {}
        for pool, array, blocks in zip(self.pool_of, self.array_of, self.blocks, strict=True):
            rows[array] = self.slabs if self.pool_per_slab[pool] else blocks
        return tuple(rows.values())

    @functools.cached_property
    def array_bytes(self) -> tuple[int, ...]:
        """Bytes of a row of each block array: the slab, or the largest block of its groups."""
        sizes: dict[int, int] = {}
        for group, pool, array in zip(self.spec.groups, self.pool_of, self.array_of, strict=True):
            size = self.slab_bytes if self.pool_per_slab[pool] else group.bytes_per_block
            sizes[array] = max(size, sizes.get(array, 0))
        return tuple(sizes.values())

    @functools.cached_property
    def per_row(self) -> tuple[int, ...]:
        """Blocks of each group in a row of its array: 1, or those of a slab."""
        return tuple(self.pool_per_slab[pool] or 1 for pool in self.pool_of)

    def row_bytes(self, group: Group) -> int:
        """Bytes that a block of a group with memory of its own takes, the unused ones included."""
        return self.array_bytes[self.array_of[self.spec.groups.index(group)]]

    def by_pool(self, blocks: Sequence[int]) -> list[int]:
        """So many blocks of each group summed over the groups of each pool."""
        sums = [0] * len(self.pool_per_slab)
        for pool, count in zip(self.pool_of, blocks, strict=True):
            sums[pool] += count
        return sums

    def slabs_for(self, blocks: Sequence[int]) -> int:
        """Slabs that hold so many blocks of each group at the same time."""
        pools = zip(self.by_pool(blocks), self.pool_per_slab, strict=True)
        return sum(-(-count // each) for count, each in pools if each)

    def holds(self, blocks: Sequence[int]) -> bool:
        """Whether so many blocks of each group fit at the same time."""
        pools = zip(self.by_pool(blocks), self.pool_sizes, strict=True)
        fits = all(count <= size for count, size in pools)
        return fits and self.slabs_for(blocks) <= self.slabs

    @property
    def keep_free(self) -> dict[str, int]:
        """{group name: blocks of its pool kept free for the rows that run}, as `fits` takes it."""
        pairs = zip(self.spec.groups, self.pool_of, strict=True)
        return {group.name: self.kept[pool] if self.kept else 0 for group, pool in pairs}

    @property
    def total_bytes(self) -> int:
        """Bytes of the block arrays."""
        pairs = zip(self.array_rows, self.array_bytes, strict=True)
        return sum(rows * size for rows, size in pairs)

    @property
    def token_capacity(self) -> int:
        """Most tokens, over all rows, for which every group of tokens has its blocks."""

        def fits(tokens):
            return self.holds([self.counted(group, tokens) for group in self.spec.groups])

        return largest(self.max_tokens, fits)

    def counted(self, group: Group, tokens: int) -> int:
        """Blocks of a group for `tokens` tokens, but states only where they share their memory."""
        if not group.is_state:
            return self.blocks_for(group, tokens)
        pool = self.pool_of[self.spec.groups.index(group)]
        alone = self.pool_of.count(pool) == 1 and not self.pool_per_slab[pool]
        return 0 if alone else min(self.max_seqs, tokens) + self.snapshots

    @property
    def max_tokens(self) -> int:
        """Tokens of all rows at their longest."""
        return self.max_seqs * self.max_seq_len

    def blocks_per_row(self, group: Group) -> int:
        """Most blocks of the group that one row can hold at a time."""
        return group.blocks_per_row(self.max_step_tokens, self.max_seq_len)

    @functools.cached_property
    def row_fits(self) -> bool:
        """Whether the longest row fits into the empty pools, so that nothing is never possible."""
        return self.holds([self.blocks_per_row(group) for group in self.spec.groups])

    def columns(self, group: Group) -> int:
        """Columns of the group's block table."""
        return group.columns(self.max_seq_len)

    def blocks_for(self, group: Group, tokens: int) -> int:
        """Blocks of the group for `tokens` tokens, however they are dealt to the rows."""
        if group.is_state:
            return self.max_seqs + self.snapshots
        need = group.columns(tokens)
        return min(need, self.max_seqs * self.blocks_per_row(group)) if group.region.span else need

    def cost(self, tokens: int) -> int:
        """Bytes of the blocks that `tokens` tokens need."""
        groups = self.spec.groups
        return bytes_of(groups, [self.blocks_for(group, tokens) for group in groups])

    def peak(
        self, num_tokens: int, step_tokens: int | None = None, tail_only: bool = False
    ) -> Peak:
        """What a row holds at the worst moment of the prefill of a request.

        Args:
          num_tokens: of the prompt.
          step_tokens: reserved, and then settled, at a time; by default max_step_tokens.
          tail_only: as given to `reserve`.

        Raises:
          SpecError: for a number of tokens that is not at least 1.
        """
        step = self.max_step_tokens if step_tokens is None else step_tokens
        step, groups = token_count("step_tokens", step), self.spec.groups
        steps = prefill_blocks(groups, token_count("num_tokens", num_tokens), step, tail_only).T
        total = [bytes_of(groups, blocks) for blocks in steps]
        worst = total.index(max(total))
        names = [group.name for group in groups]
        blocks = dict(zip(names, steps[worst].tolist(), strict=True))
        return Peak(total[worst], blocks, worst * step)

    def to_dict(self) -> dict:
        """The plan as JSON values, its spec included, with its `schema_version`."""
        return {
            "schema_version": schema.VERSION,
            "spec": self.spec.to_dict(),
            "num_blocks": self.num_blocks,
            **{name: getattr(self, name) for name in _LIMITS},
            "pool_of": list(self.pool_of),
            "kept": list(self.kept),
            "slabs": self.slabs,
            "slab_bytes": self.slab_bytes,
            "per_slab": list(self.per_slab),
        }

    @classmethod
    def from_dict(cls, data: Mapping) -> "Plan":
        """The plan that `to_dict` wrote; fields that an older version lacks take their defaults.

        Raises:
          SpecError: for a newer version or a key that its version does not have, by name; with the
            numbers, for what planning could not have made.
        """
        counts = {"kept": (), "slabs": 0, "slab_bytes": 0, "per_slab": ()}
        known = {"schema_version", "spec", "num_blocks", *_LIMITS, "pool_of", *counts}
        plan_checks.check_keys(data, known)
        spec = CacheSpec.from_dict(data.get("spec", {}))
        names = [group.name for group in spec.groups]
        num_blocks = schema.exactly("num_blocks", data.get("num_blocks"), names)
        blocks = tuple(positive(f"num_blocks[{name!r}]", num_blocks[name]) for name in names)
        given = {"max_step_tokens": data.get("max_seq_len"), "snapshots": 0, **counts, **data}
        sizes: dict[str, Any] = {name: token_count(name, given.get(name)) for name in _LIMITS[:-1]}
        sizes |= {
            name: schema.count(name, given[name]) for name in ("snapshots", "slabs", "slab_bytes")
        }
        sizes |= {name: schema.counts(name, given[name]) for name in ("kept", "per_slab")}
        pool_of = schema.counts("pool_of", data.get("pool_of", tuple(range(len(names)))))
        made = cls(spec, blocks, pool_of=pool_of, **sizes)
        plan_checks.check_pools(made)
        plan_checks.check_counts(made)
        plan_checks.check_rows(made)
        return made

    def __reduce__(self):
        return Plan.from_dict, (self.to_dict(),)

    @functools.cached_property
    def _key(self) -> tuple:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @functools.cached_property
    def _hash(self) -> int:
        return hash(self._key)

    def __eq__(self, other):
        return self is other or (isinstance(other, Plan) and self._key == other._key)

    def __hash__(self):
        return self._hash

    def __str__(self) -> str:
        return describe(self)


_LIMITS = ("max_seqs", "max_seq_len", "max_step_tokens", "snapshots")
