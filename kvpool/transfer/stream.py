"""Stream: what one connection of a receiver asks a sender for."""

from kvpool.transfer import wire
from kvpool.transfer.offer import Offer
from kvpool.transfer.parcels import Outline, outline
from kvpool.transfer.plan import TransferPlan
from kvpool.transfer.shards import Shards

_MOST_RANKS = 1 << 12  # of a receiver: what it says is planned for before anything is sent


class Stream:
    """What one connection asks for, or the outcome that it tells of."""

    def __init__(self, receiver: int, listed: Outline, numbers: list[int], hello: dict):
        self.receiver, self.outline, self.numbers = receiver, listed, numbers
        self.outcome = hello.get("outcome")
        self.timeout = wire.seconds("timeout", hello.get("timeout"))
        if self.outcome not in (None, "delivered", "cancelled"):
            raise wire.ProtocolError(f"wanted an outcome, got {self.outcome!r:.80}")

    def is_ready(self, offer: Offer, number: int) -> bool:
        """Whether an offer has all bytes of a parcel."""
        return offer.has(self.outline, self.outline.parcels[number])

    @classmethod
    def of(cls, hello: dict, agreed: TransferPlan, offer: Offer) -> "Stream":
        """The stream of a hello; ProtocolError or SpecError for what cannot be."""
        asked = [hello.get(name) for name in ("receiver", "streams", "stream", "max_bytes")]
        receiver, streams, stream, size = (n if type(n) is int else -1 for n in asked)
        if min(receiver, streams, stream, size) < 0 or stream >= streams:
            raise wire.ProtocolError(f"wanted a rank, streams and a size, got {asked!r:.80}")
        by_layer = hello.get("by_layer") is True
        listed = outline(agreed, offer.rank, receiver, size, by_layer)
        here = wire.bits_from_text(hello.get("here", ""))
        if len(here) != len(listed.parcels):
            raise wire.ProtocolError(f"wanted {len(listed.parcels)} parcels, got {len(here)}")
        wanted = range(stream, len(here), streams)
        numbers = [number for number in wanted if not here[number]]
        return cls(receiver, listed, numbers, hello)


def shards_of(hello: dict) -> Shards:
    """How a receiver says that it is divided; ProtocolError or SpecError for what cannot be."""
    shards = hello.get("shards")
    if not isinstance(shards, list) or len(shards) != 2:
        raise wire.ProtocolError(f"wanted shards, got {shards!r:.80}")
    found = Shards(*shards)
    if found.ranks > _MOST_RANKS:
        raise wire.ProtocolError(f"shards: wanted at most {_MOST_RANKS} ranks, got {shards!r:.80}")
    return found
