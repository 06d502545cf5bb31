"""Audit: recomputes what the cache's books must look like, and names what does not."""

import numpy as np

from kvpool.prefix import keys
from kvpool.prefix.holdings import Holdings
from kvpool.prefix.tree import Kept, Node
from kvpool.state import State
from kvpool.status import InvariantError


def check(holdings: Holdings, state: State) -> None:
    """Verifies the tree and what it keeps, in itself and against the state.

    Raises:
      InvariantError: naming the group and the block, or the node's depth.
    """
    for node in holdings.tree.nodes():
        _check_node(holdings, node)
    everything = holdings.everything()
    for group in holdings.places.groups:
        count = sum(holdings.group_of(one) is group for one in everything)
        if count != holdings.held[group.name]:
            raise InvariantError(
                f"group {group.name}: counts {holdings.held[group.name]} cached, has {count}"
            )
    retained = np.asarray(state.pool.retained)
    seen: dict[tuple[int, int], Kept] = {}
    for one in everything:
        name, pool = holdings.group_of(one).name, holdings.group_of(one).pool
        size, start = state.plan.pool_sizes[pool], state.pool.offsets[pool]
        if not 0 <= one.block < size:
            raise InvariantError(f"group {name}: caches block {one.block} of {size}")
        if seen.setdefault((pool, one.block), one) is not one:
            raise InvariantError(f"group {name}: block {one.block} is cached twice")
        if retained[start + one.block] < 1:
            raise InvariantError(f"group {name}: block {one.block} is cached, but not retained")


def _check_node(holdings: Holdings, node: Node) -> None:
    places, parent = holdings.places, node.parent
    if parent is None or parent.find(node.tokens) is not node:
        raise InvariantError(f"a node of depth {node.depth} is not found from its parent")
    if node.depth != parent.depth + 1 or node.key != keys.digest(parent.key + node.tokens):
        raise InvariantError(f"a node of depth {node.depth} has another depth or key")
    lacks = [g.name for g in places.whole for p in g.places if node.kept[p] is None]
    if lacks:
        raise InvariantError(f"group {lacks[0]}: a node of depth {node.depth} has no block")
    if not node.child and not any(node.kept):
        raise InvariantError(f"a node of depth {node.depth} keeps nothing and leads nowhere")
    for place, one in enumerate(node.kept):
        if one is not None and (one.node is not node or one.place != place):
            raise InvariantError(f"group {places.of_place[place].name}: a block is not its node's")
