"""Classes: which visits are told apart by how soon they come again.

By how often the path went on before; then by how many of its blocks were new; then by its length,
both by octaves. A next question of a chat adds few blocks to a path that went on before, and
more follow; most long prompts that are all new stay alone.
"""

KINDS = 4  # paths that went on so many times before: 0, 1, 2 or more
LEFT_OVER = KINDS - 1  # and what a later visit left of a path that it mostly went along
INNER = KINDS  # a snapshot or tail on whose only way on there is a later one


def goes_on(kind: int) -> int:
    """The kind of a visit that goes on from one of this kind."""
    return 1 if kind == LEFT_OVER else min(kind + 1, LEFT_OVER - 1)


def classes_of(kind: int, new: int, blocks: int) -> tuple[tuple[int, ...], ...]:
    """The class of a visit after those that hold it, the one of all visits first."""
    fresh, length = new.bit_length(), blocks.bit_length()
    return (), (kind,), (kind, fresh), (kind, fresh, length)
