"""HostPool: which blocks of one kind of host memory are free, as an immutable value.

A pool is never changed: taking and giving make another one, which counts once its group has put it
in the place of the old. So whatever is planned and then not done leaves nothing to undo.
"""

import copy

from kvpool.buffers import count
from kvpool.status import SpecError


class HostPool:
    """Blocks 0..num_blocks-1 of host memory, all free at first.

    Args:
      num_blocks: at least 0.
      block_bytes: bytes of a block, for accounting.
      block_tokens: tokens that a block covers, where it covers tokens; pools whose blocks go
        together have to agree on it.
      multiple: blocks are handed out so many at a time, e.g. as many as make one stored value.

    Raises:
      SpecError: for a number that is none, or blocks that are no whole multiple.
    """

    def __init__(
        self,
        num_blocks: int,
        block_bytes: int = 0,
        block_tokens: int | None = None,
        multiple: int = 1,
    ):
        self.num_blocks = count("num_blocks", num_blocks)
        self.block_bytes = count("block_bytes", block_bytes)
        self.block_tokens = None if block_tokens is None else count("block_tokens", block_tokens, 1)
        self.multiple = count("multiple", multiple, 1)
        if self.num_blocks % self.multiple:
            raise SpecError(
                f"num_blocks: wanted a multiple of {self.multiple}, got {self.num_blocks}"
            )
        self._free = self.num_blocks
        self._fresh = 0  # blocks from here on were never handed out
        # What was given back, newest first: (ids, how many of them are taken again, the rest).
        self._back: tuple | None = None

    @property
    def free(self) -> int:
        """Blocks that can be taken."""
        return self._free

    def take(self, number: int) -> tuple["HostPool", tuple[int, ...]]:
        """(the pool without them, ids) of `number` free blocks; the caller knows there are enough.

        Costs what is taken, not what is free.
        """
        ids: tuple[int, ...] = ()
        back = self._back
        while back is not None and len(ids) < number:
            chunk, start, rest = back
            stop = min(len(chunk), start + number - len(ids))
            ids += chunk[start:stop]
            back = rest if stop == len(chunk) else (chunk, stop, rest)
        fresh = self._fresh + number - len(ids)
        ids += tuple(range(self._fresh, fresh))
        return self._with(self._free - number, fresh, back), ids

    def give(self, ids: tuple[int, ...]) -> "HostPool":
        """The pool with these blocks free again; the caller knows that they are its own."""
        if not ids:
            return self
        return self._with(self._free + len(ids), self._fresh, (ids, 0, self._back))

    def free_ids(self) -> list[int]:
        """All free blocks, for checks."""
        ids, back = list(range(self._fresh, self.num_blocks)), self._back
        while back is not None:
            chunk, start, back = back
            ids += chunk[start:]
        return ids

    def _with(self, free, fresh, back) -> "HostPool":
        pool = copy.copy(self)
        pool._free, pool._fresh, pool._back = free, fresh, back
        return pool
