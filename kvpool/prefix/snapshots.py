"""Snapshots: at which lengths a row should stop, so that what it keeps there can be published.

That is its recurrent state, and the tails of its windows. A policy is asked once a prompt, with

    prompt   its tokens
    hit      the tokens that are served
    known    those that were found, of which more may be known than can be served
    beyond   units by which an old prompt goes on after `known`, counted up to `FAR`
    pressed  whether anything had to be evicted so far

and answers lengths in (hit, prompt - 1], ascending, each a multiple of the unit.
"""

from typing import Protocol

FAR = 8  # units after a branch beyond which it is no matter how far the old prompt goes on


class Snapshots(Protocol):
    """Where snapshots are to be taken."""

    def stops(
        self, prompt: int, hit: int, known: int, beyond: int = 0, pressed: bool = False
    ) -> tuple[int, ...]:
        """Lengths, ascending."""
        ...


class PromptEnd:
    """The last length that a repetition of the prompt can hit, and where it left a known prompt."""

    def __init__(self, unit: int):
        self.unit = unit

    def stops(self, prompt, hit, known, beyond=0, pressed=False) -> tuple[int, ...]:
        """See the module."""
        end = (prompt - 1) // self.unit * self.unit
        return _within(hit, end, (known, end))


class Every:
    """Every so many tokens; a multiple of the unit."""

    def __init__(self, tokens: int, unit: int):
        if tokens <= 0 or tokens % unit:
            raise ValueError(f"tokens: wanted a multiple of the unit, {unit}, got {tokens}")
        self.tokens = tokens

    def stops(self, prompt, hit, known, beyond=0, pressed=False) -> tuple[int, ...]:
        """See the module."""
        return tuple(range((hit // self.tokens + 1) * self.tokens, prompt, self.tokens))


class Auto:
    """As `PromptEnd`, and one more shortly before the end of the prompt, where that pays.

    The next prompts may leave this one shortly before its end: other questions to one document, or
    a last answer asked for again. How often they leave it so many units before is learned. One
    snapshot at a distance serves all branches nearer to the end. It pays when the bytes of
    blocks that it is expected to make useful, over its own bytes, come near to the share of all
    blocks that is used again, which is what those bytes would earn as blocks. Half of that is near
    enough: eviction drops what turns out to be useless, and only a copy was lost. While
    nothing was evicted memory costs nothing, and one is taken two units before the end.

    Args:
      block_bytes: what a unit of tokens costs in the groups that keep everything.
      snapshot_bytes: what a snapshot costs, with the tails of the windows there.
    """

    def __init__(self, unit: int, block_bytes: int, snapshot_bytes: int):
        self.unit = unit
        self._ratio = block_bytes / max(1, snapshot_bytes)
        self._prompts = 0
        self._left = [0] * (FAR + 1)  # prompts that left another so many units before its end
        self._tokens = self._known = 0

    def stops(self, prompt, hit, known, beyond=0, pressed=False) -> tuple[int, ...]:
        """See the module."""
        self._prompts += 1
        self._tokens += prompt
        self._known += known
        went_along = known > beyond * self.unit  # not only a common beginning
        self._left[min(beyond, FAR)] += went_along
        end = (prompt - 1) // self.unit * self.unit
        back = self._best((end - hit) // self.unit) if pressed else 2
        return _within(hit, end, (known, end - back * self.unit, end))

    def _best(self, span: int) -> int:
        """Units before the end at which one more snapshot pays best; 0 where none does."""
        best, most = 0, self._known / self._tokens / 2
        chance = 0.0
        for back in range(1, min(FAR, span)):
            chance += self._left[back] / self._prompts
            gain = chance * (span - back) * self._ratio
            if gain > most:
                best, most = back, gain
        return best


def _within(hit: int, end: int, lengths) -> tuple[int, ...]:
    return tuple(sorted({length for length in lengths if hit < length <= end}))
