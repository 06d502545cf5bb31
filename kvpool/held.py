"""Held: which columns of a block table rows of given lengths hold; the one arithmetic of retention.

Everything that asks it derives from `Group.held`: what a reserve still needs, what an advance gives
back, what a prefix must name, what `check` expects, what `fits` and the planner count.  It takes
numpy and jax arrays alike, so a plan made on the host cannot disagree with the jitted verbs.
"""

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

if TYPE_CHECKING:
    from kvpool.group import Group

IntArray = Any  # a numpy or jax array of integers


class Lengths(NamedTuple):
    """What a row's columns follow from, in tokens: integer arrays [R] of one shape.

    Positions below `room` have blocks. A `tail_only` reserve leaves a gap in the window and chunk
    groups: they lack the positions from `solid` up to the first that a query at `tail` reads.
    Without a gap solid = tail = room. With a window W, in columns:

        dead | held | gap, not held | held
             |      |               |
             |      solid           tail - W + 1    room
             settled - W + 1
    """

    settled: IntArray
    room: IntArray  # settled <= solid <= tail <= room
    solid: IntArray
    tail: IntArray

    @classmethod
    def exactly(cls, length) -> "Lengths":
        """Rows settled at `length` with room exactly to there."""
        return cls(length, length, length, length)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Held:
    """Columns that rows hold: [start, gap) and [resume, stop); gap = resume where there is none."""

    start: IntArray  # i32[G, R], of one group i32[R]
    gap: IntArray
    resume: IntArray
    stop: IntArray

    @property
    def count(self) -> IntArray:
        """Columns held in all, i32[G, R]."""
        return self.stop - self.start - (self.resume - self.gap)


def held_columns(groups: tuple["Group", ...], lengths: Lengths) -> Held:
    """What rows of these lengths hold in every group, [G, R]."""
    stack = lengths.room.__array_namespace__().stack
    held = [group.held(lengths) for group in groups]
    return jax.tree.map(lambda *columns: stack(columns), *held)


def lengths_after(groups: tuple["Group", ...], lengths: Lengths, target: IntArray, tail_only: bool):
    """The Lengths of rows that get room up to `target` [R] >= settled."""
    where, maximum = (getattr(target.__array_namespace__(), name) for name in ("where", "maximum"))
    settled, room, solid, tail = lengths
    if not tail_only:
        grows = target > solid  # closes a gap, if there is one
        end = maximum(target, room)
        return Lengths(settled, *(where(grows, end, old) for old in (room, solid, tail)))
    # Room inside the gap that a query could not read: the gap closes.
    closes = (solid < target) & (target < tail)
    solid, tail = (where(closes, room, length) for length in (solid, tail))
    grows = target > room
    had_gap = solid < tail
    new_gap = target < 0
    for group in groups:
        if group.region.span:
            new_gap = new_gap | (group.dead_columns(target) > group.ceil_columns(room))
    keeps = ~grows | had_gap
    new_solid = where(keeps, solid, where(new_gap, room, target))
    return Lengths(settled, where(grows, target, room), new_solid, where(keeps, tail, target))


def half_full(groups: tuple["Group", ...], length: IntArray) -> tuple[IntArray, IntArray]:
    """(column, before) [G, R]: the column `length` [R] falls into, and the tokens before it there.

    A length cuts a block where `before` > 0. A state group's is column 0, which nothing cuts.
    """
    stack = length.__array_namespace__().stack
    columns = [length * 0 if group.is_state else group.column_of(length) for group in groups]
    before = [
        column if group.is_state else length - column * group.block_size
        for group, column in zip(groups, columns, strict=True)
    ]
    return stack(columns), stack(before)
