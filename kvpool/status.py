"""What a call answers: statuses, results and the errors of static mistakes."""

import enum
from typing import NamedTuple

import jax


class SpecError(ValueError):
    """A spec, plan or argument that can never work; the message names what was given and wanted."""


class InvariantError(AssertionError):
    """A state that breaks an invariant, or one whose `faults` are set; raised by `check` alone."""


class Status(enum.IntEnum):
    """The answer to one row of a call, as the int32 that results carry."""

    OK = 0
    SKIPPED = 1  # not asked: a pad, zero tokens, a negative length
    OUT_OF_BLOCKS = 2  # not now: blocks are short
    HELD_BACK = 3  # another row of an all-or-nothing call is at fault
    TOO_LONG = 4  # beyond max_seq_len
    STEP_TOO_LONG = 5  # more than max_step_tokens at once
    NEVER = 6  # the row would then hold more than the pool has
    UNREACHABLE = 7  # the past that it needs is no longer held
    BUSY = 8  # the row is live, or was named before in this call
    FREE_ROW = 9  # the row is not live
    BAD_ARGUMENT = 10  # a row that does not exist, a length beyond what is settled
    LATER = OUT_OF_BLOCKS  # the name that `fits` gives to "not now"


class Fault(enum.IntFlag):
    """Bits of `State.faults`: misuse of the verbs that return no result."""

    ADVANCE_FREE_ROW = 1
    ADVANCE_BEYOND_ROOM = 2
    ADVANCE_INTO_GAP = 4
    RELEASE_FREE_ROW = 8
    RELEASE_BAD_ROW = 16
    RETAIN_FREE_BLOCK = 32
    DROP_NOT_RETAINED = 64


class Result(NamedTuple):
    """The answer of a verb to the rows it was asked for.

    R is the number of rows asked: S for `reserve` and `truncate`, the length of `rows` otherwise.

    Blocks are asked by rows that are well-formed. Where groups share slabs, what is free for one
    are the unused blocks in its slabs, and those of the free slabs that the other groups' blocks
    asked leave over. Some shortfall is above 0 just when not all that was asked fits. What only a
    cache keeps, here or in another group, can make room: `cached` says whose blocks those are.
    """

    granted: jax.Array  # bool[R]
    status: jax.Array  # i32[R], a Status
    ok: jax.Array  # bool[], every row asked was granted
    shortfall: dict[str, jax.Array]  # i32[] per group: max(0, blocks asked - free for it)
    cached: dict[str, jax.Array]  # i32[] per group: blocks of its pool that only retains hold
    copies: dict[str, tuple[jax.Array, jax.Array]]  # group: (src, dst) i32[R], -1 pads
    blocks: dict[str, jax.Array]  # state group: i32[R], the snapshots taken; {} elsewhere
