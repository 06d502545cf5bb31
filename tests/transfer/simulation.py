"""Moves bytes between the arrays of ranks as a plan says; what ranks must hold by definition."""

import numpy as np

from kvpool import regions
from kvpool.transfer import parcels
from kvpool.transfer.shards import rank_groups


def shares(spec, group, shards, rank):
    """For each buffer the rows of its first axis that a rank has, None where it has all of it.

    Written from the definition, row by row, and not from the planner's arithmetic.
    """
    region, found = group.region, []
    for buffer in region.buffers:
        heads = buffer.name.split("_")[0] in ("k", "v")
        if not buffer.shape or not (heads or region.kind == regions.STATE):
            found.append(None)
            continue
        rows, begin = [], 0
        for segment in buffer.segments or (buffer.shape[0],):
            heads, size = segment if isinstance(segment, tuple) else (segment, 1)
            each, copies = max(1, heads // shards), max(1, shards // heads)
            mine = [head for head in range(heads) if head // each == rank // copies]
            rows += [begin + head * size + row for head in mine for row in range(size)]
            begin += heads * size
        found.append(rows)
    return found


def cut_of(group, full, rank_group, owned):
    """A rank's block u8[bytes] of the full block u8[bytes]; padding is 0."""
    out = np.zeros(rank_group.bytes_per_block, np.uint8)
    for layer in range(len(group.layers)):
        for index, (buffer, part) in enumerate(
            zip(group.region.buffers, rank_group.region.buffers, strict=True)
        ):
            entries = 1 if buffer.per_block else group.entries_per_block
            start = layer * group.buffer_offsets[-1] + group.buffer_offsets[index]
            values = full[start : start + entries * buffer.entry_bytes].reshape(entries, -1)
            if owned[index] is not None:
                values = values.reshape(entries, buffer.shape[0], -1)[:, owned[index]]
            start = layer * rank_group.buffer_offsets[-1] + rank_group.buffer_offsets[index]
            assert values.size == entries * part.entry_bytes
            out[start : start + values.size] = values.reshape(-1)
    return out


def ranks_hold(spec, group_index, full, side):
    """{rank: u8[places, bytes]}: what each rank of a side has of a table's blocks u8[M, bytes]."""
    group = spec.groups[group_index]
    rank_group = rank_groups(spec, side.heads)[group_index]
    held = {}
    for rank in range(side.ranks):
        way, head = divmod(rank, side.heads)
        owned = shares(spec, group, side.heads, head)
        mine = full if group.is_state else full[way :: side.context]
        held[rank] = np.stack(
            [cut_of(group, block, rank_group, owned) for block in mine]
            or [np.zeros(rank_group.bytes_per_block, np.uint8)]
        )
    return held


def payload_bytes(group):
    """u8[bytes_per_block]: 1 where a block has payload, 0 where it has padding."""
    mask = np.zeros(group.bytes_per_block, np.uint8)
    for layer in range(len(group.layers)):
        for index, buffer in enumerate(group.region.buffers):
            start = layer * group.buffer_offsets[-1] + group.buffer_offsets[index]
            mask[start : start + buffer.bytes_in_block(group.entries_per_block)] = 1
    return mask


def simulate(plan, seed=0, **options):
    """Moves all parcels of all pairs between arrays of random bytes.

    Asserts that the receiving ranks then hold what they must, that every byte of a sent item is
    written exactly once and no other byte is, and that a byte goes to a receiver at most once.
    """
    random = np.random.default_rng(seed)
    for index, group in enumerate(plan.spec.groups):
        items = plan.items(group.name)
        places = len(items) if group.is_state else group.columns(plan.num_tokens)
        full = random.integers(0, 256, (places, group.bytes_per_block), np.uint8)
        source = ranks_hold(plan.spec, index, full, plan.sender)
        wanted = ranks_hold(plan.spec, index, full, plan.receiver)
        got = {rank: np.zeros_like(blocks) for rank, blocks in wanted.items()}
        written = {rank: np.zeros(blocks.shape, np.int64) for rank, blocks in wanted.items()}
        for sender, receiver in plan.pairs:
            outline = parcels.outline(plan, sender, receiver, **options)
            for parcel in outline.parcels:
                piece = outline.pieces[parcel.piece]
                if piece.group == index:
                    _move(piece, parcel, source[sender], got[receiver], written[receiver])
        _compare(plan, index, items, wanted, got, written)


def _move(piece, parcel, source, target, written):
    layers = range(parcel.first, parcel.last)
    chosen = slice(parcel.start, parcel.stop)
    data = parcels.pack(piece.lane, source[piece.source[chosen]], layers)
    assert data.size == parcel.num_bytes
    places = piece.target[chosen]
    blocks = target[places]
    parcels.unpack(piece.lane, data, blocks, layers)
    target[places] = blocks
    ones = np.zeros(blocks.shape, np.uint8)
    parcels.unpack(piece.lane, np.ones_like(data), ones, layers)
    written[places] += ones


def _compare(plan, index, items, wanted, got, written):
    group, side = plan.spec.groups[index], plan.receiver
    rank_group = rank_groups(plan.spec, side.heads)[index]
    once = payload_bytes(rank_group)
    for rank, blocks in wanted.items():
        way = rank // side.heads
        mine = np.zeros(len(blocks), bool)
        if group.is_state:
            mine[: len(items)] = True
        else:
            mine[[item // side.context for item in items if item % side.context == way]] = True
        np.testing.assert_array_equal(written[rank], mine[:, None] * once)
        np.testing.assert_array_equal(got[rank], blocks * mine[:, None] * once)
