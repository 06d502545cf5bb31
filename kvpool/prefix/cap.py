"""Cap: at how many lengths of one path a hit may end, where windows and states decide it."""

from kvpool.prefix import publish
from kvpool.prefix.holdings import Holdings
from kvpool.prefix.tree import Kept, Node
from kvpool.state import State


def keep_to(holdings: Holdings, state: State, node: Node, most: int | None) -> State:
    """The state after snapshots and tails went where one more end at a node is too many.

    Those nearest to it go first, but before them those that only one way leads on from; none with
    something that is pinned or has a priority, which are not counted either. Of a tail what another
    end reads as well stays.
    """
    places = holdings.places
    if most is None or not (places.windows or places.states):
        return state
    gone = _lose_surplus(holdings, node, most)
    holdings.watcher.going(gone)
    return publish.drop(state, places, gone)


def _lose_surplus(holdings: Holdings, node: Node, most: int) -> list[Kept]:
    chain: list[Node] = []
    at = node
    while at.parent:
        chain.append(at)
        at = at.parent
    chain.reverse()
    ends = {depth: _read_at(holdings, chain, depth) for depth in range(1, len(chain) + 1)}
    whole = {depth: [one for one in read if one] for depth, read in ends.items() if all(read)}
    stay = {*holdings.pins, *holdings.priorities}
    before = [depth for depth in sorted(whole, reverse=True) if depth < len(chain)]
    counted = [depth for depth in before if not stay.intersection(whole[depth])]
    counted.sort(key=lambda depth: bool(chain[depth - 1].others))
    surplus = counted[: max(0, len(counted) + 1 - most)]
    stay.update(one for one in ends[len(chain)] if one)
    stay.update(one for depth in whole if depth not in surplus for one in whole[depth])
    return [
        gone
        for depth in surplus
        for one in whole[depth]
        if one not in stay and one.node.kept[one.place] is one
        for gone in holdings.lose(one)
    ]


def _read_at(holdings: Holdings, chain: list[Node], depth: int) -> list[Kept | None]:
    """What a hit that ends at a depth reads of windows and states, None where it is not kept."""
    places = holdings.places
    read: list[Kept | None] = [chain[depth - 1].kept[group.first] for group in places.states]
    for group in places.windows:
        for column in group.needed(depth * places.unit):
            node, place = divmod(column, group.count)
            read.append(chain[node].kept[group.first + place])
    return read
