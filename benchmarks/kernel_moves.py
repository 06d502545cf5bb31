"""The moves of bytes that a cache of a named shape makes: what to call, with what, and its cost.

A move is one verb of a serving step on one layer of one shape, or on whole blocks, as kvpool calls
the kernels for it. The ids are random and new for every call; the values are random bits, in which
every NaN occurs.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pallas_kernels as kernels
from shapes import Scale, Shape, words_of


@dataclasses.dataclass(frozen=True)
class Move:
    """One call of an operation over a shape."""

    name: str
    shape: Shape  # as scaled
    blocks: int  # N
    operation: Callable
    reference: Callable
    call: Callable  # (operation, group, blocks, layer, ids, values) -> blocks, or what was read
    ids: Callable  # (numpy generator) -> tuple of i32 arrays
    moved: int  # bytes that must be read and written
    piece: int  # bytes of the largest run of them in a block
    values: tuple = ()  # (shape, dtype) each
    launches: int = 1
    in_place: bool = True
    least_share: float | None = None  # of a plain copy of the same bytes
    most_launches: float | None = None  # empty launches that it may take as long as

    def run(self, operation: Callable, blocks, layer, ids, values):
        """The result of one call: u[N, W], or a list of what was read."""
        return self.call(operation, self.shape.group, blocks, layer, ids, values)

    def calls(self, scale: Scale) -> int:
        """Calls of a program, so many that it outgrows the L2."""
        return max(scale.least_calls, min(scale.most_calls, scale.total_bytes // self.moved))

    def random_values(self, seed: int) -> tuple[jax.Array, ...]:
        """The values of one call."""
        keys = jax.random.split(jax.random.key(seed), len(self.values) or 1)
        return tuple(random_bits(*each) for each in zip(keys, self.values, strict=False))

    def random_blocks(self, seed: int = 0) -> jax.Array:
        """u[N, W]."""
        blocks = (self.blocks, self.shape.width), self.shape.word
        return random_bits(jax.random.key(seed), blocks)

    def differences(self, implementation: str | None) -> Callable:
        """Jitted (blocks, layer i32[], ids, values) -> i32[]: words unlike the reference's."""
        operation = functools.partial(self.operation, implementation=implementation)

        @jax.jit
        def differing(blocks, *arguments):
            got = self.run(operation, blocks, *arguments)
            wanted = self.run(self.reference, blocks, *arguments)
            return sum(map(_differing, jax.tree.leaves(got), jax.tree.leaves(wanted)))

        return differing


def moves_of(shape: Shape, scale: Scale) -> list[Move]:
    """All moves of a shape, largest first."""
    shape = scale.shape(shape)
    if shape.group.is_state:
        moves = [_read_state(shape, scale), _write_state(shape, scale)]
    else:
        moves = [_gather(shape, scale), _prefill(shape, scale), _decode(shape, scale)]
        if shape.region.span:
            moves.insert(1, _window(shape, scale))
    return [*moves, *_whole_blocks(shape, scale)]


def random_bits(key, value: tuple) -> jax.Array:
    """A value (shape, dtype) of random bits."""
    shape, dtype = value
    word = jnp.dtype(f"uint{8 * jnp.dtype(dtype).itemsize}")
    bits = jax.jit(jax.random.bits, static_argnums=(1, 2))(key, shape, word)
    return lax.bitcast_convert_type(bits, dtype)


def _differing(got, wanted):
    """i32[], how many words differ."""
    if got.dtype != wanted.dtype or got.shape != wanted.shape:
        raise ValueError(f"wanted {wanted.dtype}{wanted.shape}, got {got.dtype}{got.shape}")
    word = jnp.dtype(f"uint{8 * got.dtype.itemsize}")
    differ = lax.bitcast_convert_type(got, word) != lax.bitcast_convert_type(wanted, word)
    return jnp.sum(differ, dtype=jnp.int32)


def _bytes(shape: Shape) -> int:
    """Of one entry of every buffer of a layer."""
    return sum(buffer.entry_bytes for buffer in shape.group.region.buffers)


