"""Snapshots: at which lengths a row should stop, so that what it keeps there can be published."""


class PromptEnd:
    """The last length that a repetition of the prompt can hit, and where it left a known prompt."""

    def __init__(self, unit: int):
        self.unit = unit

    def stops(self, prompt: int, hit: int, known: int) -> tuple[int, ...]:
        """Lengths in (hit, prompt - 1], ascending."""
        end = (prompt - 1) // self.unit * self.unit
        return tuple(sorted({length for length in (known, end) if hit < length <= end}))
