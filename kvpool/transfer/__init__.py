"""Transfer of sequences between caches that are divided among devices in different ways."""

from kvpool.transfer.agreement import Agreement, Disagreement
from kvpool.transfer.keys import Key
from kvpool.transfer.plan import Piece, Span, TransferPlan, plan
from kvpool.transfer.shards import Cut, Lane, Shards

__all__ = [
    "Agreement",
    "Cut",
    "Disagreement",
    "Key",
    "Lane",
    "Piece",
    "Shards",
    "Span",
    "TransferPlan",
    "plan",
]