def _stored(shape: Shape, count: int) -> tuple:
    return tuple(((count, *b.shape), b.numpy_dtype) for b in shape.group.region.buffers)


def _largest(shape: Shape) -> int:
    return max(b.bytes_in_block(shape.group.entries_per_block) for b in shape.group.region.buffers)


def _i32(*arrays) -> tuple[np.ndarray, ...]:
    return tuple(np.asarray(array, np.int32) for array in arrays)


def _read_tokens(operation, group, blocks, layer, ids, values):
    return [
        operation(
            blocks,
            *ids,
            entries=group.entries_per_block,
            shape=buffer.shape,
            dtype=buffer.numpy_dtype,
            offset=offset,
        )
        for buffer, offset in words_of(group).buffers(layer)
    ]


def _write_tokens(operation, group, blocks, layer, ids, values):
    return operation(
        blocks,
        *ids,
        values,
        entries=group.entries_per_block,
        starts=words_of(group).starts,
        offset=layer * words_of(group).layer,
    )


def _reading(shape: Shape, scale: Scale, name: str, columns: int, bounds: Callable, **options):
    """A read of one layer for rows of `columns` blocks; bounds(rows) -> (starts, stops)."""
    each, blocks = shape.group.entries_per_block, scale.blocks(shape)
    rows = scale.count(shape, columns * shape.layer_bytes, blocks // columns)
    starts, stops = bounds(rows)

    def ids(rng):
        table = rng.permutation(blocks)[: rows * columns].reshape(rows, columns)
        held = np.arange(columns) * each < stops[:, None]
        return _i32(np.where(held, table, -1), starts, stops)

    shown = int((stops - starts).sum())
    return Move(
        name, shape, blocks, kernels.paged_gather, kernels.paged_gather_reference, _read_tokens,
        ids, (shown + rows * columns * each) * _bytes(shape), _largest(shape),
        launches=len(shape.group.region.buffers), in_place=False, **options,
    )  # fmt: skip


def _gather(shape: Shape, scale: Scale) -> Move:
    """All entries of rows of as many blocks as make the call large."""
    most = scale.blocks(shape) // scale.read_rows
    columns = scale.count(shape, scale.read_rows * shape.layer_bytes, most)
    stop = columns * shape.group.entries_per_block
    options = {"least_share": 0.85} if _largest(shape) >= 1 << 15 else {}
    return _reading(
        shape, scale, "gather", columns,
        lambda rows: (np.zeros(rows, np.int64), np.full(rows, stop)), **options,
    )  # fmt: skip


def _window(shape: Shape, scale: Scale) -> Move:
    """A window or a chunk: rows show it from some place of their first block on."""
    each, region = shape.group.entries_per_block, shape.region
    columns = min(-(-(region.span - 1) // each) + 1, scale.blocks(shape) // 2)
    span = min(region.span, (columns - 1) * each + 1)

    def bounds(rows):
        if region.kind == "chunk":  # filled from its first position on, to any length
            stops = (2 * np.arange(rows) + 1) * span // (2 * rows) + 1
            return np.zeros(rows, np.int64), stops
        starts = np.arange(rows) * 5 % each
        return starts, starts + span

    return _reading(shape, scale, f"{region.kind} read", columns, bounds)


def _writing(shape: Shape, scale: Scale, name: str, tokens: int, slots: Callable, **options):
    """A write to one layer; slots(generator, entries) -> their places."""
    ratio, group = shape.region.tokens_per_entry, shape.group
    tokens = max(tokens, 2 * ratio)
    written = tokens // ratio  # the others are skipped: an entry is written with its last token

    def ids(rng):
        all_slots = np.full(tokens, -1)
        all_slots[ratio - 1 :: ratio][:written] = slots(rng, written)
        return _i32(all_slots)

    return Move(
        name, shape, scale.blocks(shape), kernels.paged_scatter, kernels.paged_scatter_reference,
        _write_tokens, ids, 2 * written * _bytes(shape),
        max(buffer.entry_bytes for buffer in group.region.buffers), _stored(shape, tokens),
        **options,
    )  # fmt: skip


def _prefill(shape: Shape, scale: Scale) -> Move:
    """Tokens that fill blocks in random order."""
    each, blocks = shape.group.entries_per_block, scale.blocks(shape)

    def slots(rng, count):
        filled = rng.permutation(blocks)[: -(-count // each)]
        return (filled[:, None] * each + np.arange(each)).reshape(-1)[:count]

    name = f"scatter of {scale.tokens:,} tokens"
    return _writing(shape, scale, name, scale.tokens, slots, least_share=0.8)


def _decode(shape: Shape, scale: Scale) -> Move:
    """One token a row, each in another block."""
    each, blocks = shape.group.entries_per_block, scale.blocks(shape)

    def slots(rng, count):
        return rng.permutation(blocks)[:count] * each + rng.integers(0, each, count)

    name = f"decode scatter of {scale.decode_rows} rows"
    return _writing(shape, scale, name, scale.decode_rows, slots, most_launches=1.5)


def _read_state(shape: Shape, scale: Scale) -> Move:
    def call(operation, group, blocks, layer, ids, values):
        return [
            operation(blocks, *ids, shape=buffer.shape, dtype=buffer.numpy_dtype, offset=offset)
            for buffer, offset in words_of(group).buffers(layer)
        ]

    rows = scale.count(shape, shape.layer_bytes, scale.blocks(shape))
    return Move(
        f"state read of {rows:,} rows", shape, scale.blocks(shape), kernels.state_gather,
        kernels.state_gather_reference, call,
        lambda rng: _i32(rng.permutation(scale.blocks(shape))[:rows]),
        2 * rows * _bytes(shape), _largest(shape),
        launches=len(shape.group.region.buffers), in_place=False,
    )  # fmt: skip


def _write_state(shape: Shape, scale: Scale) -> Move:
    def call(operation, group, blocks, layer, ids, values):
        offset = layer * words_of(group).layer
        return operation(blocks, *ids, values, starts=words_of(group).starts, offset=offset)

    rows = scale.count(shape, shape.layer_bytes, scale.blocks(shape))
    return Move(
        f"state write of {rows:,} rows", shape, scale.blocks(shape), kernels.state_scatter,
        kernels.state_scatter_reference, call,
        lambda rng: _i32(rng.permutation(scale.blocks(shape))[:rows]),
        2 * rows * _bytes(shape), _largest(shape), _stored(shape, rows),
    )  # fmt: skip


def _whole_blocks(shape: Shape, scale: Scale) -> list[Move]:
    """copy_blocks, export and import: blocks with all their layers."""
    blocks, size, width = scale.blocks(shape), shape.group.bytes_per_block, shape.width
    count = scale.count(shape, size, blocks // 2)

    def some(rng):
        return _i32(rng.permutation(blocks)[:count])

    def pairs(rng):
        return _i32(*rng.permutation(blocks)[: 2 * count].reshape(2, count))

    def copy(operation, group, blocks, layer, ids, values):
        return operation(blocks, *ids)

    def export(operation, group, blocks, layer, ids, values):
        return [operation(blocks, *ids, shape=(width,), dtype=shape.word)]

    def bring(operation, group, blocks, layer, ids, values):
        return operation(blocks, *ids, *values)

    move = functools.partial(Move, shape=shape, blocks=blocks, moved=2 * count * size, piece=size)
    wanted = 0.85 if size >= 1 << 15 else None
    return [
        move(f"copy of {count:,} blocks", operation=kernels.copy_blocks, call=copy, ids=pairs,
             reference=kernels.copy_blocks_reference, least_share=wanted),
        move(f"export of {count:,} blocks", operation=kernels.state_gather, call=export, ids=some,
             reference=kernels.state_gather_reference, in_place=False),
        move(f"import of {count:,} blocks", operation=kernels.paged_scatter, call=bring, ids=some,
             reference=kernels.paged_scatter_reference,
             values=(((count, width), shape.word),)),
    ]  # fmt: skip
