"""blocks[slots[t] // E, offset + starts[b] + (slots[t] % E) * w[b] + i] = values[b][t, i]."""

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import ring, versions
from pallas_kernels.mosaic_gpu.ring import Pieces
from pallas_kernels.mosaic_gpu.views import Places, View, scalar


@dataclasses.dataclass(frozen=True)
class _Part:
    """How one buffer is written: `tokens` entries of `width` words, `start` words into a block."""

    tokens: int
    width: int
    start: int
    is_bulk: bool
    pieces: Pieces  # of one entry
    batch: int  # entries that are read together; more than 1 only where each is one piece

    @classmethod
    def of(cls, blocks, view: View, slab, value: jax.Array, start: int) -> "_Part":
        tokens, size = value.shape[0], math.prod(value.shape[1:])
        width, scale = view.words(size, value.dtype), view.unit // blocks.dtype.itemsize
        if tokens * width >= 2**31:
            wanted = f"less than 2^31 words of {view.unit} bytes"
            raise ValueError(f"values: wanted {wanted}, got {tokens:,} entries of {width:,}")
        more = slab[1:] if slab else ()
        is_bulk = View.of(blocks, start, width * scale, *more).is_bulk
        most = ring.most_words(view.unit)
        pieces = Pieces(width, min(width, most) if is_bulk else width)
        # Entries are read together only as far as every program still gets some.
        programs = versions.num_programs(tokens, ring.per_core(pieces.step * view.unit))
        batch = max(1, min(tokens // programs, most // width)) if is_bulk else 1
        return cls(tokens, width, start // scale, is_bulk, pieces, batch)

    @property
    def items(self) -> int:
        """Units of work."""
        return -(-self.tokens // self.batch) * self.pieces.count

    @property
    def words(self) -> int:
        """Words of a stage."""
        return self.batch * self.pieces.step


def scatter(
    blocks: jax.Array, slots, values: Sequence[jax.Array], offset, *, starts, entries: int, slab
) -> jax.Array:
    """See `pallas_kernels.paged_scatter`."""
    word = blocks.dtype.itemsize
    filled = [pair for pair in zip(values, starts, strict=True) if pair[0].size]
    if not filled:
        return blocks
    values, starts = zip(*filled, strict=True)
    sizes = [math.prod(v.shape[1:]) * v.dtype.itemsize // word for v in values]
    view = View.of(blocks, *sizes, *starts, *(slab[1:] if slab else ()))
    scale, places = view.unit // word, Places.of(blocks, slab, view)
    parts = [_Part.of(blocks, view, slab, *pair) for pair in zip(values, starts, strict=True)]
    bulk = [number for number, part in enumerate(parts) if part.is_bulk]
    stage = max((parts[number].words for number in bulk), default=0)
    items = sum(part.items for part in parts)
    programs = versions.num_programs(items, ring.per_core(stage * view.unit))

    def kernel(blocks, slots, offset, *values):
        base = lax.div(offset[0], scale)

        def target(part, token, start=0):
            """(whether the token has a place, the row of it, the word `start` of its entry)."""
            slot = slots[token]
            block, place = lax.div(slot, entries), lax.rem(slot, entries)
            there = (slot >= 0) & (block < places.count)
            row, first = places.at(block)
            return there, row, first + base + part.start + place * part.width + start

        targets = [functools.partial(target, part) for part in parts]
        given = list(zip(parts, values, targets, strict=True))
        for part, value, of_token in given:
            if not part.is_bulk:
                _plain(blocks, value, of_token, part, programs)
        if bulk:
            _bulk(blocks, [given[number] for number in bulk], (stage,), programs)

    words = [view.to_words(value) for value in values]
    words = [word.reshape(-1) if p.is_bulk else word for p, word in zip(parts, words, strict=True)]
    operands = (slots, scalar(offset), *words)
    written = versions.in_place(
        kernel, view.to_words(blocks), *operands, programs=programs, name="paged_scatter"
    )
    return view.from_words(written, blocks.shape[1:], blocks.dtype)


def _bulk(blocks, given: list[tuple], stage: tuple[int], programs: int) -> None:
    """All buffers through one ring: their items one after the other."""
    ends = np.cumsum([part.items for part, *_ in given]).tolist()
    count, item_of = versions.my_items(ends[-1], programs)

    def of_part(i, move):
        """Calls move(part, values, target, item within the part) for the part that has item i."""
        item, begin = item_of(i), 0
        for (part, *rest), end in zip(given, ends, strict=True):
            its_own = functools.partial(move, part, *rest, item - begin)
            pl.when((item >= begin) & (item < end))(its_own)
            begin = end

    def read(i, stage, barrier):
        of_part(i, functools.partial(_read_batch, stage=stage, barrier=barrier))

    def write(i, stage, barrier, _):
        of_part(i, functools.partial(_write_batch, blocks=blocks, stage=stage, barrier=barrier))

    ring.through_ring(count, stage, blocks.dtype, read, write)


def _batch(part: _Part, target, item):
    """(its own first token, the first that is read, piece, whether any token has a place).

    The last batch is read from further back, so that all are of one size.
    """
    number, piece = lax.div(item, part.pieces.count), lax.rem(item, part.pieces.count)
    own = number * part.batch
    first = lax.min(own, part.tokens - part.batch)
    if part.batch == 1:
        return own, first, piece, target(first)[0]

    def counted(place, there):
        return there + lax.convert_element_type(target(first + place)[0], np.int32)

    return own, first, piece, lax.fori_loop(0, part.batch, counted, np.int32(0)) > 0


def _read_batch(part: _Part, values, target, item, *, stage, barrier) -> None:
    _, first, piece, there = _batch(part, target, item)

    def move(words):
        words *= part.batch
        source = values.at[pl.ds(first * part.width + part.pieces.start(piece), words)]
        ring.read_into(source, stage.at[pl.ds(0, words)], barrier)

    pl.when(there)(lambda: part.pieces.sized(piece, move))


def _write_batch(part: _Part, values, target, item, *, blocks, stage, barrier) -> None:
    own, first, piece, there = _batch(part, target, item)

    def write_one(place, _):
        token = first + place
        there, block, start = target(token, part.pieces.start(piece))

        def move(words):
            source = stage.at[pl.ds(place * part.width, words)]
            ring.write_from(source, blocks.at[block, pl.ds(start, words)])

        pl.when(there & (token >= own))(lambda: part.pieces.sized(piece, move))

    @pl.when(there)
    def _():
        plgpu.barrier_wait(barrier)
        lax.fori_loop(0, part.batch, write_one, None)


def _plain(blocks, values, target, part: _Part, programs: int) -> None:
    count, item_of = versions.my_items(part.items, programs)

    def step(i, _):
        token = item_of(i)
        there, block, start = target(token)
        pl.when(there)(
            lambda: ring.copy_words(values, (token, 0), blocks, (block, start), part.width)
        )

    lax.fori_loop(0, count, step, None)
