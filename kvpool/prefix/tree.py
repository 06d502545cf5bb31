"""The tree of cached prompts: a node for every unit of tokens, a child for each way to go on.

A node is found by the very tokens of its unit, from its parent on, so what is found is never a
collision. With groups that keep everything, a node exists just as long as it has all their blocks,
and they leave leaf first. Blocks of windows and snapshots come and go and leave holes.
"""

from collections.abc import Callable, Iterator

from kvpool.prefix import keys
from kvpool.prefix.places import Places


class Node:
    """One unit of tokens after those of its parents."""

    __slots__ = ("children", "depth", "kept", "key", "parent", "tokens")

    def __init__(self, parent: "Node | None", tokens: bytes, key: bytes, num_places: int):
        self.parent = parent  # None: a root, or a node that left the tree
        self.tokens = tokens
        self.key = key
        self.depth: int = parent.depth + 1 if parent else 0  # units up to its end
        self.children: dict[bytes, Node] = {}
        self.kept: list[Kept | None] = [None] * num_places


class Root(Node):
    """No tokens: where the prompts of one salt begin."""

    __slots__ = ("salt",)

    def __init__(self, salt, key: bytes):
        super().__init__(None, b"", key, 0)
        self.salt = salt


class Kept:
    """One block or snapshot that the cache holds; compared by identity."""

    __slots__ = ("block", "node", "place")

    def __init__(self, node: Node, place: int, block: int):
        self.node = node
        self.place = place
        self.block = block


class Tree:
    """The prompts of every salt."""

    def __init__(self, places: Places, namespace: Callable[..., bytes]):
        self.places = places
        self.roots: dict[object, Root] = {}
        self._namespace = namespace
        self._stride = places.unit * keys.TOKEN_BYTES

    def walk(self, salt, raw: bytes, units: int, start: Node | None = None) -> list[Node]:
        """The nodes of the first `units` units of tokens, as far as they exist.

        Args:
          raw: the tokens, as `keys.token_bytes` gives them.
          start: a node of these tokens, after which to begin.
        """
        node: Node | None = start or self.roots.get(salt)
        found: list[Node] = []
        if node is None:
            return found
        stride = self._stride
        for at in range(node.depth * stride, units * stride, stride):
            node = node.children.get(raw[at : at + stride])
            if node is None:
                break
            found.append(node)
        return found

    def root(self, salt) -> Node:
        """The node of no tokens, made where there is none."""
        if salt not in self.roots:
            self.roots[salt] = Root(salt, self._namespace(salt))
        return self.roots[salt]

    def grow(self, parent: Node, raw: bytes) -> Node:
        """A new child of `parent` for the next unit of `raw`."""
        at = parent.depth * self._stride
        tokens = raw[at : at + self._stride]
        key = keys.next_key(parent.key, tokens)
        node = Node(parent, tokens, key, len(self.places.of_place))
        parent.children[tokens] = node
        return node

    def prune(self, node: Node) -> None:
        """Takes out the node, and its parents, as far as they keep nothing and lead nowhere."""
        while node.parent and not node.children and not any(node.kept):
            parent, node.parent = node.parent, None
            del parent.children[node.tokens]
            node = parent
        if isinstance(node, Root) and not node.children:
            self.roots.pop(node.salt, None)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots."""
        waiting: list[Node] = list(self.roots.values())
        while waiting:
            children = waiting.pop().children.values()
            yield from children
            waiting += children
