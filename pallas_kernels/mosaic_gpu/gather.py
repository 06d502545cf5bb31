"""out[p, e] = blocks[block_ids[p], offset + e*w :][:w], or 0 where the entry is not shown."""

import dataclasses
import math

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import ring, versions
from pallas_kernels.mosaic_gpu.ring import Pieces
from pallas_kernels.mosaic_gpu.views import ALIGNMENT, Places, View, scalar


@dataclasses.dataclass(frozen=True)
class _Run:
    """What is read of one block: `entries` entries of `width` words; `scale` makes them words."""

    entries: int
    width: int
    scale: int  # words of the caller in one of the view
    blocks: Places

    def places(self, item, block_ids, bounds, per_block: int):
        """(place in block_ids, number in the block, block, first entry shown, end of those shown).

        The entries are counted within the block; without bounds all are shown.
        """
        columns = block_ids.shape[1]
        place, number = lax.div(item, per_block), lax.rem(item, per_block)
        row, column = lax.div(place, columns), lax.rem(place, columns)
        first = column * self.entries
        if not bounds:
            return place, number, block_ids[row, column], 0, self.entries
        # Clamped first: the difference of what 32 bits hold may be more than they do.
        low, high = (lax.clamp(0, b[row], columns * self.entries) - first for b in bounds)
        return place, number, block_ids[row, column], low, high


def gather(
    blocks: jax.Array, block_ids, bounds: tuple, offset, *, entries: int, shape, dtype, slab
) -> jax.Array:
    """See `pallas_kernels.paged_gather`; bounds are (starts, stops), or () to show everything."""
    size = math.prod(shape) * dtype.itemsize // blocks.dtype.itemsize
    more = slab[1:] if slab else ()
    entry, whole = View.of(blocks, size, *more), View.of(blocks, entries * size, *more)
    view = View(entry.unit, whole.is_bulk)
    scale = view.unit // blocks.dtype.itemsize
    run = _Run(entries, size // scale, scale, Places.of(blocks, slab, view))
    cut = _cut(run, view)
    operands = (view.to_words(blocks), block_ids, scalar(offset), *bounds)
    out = _bulk(operands, run, cut) if cut else _plain(operands, run)
    return view.from_words(out, (entries, *shape), dtype).reshape(*block_ids.shape, entries, *shape)


def _cut(run: _Run, view: View) -> Pieces | None:
    """The pieces of a block, or None where no bulk copy can take them.

    A piece has whole entries, as many as make a multiple of 16 bytes, or is a part of one.
    """
    most = ring.most_words(view.unit)
    together = ALIGNMENT // math.gcd(ALIGNMENT, run.width * view.unit)
    if not view.is_bulk:
        return None
    if together * run.width <= most:
        each = min(most // (together * run.width) * together, run.entries)
        return Pieces(run.entries * run.width, each * run.width)
    if together == 1:
        return Pieces(run.width, most, run.entries)
    return None


def _bulk(operands: tuple, run: _Run, pieces: Pieces):
    blocks, block_ids, *_ = operands
    items = block_ids.size * pieces.count
    stage_bytes = pieces.step * blocks.dtype.itemsize
    programs = versions.num_programs(items, ring.per_core(stage_bytes, zeros=True))
    out = lax.empty((block_ids.size, run.entries * run.width), blocks.dtype)

    def kernel(out, blocks, block_ids, offset, *bounds):
        count, item_of = versions.my_items(items, programs)
        base = lax.div(offset[0], run.scale)

        def with_piece(i, move):
            """Calls move(words, where the piece is, block, whether any is shown, low, high)."""
            place, piece, block, low, high = run.places(item_of(i), block_ids, bounds, pieces.count)
            first = lax.div(pieces.start(piece), run.width)

            def sized(words):
                entries = max(1, words // run.width)
                shown = [lax.clamp(0, at - first, entries) for at in (low, high)]
                there = run.blocks.has(block) & (shown[0] < shown[1])
                move(words, (place, pieces.start(piece)), block, there, *shown)

            pieces.sized(piece, sized)

        def read(i, stage, barrier):
            def move(words, at, block, there, *_):
                row, first = run.blocks.at(block)
                source = blocks.at[row, pl.ds(first + base + at[1], words)]
                pl.when(there)(lambda: ring.read_into(source, stage.at[pl.ds(0, words)], barrier))

            with_piece(i, move)

        def write(i, stage, barrier, zeros):
            def move(words, at, block, there, low, high):
                target = out.at[at[0], pl.ds(at[1], words)]

                @pl.when(there)
                def _():
                    plgpu.barrier_wait(barrier)
                    _zero_hidden(stage, low, high, words // run.width, run.width)
                    ring.write_from(stage.at[pl.ds(0, words)], target)

                pl.when(~there)(lambda: ring.write_from(zeros.at[pl.ds(0, words)], target))

            with_piece(i, move)

        ring.through_ring(count, (pieces.step,), blocks.dtype, read, write, zeros=True)

    return versions.in_place(kernel, out, *operands, programs=programs, name="paged_gather")


def _zero_hidden(stage, low, high, entries: int, width: int) -> None:
    """Zeros in the stage what lies before entry `low` and from `high` on."""

    def zero(entry, _):
        ring.zero_words(stage, (), entry * width, width)

    @pl.when((low > 0) | (high < entries))
    def _():
        lax.fori_loop(0, low, zero, None)
        lax.fori_loop(high, entries, zero, None)
        plgpu.commit_smem()


def _plain(operands: tuple, run: _Run):
    blocks, block_ids, *_ = operands
    items = block_ids.size * run.entries
    programs = versions.num_programs(items)
    out = lax.empty((block_ids.size, run.entries * run.width), blocks.dtype)

    def kernel(out, blocks, block_ids, offset, *bounds):
        count, item_of = versions.my_items(items, programs)
        base = lax.div(offset[0], run.scale)

        def step(i, _):
            place, entry, block, low, high = run.places(item_of(i), block_ids, bounds, run.entries)
            there = run.blocks.has(block) & (entry >= low) & (entry < high)
            start = entry * run.width

            def copy():
                row, first = run.blocks.at(block)
                source = (row, first + base + start)
                ring.copy_words(blocks, source, out, (place, start), run.width)

            pl.when(there)(copy)
            pl.when(~there)(lambda: ring.zero_words(out, (place,), start, run.width))

        lax.fori_loop(0, count, step, None)

    return versions.in_place(kernel, out, *operands, programs=programs, name="paged_gather_plain")
