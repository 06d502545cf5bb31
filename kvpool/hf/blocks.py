"""Blocks of a spec whose windows may be far shorter than its blocks."""

from kvpool.spec import CacheSpec

SMALLEST = 8  # tokens; smaller blocks save little, and a table has a column for each


def short_windows(layers: list, block_size: int, pooling: str) -> CacheSpec:
    """A spec with blocks of `block_size` tokens, but of half a window where that is less.

    A block is held until its last token leaves the window: a window of 8 in blocks of 256 would
    cost 32 times its tokens.
    """
    spec = CacheSpec.from_layers(layers, block_size, pooling)
    halves = {g.name: max(SMALLEST, g.region.span // 2) for g in spec.groups if g.region.span}
    sizes = {name: half for name, half in halves.items() if half < spec.group(name).block_size}
    return CacheSpec.from_layers(layers, block_size, pooling, block_sizes=sizes)
