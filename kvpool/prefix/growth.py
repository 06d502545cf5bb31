"""Growth: what a row adds to the tree."""

from kvpool.prefix.holdings import Holdings
from kvpool.prefix.keys import Salt
from kvpool.prefix.tree import Kept, Node, Tree

Ids = list[list[int]]  # of a row: for each group those of its columns


class Growth:
    """Adds what rows hold, and goes on where a row's last addition ended."""

    def __init__(self, tree: Tree, holdings: Holdings):
        self.tree, self.places, self.holdings = tree, tree.places, holdings
        self._last: dict[int, tuple[bytes, Salt, Node]] = {}

    def add(self, row: int, raw: bytes, salt: Salt, settled: int, ids: Ids):
        """Keeps the row's full blocks that the cache lacks.

        Args:
          raw: the settled tokens' whole units.

        Returns:
          (the node of the last unit, what is kept now and was not).
        """
        units = settled // self.places.unit
        node, new = self._resume(row, raw, salt, units), []
        for child in self.tree.walk(salt, raw, units, node):
            node = child
        while node.depth < units:
            node = self.tree.grow(node, raw)
            for group in self.places.whole:
                new += self._keep(node, group, ids)
        new += self._fill(node, settled, ids)
        self._last[row] = (raw, salt, node)
        return node, new

    def _resume(self, row: int, raw: bytes, salt: Salt, units: int) -> Node:
        """The node at which the row's last addition ended, the root if it has other tokens."""
        if row in self._last:
            before, last_salt, node = self._last[row]
            stays = node.parent and node.depth <= units  # a node that left has no parent
            if stays and salt == last_salt and raw.startswith(before):
                return node
        return self.tree.root(salt)

    def _fill(self, node: Node, settled: int, ids: Ids) -> list[Kept]:
        """Keeps the blocks of windows that the row holds and the cache lacks, up from `node`."""
        new: list[Kept] = []
        windows = self.places.windows
        first = min((g.group.dead_columns(settled) // g.count for g in windows), default=node.depth)
        while node.depth > first and node.parent:
            for group in windows:
                new += self._keep(node, group, ids)
            node = node.parent
        return new

    def _keep(self, node: Node, group, ids: Ids) -> list[Kept]:
        """Keeps the node's blocks of a group that the row holds and the cache lacks."""
        first = (node.depth - 1) * group.count
        return [
            self.holdings.keep(node, place, ids[group.index][column])
            for column, place in enumerate(group.places, first)
            if ids[group.index][column] >= 0 and node.kept[place] is None
        ]
