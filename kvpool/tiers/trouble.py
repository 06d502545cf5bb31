"""Trouble: what is wrong with a store, said once, and when it is worth asking it again."""

import threading
import time
import warnings


class StoreWarning(UserWarning):
    """A store that cannot be read or written, or a value in it that is not what it should be."""


class Trouble:
    """Collects what went wrong, in any thread, until the caller's own one says it.

    Args:
      where: the store, as messages call it.
      retry_s: seconds for which a store that failed is not asked again.
    """

    def __init__(self, where: str, retry_s: float):
        self._where, self._retry_s = where, retry_s
        self._lock = threading.Lock()
        self._said: set[str] = set()
        self._to_say: list[str] = []
        self._down_until = {"read": 0.0, "write": 0.0}

    def is_down(self, verb: str) -> bool:
        """Whether "read" or "write" failed a moment ago."""
        return time.monotonic() < self._down_until[verb]

    def failed(self, verb: str, error: BaseException | str) -> None:
        """The store could not be read or written: it is left alone for a while."""
        self._down_until[verb] = time.monotonic() + self._retry_s
        what = str(error).strip() or type(error).__name__
        without = "every read is a miss" if verb == "read" else "nothing is stored"
        self.note(verb, f"cannot {verb}, {without} for {self._retry_s:g} s at a time: {what}")

    def note(self, kind: str, message: str) -> None:
        """Something to say once for each kind."""
        with self._lock:
            if kind not in self._said:
                self._said.add(kind)
                self._to_say.append(message)

    def say(self) -> None:
        """Warns of what is new, in the thread that calls; raises where warnings are errors."""
        with self._lock:
            messages, self._to_say = self._to_say, []
        for message in messages:
            warnings.warn(f"{self._where}: {message}", StoreWarning, stacklevel=3)
