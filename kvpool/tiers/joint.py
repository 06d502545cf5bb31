"""Joint: what device and host have of a prompt together, and what the device lacks of it.

The longest hit is found as the cache finds its own (`prefix.match`), over nodes that name the
host's block wherever the device has none. So it is the longest that every group can be
restored at: all blocks of those that keep all, whole tails of windows, a snapshot just there.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from kvpool.prefix import keys, match
from kvpool.prefix.keys import Salt
from kvpool.prefix.match import Used
from kvpool.prefix.places import Places
from kvpool.prefix.tree import Kept, Node, Tree
from kvpool.tiers.host_prefixes import HostBlock, HostPrefixes


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The longest beginning of a prompt that device and host can serve together."""

    length: int  # tokens
    lacking: tuple[tuple[int, HostBlock], ...]  # what the device lacks of it: (unit, block)
    used: Used = dataclasses.field(repr=False)  # what it reads on the device
    chain: list[Node] = dataclasses.field(repr=False)
    raw: bytes = dataclasses.field(repr=False)
    salt: Salt = dataclasses.field(repr=False)


def chain_of(tree: Tree, host: HostPrefixes, salt: Salt, raw: bytes, units: int) -> list[Node]:
    """A node for each unit of a prompt, as far as one of both has all that keeps all.

    They are none of the tree's; `kept` has a Kept, a HostBlock or None in each place.
    """
    nodes = tree.walk(salt, raw, units)
    chain = [
        joined(node.key, [one or host.get(node.key, at) for at, one in enumerate(node.kept)])
        for node in nodes
    ]
    key = nodes[-1].key if nodes else tree.namespace(salt)
    for after in following(tree.places, key, raw, len(nodes), units):
        kept = [host.get(after, place) for place in range(len(tree.places.of_place))]
        if lacks_whole(tree.places, kept):
            break
        chain.append(joined(after, kept))
    return chain


def following(places: Places, key: bytes, raw: bytes, first: int, units: int) -> Iterator[bytes]:
    """The keys of a prompt's units from `first` on, `key` that of the one before."""
    stride = places.unit * keys.TOKEN_BYTES
    for at in range(first * stride, units * stride, stride):
        key = keys.digest(key + raw[at : at + stride])
        yield key


def joined(key: bytes, kept: list[Any]) -> Node:
    """A node outside the tree."""
    node = Node(None, b"", key, 0)
    node.kept = kept
    return node


def on_host(node: Node) -> list[HostBlock]:
    """The host's blocks that a node of a chain names."""
    kept: list[Any] = node.kept
    return [one for one in kept if isinstance(one, HostBlock)]


def lacks_whole(places: Places, kept: list[Any]) -> bool:
    """Whether a block of a group that keeps all is missing."""
    return any(kept[place] is None for group in places.whole for place in group.places)


def longest(places: Places, chain: list[Node], limit: int, salt: Salt, raw: bytes) -> Found:
    """What a chain can serve up to `limit` tokens."""
    length, _ = match.longest(places, chain, limit)
    used = match.used_by(places, chain, length)
    reads: set[Any] = {one for of_group in used for one in of_group}
    lacking = tuple(
        (unit, one)
        for unit, node in enumerate(chain[: length // places.unit])
        for one in on_host(node)
        if one in reads
    )
    on_device = tuple(tuple(one for one in some if isinstance(one, Kept)) for some in used)
    return Found(length, lacking, on_device, chain, raw, salt)
