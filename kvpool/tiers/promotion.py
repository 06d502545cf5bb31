"""Promotion: blocks of a prompt on their way from the host into a cache's blocks of the device."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from kvpool import block_pool
from kvpool.prefix import match, publish
from kvpool.prefix.holdings import Holdings
from kvpool.prefix.keys import Salt
from kvpool.prefix.match import Used
from kvpool.prefix.tree import Kept, Node
from kvpool.state import State
from kvpool.storage import Storage
from kvpool.tiers.copies import Loading, pieces_of
from kvpool.tiers.host_prefixes import HostBlock, HostPrefixes, let_go
from kvpool.tiers.host_tier import HostTier
from kvpool.tiers.joint import Found, on_host
from kvpool.tiers.trouble import Trouble


@dataclasses.dataclass(eq=False)
class Promotion:
    """A hit that is being made: its blocks on the device are held, and in no table yet."""

    found: Found
    fresh: list[tuple[int, Kept]]  # (unit, block of the device)
    reading: list[HostBlock]
    _loading: Loading

    @property
    def done(self) -> bool:
        """Whether all bytes are there."""
        return self._loading.done

    @property
    def layers_to_come(self) -> frozenset[int]:
        """The layers of the model that still lack something."""
        return self._loading.layers_to_come

    def receive(self, storage: Storage, donate: bool = False, wait: bool = False) -> Storage:
        """Moves the copy on, as `copies.Loading.receive`."""
        return self._loading.receive(storage, donate, wait)


def hold(found: Found) -> list[HostBlock]:
    """Keeps every block of the host that the prompt has from going, until `let_go`."""
    reading = [one for node in found.chain for one in on_host(node)]
    for block in reading:
        block.readers += 1
    return reading


def take(state: State, counts: dict[str, int]):
    """Free blocks of each group, held as a cache holds them.

    Returns:
      (state, {group: ids}, None), or (the state as it was, None, {group: blocks that are short}).
    """
    groups = state.plan.spec.groups
    each = np.array([counts.get(group.name, 0) for group in groups], np.int32)
    if any(each > [state.plan.columns(group) for group in groups]):
        raise ValueError(f"counts: wanted what one row can read, got {counts}")
    taken, ids, fits, short = _take(state, each)
    if not fits:
        return state, None, {g.name: int(s) for g, s in zip(groups, short, strict=True)}
    columns = np.cumsum([state.plan.columns(group) for group in groups])[:-1]
    parts = zip(groups, np.split(np.asarray(ids), columns), each, strict=True)
    return taken, {group.name: part[:count].tolist() for group, part, count in parts}, None


@jax.jit
def _take(state, counts):
    plan = state.plan
    widths = [plan.columns(group) for group in plan.spec.groups]
    pools = jnp.asarray(np.repeat(plan.pool_of, widths), jnp.int32)
    number = np.concatenate([np.arange(width, dtype=np.int32) for width in widths])
    wanted = jnp.asarray(number) < counts[np.repeat(np.arange(len(widths)), widths)]
    of_pool = np.array(plan.pool_of)
    asked = jnp.zeros(len(plan.pool_sizes), jnp.int32).at[of_pool].add(counts)
    fits = block_pool.fit(state.pool, asked)
    short = block_pool.shortfall(state.pool, asked)[of_pool]
    pool, ids = block_pool.allocate(state.pool, pools, wanted & fits)
    pool = block_pool.keep(pool, pools, ids)
    return dataclasses.replace(state, pool=pool), ids, fits, short


def publish_in(holdings: Holdings, promotion: Promotion) -> list[Kept]:
    """Puts what came into the tree; what finds no place there any more.

    That is what others published meanwhile, and what lies behind something that went meanwhile.
    """
    tree, places, found = holdings.tree, holdings.places, promotion.found
    own: dict[int, dict[int, Kept]] = {}
    for unit, kept in promotion.fresh:
        own.setdefault(unit, {})[kept.place] = kept
    whole = [place for group in places.whole for place in group.places]
    node: Node = tree.root(found.salt)
    nodes = []
    for unit in range(found.length // places.unit):
        child = next(iter(tree.walk(found.salt, found.raw, unit + 1, node)), None)
        if child is None:
            mine = own.get(unit, {})
            if any(place not in mine for place in whole):
                break
            child = tree.grow(node, found.raw)
            for place in whole:
                holdings.keep(child, place, mine.pop(place).block)
        node = child
        nodes.append(node)
    # As a row's: of windows the last block first, then the snapshot.
    for groups in (places.windows, places.states):
        for unit, at in reversed([*enumerate(nodes)]):
            for place in (place for group in groups for place in group.places):
                if at.kept[place] is None and place in own.get(unit, {}):
                    holdings.keep(at, place, own[unit].pop(place).block)
    tree.prune(node)
    return [kept for of_unit in own.values() for kept in of_unit.values()]


class Promotions:
    """Makes hits longer by what the host has.

    Args:
      find: (raw, salt, limit) -> Found.
      evict: as `PrefixTier.evict`.
    """

    def __init__(
        self,
        tier: HostTier,
        holdings: Holdings,
        host: HostPrefixes,
        trouble: Trouble,
        find: Callable[..., Found],
        evict: Callable,
    ):
        self._tier, self._holdings, self._host = tier, holdings, host
        self._trouble, self._find, self._evict = trouble, find, evict
        self.count = 0  # blocks published
        self.under_way: set[Promotion] = set()

    def start(self, state: State, storage, raw: bytes, salt: Salt, limit: int, by_layer: bool):
        """(state, Promotion) for the longest hit up to `limit` for which there is room.

        (state, None) where that is what the device has, which nothing of this makes less.
        """
        own = self._own(raw, salt, limit)
        while True:
            found = self._find(raw, salt, limit)
            if not found.lacking:
                return state, None
            reading = hold(found)
            try:
                state, ids, short = self._room(state, storage, found, own)
                if ids is not None:
                    return state, self._promotion(storage, found, ids, reading, by_layer)
            except BaseException:
                let_go(reading)
                raise
            let_go(reading)
            limit = found.length - self._holdings.places.unit * self._units_short(short)

    def _own(self, raw: bytes, salt: Salt, limit: int) -> Used:
        """What the device's own hit reads."""
        places, tree = self._holdings.places, self._holdings.tree
        chain = tree.walk(salt, raw, limit // places.unit)
        return match.used_by(places, chain, match.longest(places, chain, limit)[0])

    def _room(self, state, storage, found: Found, own: Used):
        """(state, blocks for what the device lacks, None) or (state, None, what is short)."""
        counts: dict[str, int] = {}
        for _, block in found.lacking:
            group = self._host.group_of(block.name)
            counts[group] = counts.get(group, 0) + 1
        while True:
            state, ids, short = take(state, counts)
            if ids is not None:
                return state, ids, None
            # The own hit goes only where that is enough: else it would be lost for nothing.
            both = tuple(a + b for a, b in zip(own, found.used, strict=True))
            protect = dataclasses.replace(found, used=both)
            state, freed = self._evict(state, storage, short=short, protect=protect)
            if not any(freed.values()) and self._would_do(state, found, own, short):
                state, freed = self._evict(state, storage, short=short, protect=found)
            if not any(freed.values()):
                return state, None, short

    def _would_do(self, state, found: Found, own: Used, short: Mapping[str, int]) -> bool:
        """Whether what the own hit reads, and the longer one does not, is as much as is short."""
        holders = publish.holders_of_pools(state)
        stays = {*self._holdings.pins, *(one for some in found.used for one in some)}
        spare = {
            group.name: sum(
                one not in stays and holders[group.pool][one.block] == 1 for one in some
            )
            for group, some in zip(self._holdings.places.groups, own, strict=True)
            if not group.keeps_all
        }
        return all(number <= spare.get(name, 0) for name, number in short.items())

    def _units_short(self, short: Mapping[str, int]) -> int:
        """Units by which a hit has to be shorter at least, where so many blocks lack."""
        whole = self._holdings.places.whole
        lack = max((short[group.name] for group in whole), default=0)
        return max(1, lack // max(1, sum(group.count for group in whole)))

    def _promotion(self, storage, found: Found, ids, reading, by_layer: bool) -> Promotion:
        left = {group: iter(some) for group, some in ids.items()}
        host_ids: dict[str, list[int]] = {group: [] for group in ids}
        fresh = []
        for unit, block in found.lacking:
            group = self._host.group_of(block.name)
            fresh.append((unit, Kept(found.chain[unit], block.place, next(left[group]))))
            host_ids[group].append(block.block)
        self._host.touch(block for _, block in reversed(found.lacking))
        memory, chunk = self._tier.memory, self._tier.chunk_bytes
        pieces = [] if storage is None else pieces_of(memory, ids, host_ids, chunk, by_layer)
        promotion = Promotion(found, fresh, reading, Loading(memory, pieces))
        self.under_way.add(promotion)
        return promotion

    def receive(self, storage, promoting: Promotion, donate: bool):
        """The storage with all, or as much of it as came before something was raised."""
        try:
            while not promoting.done:
                storage, donate = promoting.receive(storage, donate), True
                jax.block_until_ready(storage)
        except Exception as error:
            if any(array.is_deleted() for array in storage.blocks):
                let_go(promoting.reading)
                raise
            self._trouble.note("load", f"blocks cannot be copied to the device: {error}")
        return storage

    def finish(self, state: State, promoting: Promotion) -> State:
        """As `PrefixTier.finish`."""
        self.under_way.discard(promoting)
        let_go(promoting.reading)
        left = [kept for _, kept in promoting.fresh]
        if promoting.done:
            left = publish_in(self._holdings, promoting)
            self.count += len(promoting.fresh) - len(left)
        promoting._loading.end()
        promoting.fresh, promoting.reading = [], []
        return publish.drop(state, self._holdings.places, left)
