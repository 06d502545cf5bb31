"""Rows and host tiers for the tests: what a row reads, now and as it decodes on."""

import dataclasses

import jax
import numpy as np
from lockstep import Setup, copy_of, i32
from world import World, fill_blocks, read_all, write_step

import kvpool as kv
from kvpool.tiers import HostTier

MIXED = Setup(("all", ("window", 4), "state"), (12, 9, 6), block=2, max_len=18, step=5)
SHORT = Setup((("chunk", 2), "all"), (9, 12), block=4, max_len=18, step=6)


def grown(setup, lengths):
    """A world whose rows hold so many tokens."""
    world = World(setup)
    world.admit(*lengths)
    for row, length in lengths.items():
        while world.n(row) < length:
            world.step({row: min(setup.step, length - world.n(row))})
    return world


def tier_of(setup, *blocks, **options):
    """A host tier of so many blocks for each layer's group; as many as the device's by default."""
    counts = blocks or setup.blocks
    return HostTier(setup.spec, {setup.group(i): n for i, n in enumerate(counts)}, **options)


def spoilt(setup, state, storage):
    """The storage with all-one bits in every block that nobody holds."""
    holders = np.split(np.asarray(state.pool.holders), np.cumsum(setup.plan.pool_sizes)[:-1])
    ids = {
        group.name: i32(np.where(held == 0, np.arange(len(held)), -1))
        for group, held in zip(setup.spec.groups, holders, strict=True)
    }
    return fill_blocks(setup, copy_of(storage), ids)


def seen(setup, state, storage, row, num=0):
    """Everything that one row reads, as bytes."""
    counts = np.zeros(setup.rows, np.int32)
    counts[row] = num
    values = read_all(setup, storage, state, counts)
    return [np.asarray(leaf)[row].tobytes() for leaf in jax.tree.leaves(values)]


def decoded(setup, state, storage, row, steps=4):
    """What a row reads after each of a few more tokens, that are the same for every row."""
    out = []
    for step in range(steps):
        counts = np.zeros(setup.rows, np.int32)
        counts[row] = 1
        state, result = kv.reserve(state, counts)
        assert bool(result.ok)
        values = np.full((setup.rows, setup.step), 1000.0 + step, np.float32)
        sums = np.full((setup.rows, 2), 10.0 * step, np.float32)
        storage = write_step(setup, storage, state, counts, values, sums)
        out.append(seen(setup, state, storage, row, 1))
        state = kv.advance(state, counts)
        kv.check(state)
    return out


def rows_ids(setup, state, row):
    names = [group.name for group in setup.spec.groups]
    tables = {name: np.asarray(kv.block_table(state, name))[row] for name in names}
    return {name: ids[ids != kv.NULL_BLOCK].tolist() for name, ids in tables.items()}


def free(state):
    return {name: int(number) for name, number in kv.free_blocks(state).items()}


def unordered(state):
    """The state but for the order in which the free blocks of a pool are handed out."""
    ends = np.cumsum(state.plan.pool_sizes)[:-1]
    parts = [np.sort(part) for part in np.split(np.asarray(state.pool.free_ids), ends)]
    pool = dataclasses.replace(state.pool, free_ids=np.concatenate(parts))
    return dataclasses.replace(state, pool=pool)


def pool_books(tier):
    """All that may change in its pools: which blocks are free, and who holds which."""
    pools = {name: sorted(pool.free_ids()) for name, pool in tier.pools._pools.items()}
    return pools, {id(held): dict(held.owned) for held in tier.pools._live}
