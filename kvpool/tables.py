"""BlockTable: the block ids that each row names, the columns of all groups side by side."""

import dataclasses

import jax
import jax.numpy as jnp

from kvpool import indices
from kvpool.indices import NULL_BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockTable:
    """C = sum(columns) columns; those of group g start at `offsets[g]`."""

    block_ids: jax.Array  # i32[S, C], NULL_BLOCK where nothing is held
    columns: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    @property
    def offsets(self) -> tuple[int, ...]:
        """First column of each group."""
        return tuple(sum(self.columns[:g]) for g in range(len(self.columns)))


def init(rows: int, columns: tuple[int, ...]) -> BlockTable:
    """A table that holds nothing."""
    return BlockTable(jnp.full((rows, sum(columns)), NULL_BLOCK, jnp.int32), tuple(columns))


def of_group(table: BlockTable, group: int) -> jax.Array:
    """The columns of one group, i32[S, M]; of a state with an axis of shards i32[D, S, M]."""
    start = table.offsets[group]
    return table.block_ids[..., start : start + table.columns[group]]


def _entries(table, group, rows, columns, where):
    """Index of (group, row, column) in the flattened table, NULL where any of them is absent."""
    num_rows, total = table.block_ids.shape
    width = indices.lookup(table.columns, group)
    valid = indices.is_valid(rows, num_rows) & indices.is_valid(columns, width) & where
    offset = indices.lookup(table.offsets, group)
    return jnp.where(valid, rows * total + offset + columns, NULL_BLOCK)


def take(table: BlockTable, group, rows, columns, where=True) -> jax.Array:
    """Block ids at (group, row, column), NULL where any of them does not exist."""
    entries = _entries(table, group, rows, columns, where)
    return indices.take(table.block_ids.reshape(-1), entries, NULL_BLOCK)


def put(table: BlockTable, group, rows, columns, ids, where=True) -> BlockTable:
    """Writes block ids at (group, row, column) where all of them exist."""
    entries = _entries(table, group, rows, columns, where)
    block_ids = indices.put(table.block_ids.reshape(-1), entries, ids)
    return dataclasses.replace(table, block_ids=block_ids.reshape(table.block_ids.shape))
