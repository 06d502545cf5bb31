"""Variants: the same model on several devices, in another dtype or blocks, without regions."""

import dataclasses
from collections.abc import Callable

from kvpool import pooling as poolings
from kvpool import regions
from kvpool.buffers import Buffer, dtype_name, heads_and_rows, share
from kvpool.regions import Region, positive
from kvpool.spec import CacheSpec
from kvpool.status import SpecError


def per_rank(spec: CacheSpec, ranks: int) -> CacheSpec:
    """What one of `ranks` tensor-parallel ranks keeps.

    Keys and values, with their scales (buffers named `k`, `v`, `k_...`, `v_...`) are divided by
    heads, their first axis; where there are fewer heads than ranks every rank has one, and several
    have the same. Recurrent states are divided by their first axis too, heads or channels, each of
    the `segments` that are joined there for itself: segments with heads of their own, such as the
    groups of Mamba-2's B and C, as keys are. All else, such as a latent or a compressed entry, has
    no heads, and every rank keeps all of it.

    Raises:
      SpecError: for a number of heads or channels that the ranks cannot divide, naming both.
    """
    ranks = positive("ranks", ranks)

    return spec if ranks == 1 else map_regions(spec, lambda region: of_rank(region, ranks))


def of_rank(region: Region, ranks: int) -> Region:
    """What one of `ranks` ranks keeps of a region; SpecError as `per_rank`."""
    buffers, is_state = [], region.kind == regions.STATE
    for b in region.payload:
        if is_divided(region, b):
            whole = b.segments or (b.shape[:1] if is_state else ((b.shape[0], 1),))
            parts = tuple(_part(b.name, segment, ranks) for segment in whole)
            rows = sum(heads * each for heads, each in map(heads_and_rows, parts))
            b = dataclasses.replace(
                b, shape=(rows, *b.shape[1:]), segments=parts if b.segments else ()
            )
        buffers.append(b)
    return dataclasses.replace(region, buffers=tuple(buffers))


def is_divided(region: Region, buffer: Buffer) -> bool:
    """Whether ranks divide the first axis of a buffer; else every rank keeps all of it."""
    of_heads = buffer.name.split("_")[0] in ("k", "v")
    return bool(buffer.shape) and (region.kind == regions.STATE or of_heads)


def _part(name: str, segment: int | tuple[int, int], ranks: int) -> int | tuple[int, int]:
    """What one rank has of a segment: rows as they come, or heads, of which it has at least one."""
    if isinstance(segment, tuple):
        heads, rows = segment
        own = share(heads, ranks)
        if own is None:
            raise SpecError(f"buffer {name!r}: {heads} heads cannot be divided among {ranks} ranks")
        return own, rows
    if segment % ranks:
        raise SpecError(
            f"buffer {name!r}: {segment} heads or channels cannot be divided among {ranks} ranks"
        )
    return segment // ranks


def with_dtype(spec: CacheSpec, dtype: str) -> CacheSpec:
    """The spec with its 16-bit floating-point entries of tokens in another dtype.

    Scales, float32 compressor states and recurrent states keep theirs. A dtype of 8 bits brings no
    scales of its own.

    Raises:
      SpecError: for an unknown dtype, with those that there are.
    """

    dtype = dtype_name("dtype", dtype)

    def cast(region: Region) -> Region:
        if region.kind == regions.STATE:
            return region
        codes = {b.dtype for b in region.payload if b.dtype.startswith("float8")}
        if codes and codes != {dtype}:
            raise SpecError(f"dtype: wanted {codes.pop()}, whose layout the spec has, got {dtype}")
        if codes:
            return region
        wide = ("bfloat16", "float16")
        payload = [
            dataclasses.replace(b, dtype=dtype) if b.dtype in wide else b for b in region.payload
        ]
        return dataclasses.replace(region, buffers=tuple(payload))

    return map_regions(spec, cast)


def without_regions(spec: CacheSpec) -> CacheSpec:
    """What a cache without regions keeps: windows and chunks become the whole past.

    A window with a buffer `kv` is the state of a compressor and not attention's past; it stays.
    """

    def whole(region: Region) -> Region:
        if not region.span or any(b.name == "kv" for b in region.buffers):
            return region
        return dataclasses.replace(region, retention=regions.ALL)

    return map_regions(spec, whole)


def with_window_blocks(spec: CacheSpec, share: float = 1 / 16) -> CacheSpec:
    """The spec with blocks of no more than that share of the window in its window groups.

    A block is held until its last token leaves the window, so a window of W tokens holds up to
    nearly two blocks more. Blocks are halved, down to one token; those that are short enough stay.

    Raises:
      SpecError: for a share that is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise SpecError(f"share: wanted above 0 and at most 1, got {share!r}")
    sizes = {}
    for group in spec.groups:
        if not group.is_state:
            sizes[group.name] = size = group.block_size
            while group.region.kind == regions.WINDOW and size > max(1, share * group.region.span):
                sizes[group.name] = size = size // 2
    return CacheSpec.from_layers(
        spec.layers, spec.block_size, spec.pooling, block_sizes=sizes, drafts=spec.drafts
    )


def with_pooling(spec: CacheSpec, pooling: str) -> CacheSpec:
    """The spec with another pooling; "shared" makes blocks longer where that lets groups share.

    Raises:
      SpecError: for an unknown pooling, with those that there are.
    """
    sizes = {group.name: group.block_size for group in spec.groups if not group.is_state}
    if pooling == poolings.SHARED:
        sizes = poolings.equal_sizes(spec.groups, fixed=())
    return CacheSpec.from_layers(
        spec.layers, spec.block_size, pooling, block_sizes=sizes, drafts=spec.drafts
    )


def map_regions(spec: CacheSpec, change: Callable[[Region], Region]) -> CacheSpec:
    """The spec with every region changed; groups whose regions become equal become one.

    A changed group keeps its blocks' tokens; where several become one, those of the first.
    """

    def changed(layer):
        if isinstance(layer, dict):
            return {tag: changed(region) for tag, region in layer.items()}
        return change(layer) if isinstance(layer, Region) else layer

    layers = [changed(layer) for layer in spec.layers]
    result = CacheSpec.from_layers(layers, spec.block_size, spec.pooling, drafts=spec.drafts)
    sizes: dict[str, int] = {}
    for group in result.groups:
        merged = (g for g in spec.groups if change(g.region) == group.region)
        old = next(g for g in merged if set(g.layers) <= set(group.layers))
        if not old.is_state:
            sizes[group.name] = old.block_size
    return CacheSpec.from_layers(
        layers, spec.block_size, spec.pooling, block_sizes=sizes, drafts=spec.drafts
    )
