"""The tree of cached prompts: a node for every unit of tokens, after the node of those before it.

A node is found by the very tokens of its unit, from a root on, so what is found is never a
collision. With groups that keep everything, a node exists just as long as it has all their blocks,
and they leave leaf first. Blocks of windows and snapshots come and go and leave holes.
"""

from collections.abc import Callable, Iterator

from kvpool.prefix import keys
from kvpool.prefix.places import Places


class Node:
    """One unit of tokens after those of its parents."""

    __slots__ = ("child", "depth", "kept", "key", "others", "parent", "tokens")

    def __init__(self, parent: "Node | None", tokens: bytes, key: bytes, num_places: int):
        self.parent = parent  # None: a root, or a node that left the tree
        self.tokens = tokens
        self.key = key
        self.depth: int = parent.depth + 1 if parent else 0  # units up to its end
        # Most nodes have one child; a dictionary for each costs memory, and time to collect it.
        self.child: Node | None = None
        self.others: dict[bytes, Node] | None = None  # the further children, by their tokens
        self.kept: list[Kept | None] = [None] * num_places

    def find(self, tokens: bytes) -> "Node | None":
        """The child of these tokens."""
        child = self.child
        if child is None or child.tokens == tokens:
            return child
        return self.others.get(tokens) if self.others else None

    def put(self, child: "Node") -> None:
        """One more child."""
        if self.child is None:
            self.child = child
        elif self.others is None:
            self.others = {child.tokens: child}
        else:
            self.others[child.tokens] = child

    def remove(self, child: "Node") -> None:
        """One child fewer."""
        if self.child is not child:
            assert self.others is not None
            del self.others[child.tokens]
        else:
            self.child = self.others.popitem()[1] if self.others else None

    def goes_on(self, most: int) -> int:
        """Units, up to `most`, by which a first way on continues."""
        count, node = 0, self.child
        while node and count < most:
            count, node = count + 1, node.child
        return count


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
        self.namespace = namespace
        self._stride = places.unit * keys.TOKEN_BYTES

    def walk(self, salt, raw: bytes, units: int, start: Node | None = None) -> list[Node]:
        """The nodes of the first `units` units of tokens, as far as they exist.

        Args:
          raw: the tokens, as `keys.token_bytes` gives them.
          start: a node of these tokens, after which to begin.
        """
        node: Node | None = start or self.roots.get(salt)
        nodes: list[Node] = []
        if node is None:
            return nodes
        stride = self._stride
        for at in range(node.depth * stride, units * stride, stride):
            node = node.find(raw[at : at + stride])
            if node is None:
                break
            nodes.append(node)
        return nodes

    def root(self, salt) -> Root:
        """The node of no tokens, made where there is none."""
        if salt not in self.roots:
            self.roots[salt] = Root(salt, self.namespace(salt))
        return self.roots[salt]

    def grow(self, parent: Node, raw: bytes) -> Node:
        """A new node after `parent`, for the next unit of `raw`."""
        at = parent.depth * self._stride
        tokens = raw[at : at + self._stride]
        key = keys.digest(parent.key + tokens)
        node = Node(parent, tokens, key, len(self.places.of_place))
        parent.put(node)
        return node

    def prune(self, node: Node) -> None:
        """Takes out the node, and its parents, as far as they keep nothing and lead nowhere."""
        while node.parent and not node.child and not any(node.kept):
            parent, node.parent = node.parent, None
            parent.remove(node)
            node = parent
        if isinstance(node, Root) and not node.child:
            self.roots.pop(node.salt, None)

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots, parents before children."""
        waiting: list[Node] = list(self.roots.values())
        while waiting:
            node = waiting.pop()
            if node.parent:
                yield node
            if node.child:
                waiting += [node.child, *(node.others or {}).values()]
