"""Group: the layers that share a region, the bytes of their blocks, and the columns a row holds."""

import dataclasses
import functools

from kvpool import regions
from kvpool.held import Held, IntArray, Lengths
from kvpool.regions import Region


@dataclasses.dataclass(frozen=True)
class Group:
    """The layers that share a region and therefore one block table.

    A block holds `block_size` tokens of every layer of the group as one contiguous run of bytes:
    layers in order, each layer's buffers in order, each buffer [entries_per_block, *entry shape],
    or [*entry shape] where it is per block, and padded to a multiple of 16 bytes.
    """

    name: str
    region: Region
    layers: tuple[int, ...]
    block_size: int  # tokens

    @property
    def entries_per_block(self) -> int:
        """Entries of each buffer in a block; the one state of a state group."""
        return 1 if self.is_state else self.block_size // self.region.tokens_per_entry

    @property
    def is_state(self) -> bool:
        """Whether a row has one block, the recurrent state, instead of blocks of tokens."""
        return self.region.kind == regions.STATE

    @property
    def short_chunks(self) -> bool:
        """Whether a block can hold several chunks.

        Then a row that went back to the start of one, in a fresh block that lacks the tokens before
        it, may be asked to go back to another in the same block.
        """
        return self.region.kind == regions.CHUNK and self.region.span < self.block_size

    @functools.cached_property
    def buffer_offsets(self) -> tuple[int, ...]:
        """Bytes from a layer's start to each of its buffers, and at the end the layer's bytes."""
        offsets = [0]
        for buffer in self.region.buffers:
            size = buffer.bytes_in_block(self.entries_per_block)
            offsets.append(offsets[-1] + -(-size // regions.ALIGNMENT) * regions.ALIGNMENT)
        return tuple(offsets)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block with all its layers."""
        return len(self.layers) * self.buffer_offsets[-1]

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of an entry of all layers, without padding; of the state of a state group.

        Scales that a block has once are no entry's.
        """
        each = sum(b.entry_bytes for b in self.region.buffers if not b.per_block)
        return len(self.layers) * each

    def columns(self, seq_len: int) -> int:
        """Columns of the block table for rows of up to seq_len tokens."""
        return 1 if self.is_state else -(-seq_len // self.block_size)

    def column_of(self, position):
        """The table column of a position >= 0; an int or array, as are the next two."""
        return regions.quotient(position, self.block_size)

    def ceil_columns(self, tokens):
        """Columns that the first `tokens` >= 0 positions touch, without overflow."""
        size = self.block_size
        return regions.quotient(tokens + (size - 1), size) if size > 1 else tokens

    def dead_columns(self, n):
        """Table columns that a row of n settled tokens has given back, or never needed."""
        return self.column_of(self.region.first_read(n))

    def held(self, lengths: Lengths) -> Held:
        """The columns that rows of these lengths [R] hold: dead ones are not, nor is a gap."""
        numbers = lengths.room.__array_namespace__()
        if self.is_state:
            taken = numbers.minimum(lengths.room, 1)
            return Held(taken * 0, taken, taken, taken)
        stop = self.ceil_columns(lengths.room)
        gap = resume = stop
        if self.region.span:
            gap = self.ceil_columns(lengths.solid)
            resume = numbers.maximum(gap, self.dead_columns(lengths.tail))
        return Held(self.dead_columns(lengths.settled), gap, resume, stop)

    def blocks_per_row(self, step_tokens: int, seq_len: int) -> int:
        """Most blocks that a row of up to seq_len tokens holds in steps of up to step_tokens."""
        return self.region.blocks_per_row(self.block_size, step_tokens, seq_len)

    def entries_read(self, length: IntArray) -> IntArray:
        """Entries that the query at the last of `length` >= 1 tokens reads, its own included."""
        if self.is_state:
            return length * 0 + 1
        return (length - self.region.first_read(length - 1)) // self.region.tokens_per_entry
