"""blocks[dst[i]] = blocks[src[i]]."""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic_gpu import ring, versions
from pallas_kernels.mosaic_gpu.ring import Pieces
from pallas_kernels.mosaic_gpu.views import Places, View


def copy(blocks: jax.Array, src: jax.Array, dst: jax.Array, *, slab) -> jax.Array:
    """See `pallas_kernels.copy_blocks`."""
    view = View.of(blocks, *(slab[1:] if slab else ()))
    words, places = view.to_words(blocks), Places.of(blocks, slab, view)
    copied = (_bulk if view.is_bulk else _plain)(words, src, dst, places)
    return view.from_words(copied, blocks.shape[1:], blocks.dtype)


def _pair(src, dst, pair, places: Places):
    """(whether both blocks are there, source, target) of a pair."""
    source, target = src[pair], dst[pair]
    return places.has(source) & places.has(target), source, target


def _bulk(blocks, src, dst, places: Places):
    width = places.width
    pieces = Pieces(width, min(width, ring.most_words(blocks.dtype.itemsize)))
    items = src.shape[0] * pieces.count
    stage_bytes = pieces.step * blocks.dtype.itemsize
    programs = versions.num_programs(items, ring.per_core(stage_bytes))

    def kernel(blocks, src, dst):
        count, item_of = versions.my_items(items, programs)

        def of(i):
            pair, piece = lax.div(item_of(i), pieces.count), lax.rem(item_of(i), pieces.count)
            return *_pair(src, dst, pair, places), piece

        def read(i, stage, barrier):
            there, source, _, piece = of(i)

            def move(words):
                row, first = places.at(source)
                at = blocks.at[row, pl.ds(first + pieces.start(piece), words)]
                ring.read_into(at, stage.at[pl.ds(0, words)], barrier)

            pl.when(there)(lambda: pieces.sized(piece, move))

        def write(i, stage, barrier, _):
            there, _, target, piece = of(i)

            def move(words):
                plgpu.barrier_wait(barrier)
                row, first = places.at(target)
                at = blocks.at[row, pl.ds(first + pieces.start(piece), words)]
                ring.write_from(stage.at[pl.ds(0, words)], at)

            pl.when(there)(lambda: pieces.sized(piece, move))

        ring.through_ring(count, (pieces.step,), blocks.dtype, read, write)

    return versions.in_place(kernel, blocks, src, dst, programs=programs, name="copy_blocks")


def _plain(blocks, src, dst, places: Places):
    pairs = src.shape[0]
    programs = versions.num_programs(pairs)

    def kernel(blocks, src, dst):
        count, item_of = versions.my_items(pairs, programs)

        def step(i, _):
            there, source, target = _pair(src, dst, item_of(i), places)

            def copy():
                ends = places.at(source), blocks, places.at(target)
                ring.copy_words(blocks, *ends, places.width)

            pl.when(there)(copy)

        lax.fori_loop(0, count, step, None)

    return versions.in_place(kernel, blocks, src, dst, programs=programs, name="copy_blocks_plain")
