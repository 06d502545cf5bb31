"""Slabs against a plain-Python model, id by id and stack by stack."""

import chex
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import oracle_slabs
import pytest
from hypothesis import given

from kvpool import slabs
from kvpool.bits import WIDTH as BITS

WIDTH = 12
take, give = jax.jit(slabs.take), jax.jit(slabs.give)


class Both:
    """kvpool's slabs beside the model, compared after every pass."""

    def __init__(self, count, per_slab):
        self.model = oracle_slabs.Slabs(count, per_slab)
        self.slabs = slabs.init(count, tuple(per_slab))
        self.held: list[tuple[int, int]] = []  # (pool, id)
        self.compare()

    def take(self, pools) -> list[int]:
        """One block of each of the pools, at most WIDTH; -1 takes none."""
        which = (list(pools) + [-1] * WIDTH)[:WIDTH]
        wanted = [pool >= 0 for pool in which]
        which = [max(pool, 0) for pool in which]
        want = self.model.take(which, wanted)
        self.slabs, ids = take(self.slabs, i32(which), np.array(wanted))
        assert ids.tolist() == want
        self.held += [(p, i) for p, i in zip(which, want, strict=True) if i >= 0]
        self.compare()
        return want[: len(pools)]

    def give(self, places) -> None:
        """Gives back the held blocks at these places of `held`."""
        chosen = [self.held[place] for place in places]
        self.held = [pair for k, pair in enumerate(self.held) if k not in places]
        which, ids = ([pair[n] for pair in chosen] for n in (0, 1))
        pads = [0] * (WIDTH - len(chosen))
        freed = [True] * len(chosen) + [False] * len(pads)
        self.model.give(which + pads, ids + pads, freed)
        self.slabs = give(self.slabs, i32(which + pads), i32(ids + pads), np.array(freed))
        self.compare()

    def compare(self) -> None:
        got, model = jax.tree.map(np.asarray, self.slabs), self.model
        assert got.stacks[: got.num_free].tolist() == model.free
        for slab, used in enumerate(model.used):
            places = range(got.used.shape[1] * BITS)
            assert {p for p in places if got.used[slab, p // BITS] >> (p % BITS) & 1} == used, slab
        for pool, each in enumerate(model.per_slab):
            start = got.offsets[pool]
            stack = got.stacks[start : start + got.num_open[pool]].tolist() if each else []
            assert stack == model.open[pool]
            assert got.height[stack].tolist() == list(range(len(stack)))
            assert got.spare[pool] == model.spare(pool)

    def counts(self) -> list[int]:
        """Used blocks of each slab."""
        return [len(used) for used in self.model.used]


def i32(values):
    return np.asarray(values, np.int32)


@given(st.data(), st.sampled_from([(9, (3, 1, 2)), (7, (5,)), (6, (2, 40, 4)), (12, (1, 1))]))
def test_every_pass_does_what_the_model_does(data, sizes):
    count, per_slab = sizes
    both = Both(count, list(per_slab))
    pools = st.lists(st.integers(-1, len(per_slab) - 1), min_size=1, max_size=WIDTH)
    for _ in range(data.draw(st.integers(1, 25))):
        if both.held and data.draw(st.booleans()):
            places = st.lists(st.integers(0, len(both.held) - 1), max_size=WIDTH, unique=True)
            both.give(data.draw(places))
            continue
        asked = data.draw(pools)
        blocks = [asked.count(pool) for pool in range(len(per_slab))]
        needed = both.model.needed(blocks)
        assert slabs.needed(both.slabs, jnp.asarray(blocks, jnp.int32)).tolist() == needed
        if sum(needed) <= len(both.model.free):
            both.take(asked)
    while both.held:
        both.give(list(range(min(WIDTH, len(both.held)))))
    assert sorted(both.model.free) == list(range(count))


def test_the_fullest_slabs_are_filled_up_and_the_others_empty():
    both = Both(6, [4])
    for _ in range(2):
        both.take([0] * 8)  # slabs 0 to 3
    both.give([0, 1, 2])  # one of slab 0 is left
    both.give([1])  # three of slab 1
    assert both.counts() == [1, 3, 4, 4, 0, 0]
    assert both.take([0]) == [4]  # in slab 1
    both.give([0])
    assert both.counts() == [0, 4, 4, 4, 0, 0]
    assert int(both.slabs.num_free) == 3


def test_a_pool_takes_no_new_slab_while_it_has_an_unused_block():
    both = Both(3, [3, 2])
    both.take([0] * 4 + [1])
    both.give([0])
    assert both.slabs.spare.tolist() == [3, 1]
    assert both.slabs.num_free == 0
    both.take([0, 1, 0, 0])
    assert both.model.owner == [0, 0, 1]
    assert both.slabs.spare.tolist() == [0, 0]


def test_blocks_that_need_more_than_a_word_of_bits():
    both = Both(2, [70])
    for _ in range(6):
        both.take([0] * 10)
    both.give([33, 5, 40])
    assert sorted(both.take([0, 0, 0])) == [5, 33, 40]
    assert both.take([0] * 12) == [*range(60, 72)]


def test_nothing_moved_is_bit_identical():
    pool = slabs.init(4, (3, 0, 2))
    pool, _ = take(pool, i32([0, 2, 0]), np.array([True, True, True]))
    none = np.zeros(3, bool)
    same, ids = take(pool, i32([0, 2, 0]), none)
    chex.assert_trees_all_equal(pool, same, give(pool, i32([0, 2, 0]), i32([0, 1, 2]), none))
    assert ids.tolist() == [-1, -1, -1]


@pytest.mark.parametrize(
    ("per_slab", "blocks", "count"),
    [
        ((3, 1), (7, 2), 5),
        ((3, 0), (6, 9), 2),
        ((1 << 20,), (1,), 1),
        ((7,), (2**31 - 1,), 306783379),
    ],
)
def test_slabs_for_blocks(per_slab, blocks, count):
    assert int(slabs.slabs_for(per_slab, i32(blocks)).sum()) == count
