"""Making room: blocks of the cache become free."""

from collections.abc import Mapping

from kvpool.prefix import needs, publish
from kvpool.prefix.holdings import Holdings
from kvpool.prefix.tree import Kept
from kvpool.state import State


def make(
    holdings: Holdings,
    state: State,
    need: Mapping[str, int],
    short: Mapping[str, int],
    protected: set[Kept] | None = None,
    most: int | None = None,
) -> tuple[State, dict[str, int]]:
    """Frees blocks until so many are free, or nothing is left to go.

    Args:
      need, short: as `PrefixCache.evict`.
      protected: what stays.
      most: the highest priority that may go; None: any.

    Returns:
      (state, freed {group: blocks}).
    """
    free = publish.free_of_pools(state)
    wanted = needs.wanted(state.plan, free, need, short)
    freed = dict.fromkeys(holdings.held, 0)
    while True:
        lacking = [want - have for want, have in zip(wanted, free, strict=True)]
        holders = publish.holders_of_pools(state) if max(lacking) > 0 else []
        gone = holdings.make_room(lacking, holders, protected or set(), freed, most)
        if not gone:
            return state, freed
        holdings.watcher.going(gone)
        state = publish.drop(state, holdings.places, gone)
        free = publish.free_of_pools(state)
