"""Moving runs of words through shared memory: how they are cut, and the ring that carries them."""

import dataclasses
from collections.abc import Callable

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import versions

ALIGNMENT = 16  # bytes; what a bulk copy asks of addresses and sizes
PIECE_BYTES = 1 << 14  # most that one copy moves
STAGES = 6  # pieces that a program has room for
AHEAD = 4  # pieces that are read before the first of them is written
CORE_BYTES = 228 << 10  # shared memory of a core of Hopper and Blackwell
SYSTEM_BYTES = 1 << 10  # what a program takes of it for the system, and as much for barriers


@dataclasses.dataclass(frozen=True)
class Pieces:
    """`runs` runs of `length` words, one after the other, each cut into pieces of `step` words.

    The last piece of a run may be shorter.
    """

    length: int
    step: int
    runs: int = 1

    @property
    def per_run(self) -> int:
        """Pieces of one run."""
        return -(-self.length // self.step)

    @property
    def count(self) -> int:
        """Pieces of all runs."""
        return self.runs * self.per_run

    @property
    def tail(self) -> int:
        """Words of the last piece of a run."""
        return self.length - (self.per_run - 1) * self.step

    def start(self, piece):
        """First word of a piece."""
        run, number = lax.div(piece, self.per_run), lax.rem(piece, self.per_run)
        return run * self.length + number * self.step

    def sized(self, piece, move: Callable[[int], None]) -> None:
        """Calls `move` with the words of this piece, which a copy has to know when compiled."""
        if self.tail == self.step:
            move(self.step)
            return
        if self.per_run == 1:
            move(self.tail)
            return
        is_tail = lax.rem(piece, self.per_run) == self.per_run - 1
        pl.when(is_tail)(lambda: move(self.tail))
        pl.when(~is_tail)(lambda: move(self.step))


def most_words(word_bytes: int) -> int:
    """Words of the largest piece."""
    return PIECE_BYTES // word_bytes


def per_core(stage_bytes: int, zeros: bool = False) -> int:
    """Programs with rings of such stages that a core has room for: small pieces want many."""
    taken = (STAGES + zeros) * stage_bytes + SYSTEM_BYTES
    return min(CORE_BYTES // taken, versions.MOST_PER_CORE)


def through_ring(
    count, shape: tuple[int, ...], dtype, read: Callable, write: Callable, zeros: bool = False
) -> None:
    """Carries the pieces 0..count-1 of this program through a ring in shared memory.

    Args:
      count: i32[], pieces.
      shape, dtype: of what one stage holds.
      read(i, stage, barrier): starts the copies into the stage, arriving at the barrier, if any.
      write(i, stage, barrier, zeros): waits on the barrier if `read` started a copy, and starts
        the copies out of the stage, uncommitted.
      zeros: whether `write` gets a stage of zeros, else None.
    """

    def body(stages, barriers, *zeros):
        for stage in zeros:
            zero_words(stage, (), 0, shape[-1])
            plgpu.commit_smem()

        def read_piece(i):
            stage = lax.rem(i, STAGES)
            pl.when(i < count)(lambda: read(i, stages.at[stage], barriers.at[stage]))

        def step(i, _):
            stage = lax.rem(i, STAGES)
            write(i, stages.at[stage], barriers.at[stage], *zeros or (None,))
            plgpu.commit_smem_to_gmem_group()
            # What was written from the stage that is read into next has left it.
            plgpu.wait_smem_to_gmem(STAGES - AHEAD, wait_read_only=True)
            read_piece(i + AHEAD)

        for i in range(AHEAD):
            read_piece(i)
        lax.fori_loop(0, count, step, None)
        plgpu.wait_smem_to_gmem(0)

    stage = plgpu.SMEM(shape, dtype)
    ring = plgpu.SMEM((STAGES, *shape), dtype)
    pl.run_scoped(body, ring, plgpu.Barrier(num_barriers=STAGES), *[stage] * zeros)


def read_into(source, stage, barrier) -> None:
    """Starts a copy from global memory, which must lie in bounds, into shared memory."""
    # With this promise a contiguous copy needs no descriptor and no box of at most 256 words.
    mode = plgpu.OOBFillMode.PROMISE_IN_BOUNDS
    plgpu.copy_gmem_to_smem(source, stage, barrier, oob_mode=mode)


def write_from(stage, target) -> None:
    """Starts a copy from shared memory into global memory, to be committed by the ring."""
    plgpu.copy_smem_to_gmem(stage, target, commit_group=False)


def copy_words(source, source_at: tuple, target, target_at: tuple, size: int) -> None:
    """Copies words through registers, at any alignment: what no bulk copy can do.

    The last of the indices is the first word of each.
    """

    def move(start, width):
        if width == 1:
            target[_at(target_at, start)] = source[_at(source_at, start)]
        else:
            words = versions.load(source, *_at(source_at, start, width))
            versions.store(target, _at(target_at, start, width), words)

    _in_chunks(size, move)


def zero_words(ref, lead: tuple, start, size: int) -> None:
    """Sets words of `ref` to 0."""

    def move(offset, width):
        if width == 1:
            ref[_at((*lead, start), offset)] = lax.convert_element_type(0, ref.dtype)
        else:
            versions.store(
                ref, _at((*lead, start), offset, width), versions.zeros(width, ref.dtype)
            )

    _in_chunks(size, move)


def _at(index: tuple, start, width: int | None = None) -> tuple:
    *lead, first = index
    return (*lead, first + start if width is None else pl.ds(first + start, width))


def _in_chunks(size: int, move: Callable) -> None:
    """Calls move(start, width) to cover `size` words with chunks of one power of two.

    Where it does not divide the size the last chunk overlaps the one before: a size that is known
    needs no masks, and the words written twice are the same.
    """
    width = 1 << (min(size, versions.MOST_LOADED).bit_length() - 1)
    if size // width == 1:
        move(0, width)
    else:
        lax.fori_loop(0, size // width, lambda i, _: move(i * width, width), None)
    if size % width:
        move(size - width, width)
