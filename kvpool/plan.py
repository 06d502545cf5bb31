"""Plan: how many blocks each group gets, and the sizes of the state that follow from it."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import NamedTuple

from kvpool import schema
from kvpool.group import Group
from kvpool.needs import bytes_of, largest, prefill_blocks
from kvpool.regions import positive, token_count
from kvpool.spec import CacheSpec
from kvpool.status import SpecError
from kvpool.text import table


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
    """

    spec: CacheSpec
    blocks: tuple[int, ...]
    max_seqs: int
    max_seq_len: int
    max_step_tokens: int
    snapshots: int
    pool_of: tuple[int, ...]
    kept: tuple[int, ...] = ()

    @property
    def num_blocks(self) -> dict[str, int]:
        """{group name: blocks}."""
        return {g.name: n for g, n in zip(self.spec.groups, self.blocks, strict=True)}

    @functools.cached_property
    def pool_sizes(self) -> tuple[int, ...]:
        """Blocks of each pool."""
        return tuple(dict(zip(self.pool_of, self.blocks, strict=True)).values())

    @property
    def keep_free(self) -> dict[str, int]:
        """{group name: blocks of its pool kept free for the rows that run}, as `fits` takes it."""
        pairs = zip(self.spec.groups, self.pool_of, strict=True)
        return {group.name: self.kept[pool] if self.kept else 0 for group, pool in pairs}

    @property
    def total_bytes(self) -> int:
        """Bytes of the block arrays."""
        return bytes_of(self.spec.groups, self.blocks)

    @property
    def token_capacity(self) -> int:
        """Most tokens, over all rows, for which every group of tokens has its blocks."""

        def fits(tokens):
            groups = zip(self.spec.groups, self.blocks, strict=True)
            return all(g.is_state or self.blocks_for(g, tokens) <= have for g, have in groups)

        return largest(self.max_tokens, fits)

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
        most = [0] * len(self.pool_sizes)
        for group, pool in zip(self.spec.groups, self.pool_of, strict=True):
            most[pool] += self.blocks_per_row(group)
        return all(need <= size for need, size in zip(most, self.pool_sizes, strict=True))

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
        }

    @classmethod
    def from_dict(cls, data: Mapping) -> "Plan":
        """The plan that `to_dict` wrote; fields that an older version lacks take their defaults.

        Raises:
          SpecError: for a newer version or an unknown key, by name; for counts that are no counts.
        """
        schema.check_version("plan", data)
        known = {"schema_version", "spec", "num_blocks", *_LIMITS, "pool_of", "kept"}
        schema.refuse_unknown("plan", data, known)
        spec = CacheSpec.from_dict(data.get("spec", {}))
        names = [group.name for group in spec.groups]
        num_blocks = schema.exactly("num_blocks", data.get("num_blocks"), names)
        blocks = tuple(positive(f"num_blocks[{name!r}]", num_blocks[name]) for name in names)
        given = {"max_step_tokens": data.get("max_seq_len"), "snapshots": 0, **data}
        limits = {name: token_count(name, given.get(name)) for name in _LIMITS[:-1]}
        limits["snapshots"] = schema.count("snapshots", given["snapshots"])
        pool_of = schema.counts("pool_of", data.get("pool_of", tuple(range(len(names)))))
        if len(pool_of) != len(names) or set(pool_of) != set(range(max(pool_of, default=0) + 1)):
            raise SpecError(f"pool_of: wanted a pool for each of {', '.join(names)}, got {pool_of}")
        pools = dict(zip(pool_of, blocks, strict=True))
        if list(pools) != list(range(len(pools))):
            raise SpecError(
                f"pool_of: wanted pools in the order of their first groups, got {pool_of}"
            )
        kept = schema.counts("kept", data.get("kept", ()))
        if any(keep > size for keep, size in zip(kept, pools.values(), strict=False)):
            raise SpecError(f"kept: got {kept}, more than the pools {tuple(pools.values())}")
        if kept and len(kept) != len(set(pool_of)):
            raise SpecError(
                f"kept: wanted a count for each of {len(set(pool_of))} pools, got {kept}"
            )
        return cls(spec, blocks, pool_of=pool_of, kept=kept, **limits)

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
        rows = [("group", "layers", "tokens/block", "bytes/block", "blocks", "MiB", "share")]
        for group, blocks in zip(self.spec.groups, self.blocks, strict=True):
            used = blocks * group.bytes_per_block
            rows.append(
                (
                    group.name,
                    str(len(group.layers)),
                    "-" if group.is_state else f"{group.block_size:,}",
                    f"{group.bytes_per_block:,}",
                    f"{blocks:,}",
                    f"{used / 2**20:,.1f}",
                    f"{used / self.total_bytes:.1%}",
                )
            )
        return (
            f"{table(rows)}\n{self.total_bytes / 2**20:,.1f} MiB; {self.token_capacity:,} tokens "
            f"in up to {self.max_seqs:,} rows of up to {self.max_seq_len:,}"
        )


_LIMITS = ("max_seqs", "max_seq_len", "max_step_tokens", "snapshots")
