"""Arrivals: which parcels a receiving rank has, in whatever order and however often they come."""

import numpy as np

from kvpool.status import SpecError
from kvpool.transfer.parcels import Outline


class Arrivals:
    """What has come of the outlines {sender: Outline} of everyone who sends to a rank."""

    def __init__(self, outlines: dict[int, Outline]):
        self.outlines = outlines
        self._here = {
            sender: np.zeros(len(outline.parcels), bool) for sender, outline in outlines.items()
        }

    def add(self, sender: int, parcel: int) -> bool:
        """Records a parcel; False when it was here already.

        Raises:
          SpecError: for a sender that sends nothing, or a parcel that is none of its own.
        """
        here = self._here.get(sender)
        if here is None or not 0 <= parcel < len(here):
            raise SpecError(f"no parcel {parcel} of sender {sender} is expected")
        first = not here[parcel]
        here[parcel] = True
        return bool(first)

    def here(self, sender: int) -> np.ndarray:
        """bool[parcels]: what has come from one sender."""
        return self._here[sender]

    @property
    def missing(self) -> int:
        """Parcels that have not come yet."""
        return sum(int((~here).sum()) for here in self._here.values())

    @property
    def ready(self) -> bool:
        """Whether all has come, and not before."""
        return not self.missing
