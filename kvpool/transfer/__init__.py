"""Transfer of sequences between caches that are divided among devices in different ways.

`plan` says what has to move, on either side and without a device. Over TCP a `Sender` serves an
`Offer` of each rank, and `fetch` fills the `Inbox` of a receiving rank; `rows` has the bookkeeping
of both sides, and `device` the way over the backend's own transfer server.
"""

from kvpool.transfer import device, rows
from kvpool.transfer.agreement import Agreement, Disagreement
from kvpool.transfer.keys import Key
from kvpool.transfer.offer import Offer
from kvpool.transfer.plan import Piece, Span, TransferPlan, plan
from kvpool.transfer.receiver import Inbox, Refused, TransferError, fetch
from kvpool.transfer.sender import Sender
from kvpool.transfer.shards import Cut, Lane, Shards

__all__ = [
    "Agreement",
    "Cut",
    "Disagreement",
    "Inbox",
    "Key",
    "Lane",
    "Offer",
    "Piece",
    "Refused",
    "Sender",
    "Shards",
    "Span",
    "TransferError",
    "TransferPlan",
    "device",
    "fetch",
    "plan",
    "rows",
]
