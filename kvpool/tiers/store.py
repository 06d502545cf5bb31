"""Store: blocks on disk or in an object store, keyed by the digest of what they hold.

A store can only help. What it cannot give, for whatever reason, is a miss; what it cannot take is
not stored; and it says so once. Bytes that come back are the ones that were put there.
"""

import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.buffers import count
from kvpool.spec import CacheSpec
from kvpool.status import SpecError
from kvpool.tiers import values
from kvpool.tiers.pending import Counts, Key, Prefetch, Put, StoreBooks
from kvpool.tiers.store_limit import StoreLimit
from kvpool.tiers.trouble import Trouble

# A store that does not answer is to be given up within the deadline, not within minutes.
_FEW_RETRIES = {"max_retries": 2, "initial_delay": "50ms", "max_delay": "500ms"}
_CONTEXT = {
    "s3": {"s3_request_retries": _FEW_RETRIES},
    "gcs": {"gcs_request_retries": _FEW_RETRIES},
}


class Store:
    """Blocks of one spec in a place that processes share and that outlives them.

    One thread uses it at a time; what it starts runs by itself.

    Args:
      where: a directory, or a URL as TensorStore knows it: file://, s3://, gs://, memory://.
      spec: whose blocks these are.
      layout, layers, heads, model: as in `values.namespace`; stores that differ in any of them
        never see each other's blocks.
      limit_bytes: the store's size, above which the blocks unused for longest go.
      timeout_s: for one read or write, after which the store counts as failed.
      retry_s: seconds for which a store that failed is not asked again.
      pending_bytes: of writes on their way; what comes beyond is not stored.
      options: more members of TensorStore's JSON for the place, e.g. {"endpoint": ...} of S3.

    Raises:
      ModuleNotFoundError: without the extra `storage`.
      SpecError: for a place that makes no sense or sizes that are none.
    """

    def __init__(
        self,
        where: str | os.PathLike,
        spec: CacheSpec,
        *,
        layout: str = "page_first",
        layers: tuple[int, int] | None = None,
        heads: tuple[int, int] | None = None,
        model: str = "",
        limit_bytes: int | None = None,
        timeout_s: float = 5.0,
        retry_s: float = 30.0,
        pending_bytes: int = 256 << 20,
        options: Mapping[str, Any] | None = None,
    ):
        if limit_bytes is not None:
            limit_bytes = count("limit_bytes", limit_bytes, 1)
        space = values.namespace(spec, layout=layout, layers=layers, heads=heads, model=model)
        self._sizes = {group.name: group.bytes_per_block for group in spec.groups}
        self._pending_bytes = pending_bytes
        self._kv = _open(where, options)
        trouble = Trouble(f"store {os.fspath(where)}", retry_s)
        self._books = StoreBooks(space, timeout_s, trouble, StoreLimit(limit_bytes))
        self._writes: deque[Put] = deque()
        self._underway = 0  # bytes of those
        self._told = 0  # blocks dropped before the last flush
        self._deletes: list = []  # a deletion that nobody waits for would be called off

    @property
    def counts(self) -> Counts:
        """Hits, misses, blocks written, dropped and evicted so far."""
        return self._books.counts

    def put(self, group: str, digest: bytes, block) -> "Put":
        """Starts to store a block.

        Args:
          digest: at least 8 bytes that name what the block holds.
          block: an array of the group's bytes_per_block bytes; it is copied at once.

        Returns:
          A Put. The block is stored once its `done` says so, and not before.

        Raises:
          SpecError: for an unknown group, another size, a digest that is none.
        """
        key, size = self._key(group, digest)
        payload = np.ascontiguousarray(block).view(np.uint8).reshape(-1).data
        if len(payload) != size:
            raise SpecError(f"block: wanted {size} bytes of {group!r}, got {len(payload)}")
        self._settle()
        stored = size + values.OVERHEAD
        too_much = self._underway + stored > self._pending_bytes
        if too_much:
            self._books.trouble.note(
                "slow", "takes blocks more slowly than they come; some are left"
            )
        over = self._books.limit.limit is not None and stored > self._books.limit.limit
        if too_much or over or self._books.trouble.is_down("write"):
            self._books.trouble.say()
            return Put(self._books, key, stored, None)
        self._make_room(stored)
        value = values.pack(self._books.space, key, payload)
        put = Put(self._books, key, stored, self._ask("write", self._kv.write, key, value))
        self._books.limit.used(key, stored)
        self._writes.append(put)
        self._underway += stored
        self._books.trouble.say()
        return put

    def get(self, group: str, digest: bytes) -> np.ndarray | None:
        """The block's bytes u8[bytes_per_block], read-only, or None for a miss.

        Raises:
          SpecError: as `put`.
        """
        return self.prefetch([(group, digest)]).result()[group, digest]

    def prefetch(self, keys: Iterable[Key], deadline_s: float | None = None) -> "Prefetch":
        """Starts to read blocks.

        Args:
          keys: (group, digest) each.
          deadline_s: from now; what has not come by then is a miss. None: the store's timeout.

        Raises:
          SpecError: as `put`.
        """
        named = {key: self._key(*key) for key in keys}
        deadline = time.monotonic() + (self._books.timeout_s if deadline_s is None else deadline_s)
        down = self._books.trouble.is_down("read")
        reads = {
            key: (full, size, None if down else self._ask("read", self._kv.read, full))
            for key, (full, size) in named.items()
        }
        return Prefetch(self._books, reads, deadline, patient=deadline_s is None)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Waits for all writes; whether all that was put since the last flush is stored."""
        deadline = time.monotonic() + (self._books.timeout_s if timeout_s is None else timeout_s)
        stored = [put.wait(deadline - time.monotonic()) for put in tuple(self._writes)]
        self._settle()
        dropped, self._told = self.counts.dropped - self._told, self.counts.dropped
        return all(stored) and not dropped

    def _key(self, group: str, digest: bytes) -> tuple[bytes, int]:
        if group not in self._sizes:
            raise SpecError(f"no group {group!r}; the groups are {', '.join(self._sizes)}")
        if not isinstance(digest, bytes) or len(digest) < 8:
            raise SpecError(f"digest: wanted at least 8 bytes, got {digest!r}")
        size, name = self._sizes[group], digest.hex()
        # The size stands in the key: a listing then says how full the store is.
        path = f"{self._books.space.hex()}/{group}/{size + values.OVERHEAD}/{name[:2]}/{name[2:]}"
        return path.encode(), size

    def _ask(self, verb: str, operation, *arguments):
        """The future of an operation, None where it fails at once."""
        try:
            return operation(*arguments)
        except Exception as error:
            self._books.trouble.failed(verb, error)
            return None

    def _settle(self) -> None:
        """Takes note of the writes that have ended, and of one that takes too long."""
        while self._writes and self._writes[0].ended:
            self._underway -= self._writes.popleft().size
        if self._writes and self._writes[0].age_s > self._books.timeout_s:
            self._books.trouble.failed("write", f"no answer for {self._books.timeout_s:g} s")

    def _make_room(self, size: int) -> None:
        limit, trouble = self._books.limit, self._books.trouble
        if any(
            delete is None or (delete.done() and delete.exception()) for delete in self._deletes
        ):
            limit.doubt()
        self._deletes = [delete for delete in self._deletes if delete and not delete.done()]
        if limit.counts_anew() and not trouble.is_down("read"):
            try:
                found = self._kv.list().result(timeout=self._books.timeout_s)
            except Exception as error:
                trouble.failed("read", error)
            else:
                limit.recount({key: _size_of(key) for key in found})
        for key in limit.make_room(size):
            self._deletes.append(self._ask("write", self._kv.write, key, None))
            self._books.count("evicted")


def _open(where: str | os.PathLike, options: Mapping[str, Any] | None):
    try:
        import tensorstore
        import xxhash  # noqa: F401  # for `values`, and to be missed here and not in mid-write
    except ModuleNotFoundError as error:
        error.msg = f"{error.msg}: a store needs the extra, pip install 'kvpool[storage]'"
        raise
    where = os.fspath(where)
    url = where if "://" in where else Path(where).absolute().as_uri()
    try:
        place = tensorstore.KvStore.Spec(url if url.endswith("/") else f"{url}/").to_json()
        place = {**place, "context": _CONTEXT.get(place["driver"], {}), **(options or {})}
        return tensorstore.KvStore.open(place).result()
    except ValueError as error:
        raise SpecError(f"where: got {where!r}: {error}") from error


def _failed(future) -> bool:
    """Whether an operation failed, at once or later; one under way has not."""
    return future is None or (future.done() and future.exception() is not None)


def _size_of(key: bytes) -> int:
    """Bytes of the value, as its key says; 0 for what is none of kvpool's."""
    parts = key.split(b"/")
    return int(parts[2]) if len(parts) == 5 and parts[2].isdigit() else 0
