"""Faults for the tests of the tiers: calls that move bytes are counted, and one of them raises.

The blocks' ways: on the CPU they are read where they lie; those of another device come and go
through chunks, a device buffer each, from and to pinned memory where there is such.
"""

import functools

import jax
import numpy as np

from kvpool.tiers import HostBlocks, copies, host_blocks

WAYS = ("where they lie", "through chunks", "through chunks to pinned memory")


class Fault(Exception):
    """What a call raises that fails."""


def go(way, monkeypatch):
    """Makes every copy take this way."""
    if way != WAYS[0]:
        monkeypatch.setattr(copies, "_platform", lambda _: "another")
    if way == WAYS[2]:
        pinned = host_blocks.pinned_memory
        monkeypatch.setattr(host_blocks, "_memory", lambda size, _: pinned(size, jax.devices()[0]))


class Faults:
    """Counts calls; the one that it is armed for raises, or answers something else.

    Args:
      answers: {function name: what it answers in the place of raising}.
    """

    def __init__(self, monkeypatch, **answers):
        self._patch, self._answers = monkeypatch, answers
        self.names: list[str] = []  # of the calls since it was armed
        self._at: int | None = None

    def arm(self, at):
        """Call number `at` from now fails; None: no call does."""
        self.names, self._at = [], at

    @property
    def failed(self) -> bool:
        """Whether the call it was armed for came."""
        return self._at is not None and len(self.names) > self._at

    def of(self, name, function):
        @functools.wraps(function, updated=())
        def run(*args, **kwargs):
            if self._at is not None:
                self.names.append(name)
                if len(self.names) == self._at + 1:
                    if name in self._answers:
                        return self._answers[name](*args)
                    raise Fault(name)
            return function(*args, **kwargs)

        return run

    def wrap(self, owner, *names):
        for name in names:
            self._patch.setattr(owner, name, self.of(name, getattr(owner, name)))

    def wrap_copies(self):
        """Every step of every copy, on whichever way."""
        self.wrap(HostBlocks, "put", "put_one", "get", "get_layer", "seen_by")
        self.wrap(copies, "host_view")
        self.wrap(jax, "device_put")
        export = self.of("export", copies._export)
        self._patch.setattr(copies, "_export", lambda *a, **named: Chunk(export(*a, **named), self))
        for name, imports in (("data", copies._IMPORT_DATA), ("seen", copies._IMPORT_SEEN)):
            for donate, run in tuple(imports.items()):
                self._patch.setitem(imports, donate, self.of(name, run))


class Chunk:
    """A chunk on its way to the host, which may fail at any time."""

    def __init__(self, chunk, faults):
        self.copy_to_host_async = faults.of("send", chunk.copy_to_host_async)
        self.is_ready = chunk.is_ready
        self._arrive = faults.of("arrive", lambda: np.asarray(chunk))

    def __array__(self, *_, **__):
        return self._arrive()
