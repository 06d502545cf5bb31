"""PrefixTier: a prefix cache whose blocks have a second home on the host, and a third in a store.

It takes the cache's place in a server's loop:

    state, storage, hit = prefixes.match(state, storage, prompt, donate=True)
    state, freed = prefixes.evict(state, storage, need, protect=hit)  # where blocks are short
    state, result = kv.admit(state, [row], hit.prefix)                # then kv.copy_blocks
    ...
    state, storage = prefixes.insert(state, storage, tokens, row)
    state = prefixes.send(state, storage)                             # with every step

`match` is the only one that brings anything back, so `hit` is one of the cache, all on the device.
What goes wrong on the way costs hits and no more: a `StoreWarning` of it comes with the next call,
before that changes anything.
"""

from collections.abc import Mapping
from typing import Any

from kvpool.prefix import keys, needs, publish
from kvpool.prefix.holdings import Watcher
from kvpool.prefix.keys import Salt
from kvpool.prefix.match import Hit
from kvpool.prefix.tree import Kept
from kvpool.prefix_cache import PrefixCache
from kvpool.state import State
from kvpool.status import SpecError
from kvpool.storage import Storage
from kvpool.tiers import joint
from kvpool.tiers.fetch import Fetch, digest_of
from kvpool.tiers.host_prefixes import HostBlock, HostPrefixes, PrefixCounts, let_go
from kvpool.tiers.host_tier import HostTier
from kvpool.tiers.joint import Found
from kvpool.tiers.promotion import Promotion, Promotions
from kvpool.tiers.saves import Saves
from kvpool.tiers.store import Store
from kvpool.tiers.trouble import Trouble

POLICIES = WRITE_BACK, WRITE_THROUGH, SECOND_USE = "write_back", "write_through", "second_use"
_NOTHING: Mapping[str, int] = {}


class PrefixTier(Watcher):
    """A prefix cache, a host tier and, where there is one, a store behind it.

    The host tier may serve other things too, such as backups of rows: a prompt's block goes for any
    request, the one unused for longest first, and leaves a hole.

    Args:
      cache: from now on asked only through this.
      store: of the same spec; what comes to the host goes there as well.
      policy: when blocks are copied to the host. WRITE_BACK: what `evict` takes, before it goes,
        and waited for. WRITE_THROUGH: what `insert` publishes, between the steps. SECOND_USE: what
        a hit uses, between the steps; what nobody ever used again is lost.

    Raises:
      SpecError: for a tier of another spec, an unknown policy.
    """

    def __init__(
        self, cache: PrefixCache, tier: HostTier, store: Store | None = None, *,
        policy: str = WRITE_BACK,
    ):  # fmt: skip
        if policy not in POLICIES:
            raise SpecError(f"policy: wanted one of {', '.join(POLICIES)}, got {policy!r}")
        tier.check_plan(cache.holdings.places.plan)
        self.cache, self.tier, self.store, self.policy = cache, tier, store, policy
        self._holdings, self._places = cache.holdings, cache.holdings.places
        self._trouble = Trouble("prefixes on the host", 0.0)
        self._host = HostPrefixes(tier, self._places, self._trouble)
        self._saves = Saves(tier, self._places, self._host, self._trouble, self._arrived)
        self._storage: Storage | None = None  # while the cache may tell of what goes
        self._came: list[Kept] = []
        self._promotions = Promotions(
            tier, self._holdings, self._host, self._trouble, self._found, self._evict
        )
        self._holdings.watcher = self

    def match(
        self,
        state: State,
        storage: Storage | None,
        tokens,
        salt: Salt = None,
        *,
        touch: bool = True,
        deadline_s: float | None = None,
        donate: bool = False,
    ) -> tuple[State, Any, Hit]:
        """The longest beginning of a prompt that device, host and store can serve together.

        What the device lacks of it comes back, into blocks for which others are evicted if need
        be. Where there is no room for all, or a copy fails, the hit is shorter.

        Args:
          storage: None where there are no bytes, as in a simulation.
          tokens, salt, touch: as in `PrefixCache.match`.
          deadline_s: for the store, from now; None: its timeout for each read.
          donate: True: the storage given is used up; go on with the one returned. False: it stays
            good, and costs a copy of the whole of it, in time and memory, when anything comes back.

        Returns:
          (state, storage, Hit), the Hit as `PrefixCache.match` gives it.

        Raises:
          ValueError, SpecError: as `PrefixCache.match`; for a state or storage of another spec.
          Whatever a copy raises that has used up the storage.
        """
        state, promoting = self.start(state, storage, tokens, salt, deadline_s, by_layer=False)
        if promoting is not None:
            storage = self._promotions.receive(storage, promoting, donate)
            state = self.finish(state, promoting)
        hit = self.cache.match(tokens, salt, touch=touch)
        if touch and self.policy == SECOND_USE:
            state = self._saves.start(state, [one for some in hit.used for one in some])
        return state, storage, hit

    def find(self, tokens, salt: Salt = None) -> Found:
        """What device and host have of a prompt together; changes nothing, and holds nothing.

        Raises:
          ValueError: as `PrefixCache.match`.
        """
        raw, salt = keys.token_bytes(tokens), keys.checked_salt(salt)
        return self._found(raw, salt, self._places.last_hit(len(raw) // keys.TOKEN_BYTES))

    def start(
        self,
        state: State,
        storage: Storage | None,
        tokens,
        salt: Salt = None,
        deadline_s: float | None = None,
        by_layer: bool = True,
    ) -> tuple[State, Promotion | None]:
        """A promotion whose bytes the caller moves with `receive`, until `finish`.

        Args:
          storage: the present one, for what is evicted to make room.
          by_layer: the model's first layer comes first, so that `layers_to_come` tells which can
            start.

        Returns:
          (state, Promotion): its blocks at both ends are held. (state, None) where the device has
          all that can be had, or no room for more.

        Raises:
          ValueError, SpecError: as `match`.
        """
        self._trouble.say()
        raw, salt = keys.token_bytes(tokens), keys.checked_salt(salt)
        limit = self._places.last_hit(len(raw) // keys.TOKEN_BYTES)
        self.tier.check_plan(state.plan)
        fetched = self._fetch(raw, salt, limit, deadline_s)
        try:
            return self._promotions.start(state, storage, raw, salt, limit, by_layer)
        finally:
            let_go(fetched)

    def finish(self, state: State, promoting: Promotion) -> State:
        """Publishes what came, for the cache's own `match`; one that is not `done` is given up."""
        return self._promotions.finish(state, promoting)

    def insert(self, state: State, storage, tokens, row: int, salt: Salt = None, *, priority=0):
        """As `PrefixCache.insert`."""
        self._trouble.say()
        self._storage = storage
        try:
            state, storage = self.cache.insert(state, storage, tokens, row, salt, priority=priority)
        finally:
            self._storage = None  # or it would be alive when it is donated
        came, self._came = self._came, []
        return (self._saves.start(state, came) if came else state), storage

    def evict(
        self,
        state: State,
        storage: Storage | None,
        need: Mapping[str, int] = _NOTHING,
        *,
        short: Mapping[str, int] = _NOTHING,
        protect: Hit | Any = None,
    ):
        """As `PrefixCache.evict`; what goes is copied to the host as the policy says.

        Blocks on their way to the host are not free before they have arrived: where the others
        are not enough, they are waited for.

        Where a copy fails they go all the same, as without a host: a row needs the room.

        Args:
          storage: the present one; it is only read.
        """
        self._trouble.say()
        return self._evict(state, storage, need, short=short, protect=protect)

    def _evict(self, state, storage, need=_NOTHING, *, short=_NOTHING, protect=None):
        if not self._saves.under_way:
            return self._evict_once(state, storage, need, short, protect)
        wanted = needs.wanted(self._places.plan, publish.free_of_pools(state), need, short)
        state, freed = self._evict_once(state, storage, need, short, protect)
        free = publish.free_of_pools(state)
        if all(have >= want for have, want in zip(free, wanted, strict=True)):
            return state, freed
        state = self._saves.move_on(state, storage, wait=True)
        for group in self._places.groups:  # one by one: those of one pool would add up
            need = {group.name: wanted[group.pool]}
            state, more = self._evict_once(state, storage, need, _NOTHING, protect)
            freed = {name: count + more[name] for name, count in freed.items()}
        return state, freed

    def _evict_once(self, state, storage, need, short, protect):
        self._storage = storage
        try:
            return self.cache.evict(state, need, short=short, protect=protect)
        finally:
            self._storage = None

    def send(self, state: State, storage: Storage | None, wait: bool = False) -> State:
        """Moves copies to the host on by a chunk, or waits for all; the state without what came."""
        self._trouble.say()
        return self._saves.move_on(state, storage, wait)

    def save_all(self, state: State, storage: Storage | None, timeout_s: float | None = None):
        """At the end of a server, for the next: all goes to the host and the store, waited for.

        Returns:
          (state, whether all is stored; True without a store), within `timeout_s` of the store.
        """
        self._trouble.say()
        state, lost = self._saves.move_on(state, storage, wait=True), self._saves.lost
        for node in self._holdings.tree.nodes():  # not at once: the host may be too small
            self._saves.now(storage, [one for one in node.kept if one])
        stored = self.store is None or self.store.flush(timeout_s)
        return state, stored and self._saves.lost == lost

    def follow(self, moves: Mapping[str, tuple]) -> None:
        """As `PrefixCache.follow`.

        Raises:
          SpecError: where blocks are on their way to the host or from it, and would come to where
            they were; go on with what was before `compact`.
        """
        if self._saves.under_way or self._promotions.under_way:
            raise SpecError("moves: blocks are on their way; send(wait=True), finish(), compact()")
        self.cache.follow(moves)

    def clear(self, state: State) -> State:
        """Lets go of everything on the device and the host; the store keeps what it has."""
        state = self.cache.clear(self._saves.give_up(state))
        for block in self._host.everything():
            if not block.readers:
                self._host.drop(block)
        return state

    def counts(self) -> PrefixCounts:
        """What was done so far, and what the host has now."""
        saves, host = self._saves, sum(block.ready for block in self._host.everything())
        return PrefixCounts(saves.saved, saves.lost, self._promotions.count, host)

    def check(self, state: State) -> None:
        """Verifies the books of device and host, as `PrefixCache.check`; for tests."""
        self.cache.check(state)
        self.tier.pools.check()
        self._saves.check(state)

    def came(self, kept: list[Kept]) -> None:
        """The cache holds these now."""
        if self.policy == WRITE_THROUGH:
            self._came += kept

    def going(self, kept: list[Kept]) -> None:
        """The cache lets go of these."""
        if self.policy == WRITE_BACK:
            self._saves.now(self._storage, kept)
        self._host.touch_kept(kept)

    def _arrived(self, block: HostBlock) -> None:
        if self.store is not None:
            group = self._host.group_of(block.name)
            data = self.tier.memory[group].get([block.block])
            self.store.put(group, digest_of(self._places, block.name), data)

    def _found(self, raw: bytes, salt: Salt, limit: int) -> Found:
        units = limit // self._places.unit
        chain = joint.chain_of(self._holdings.tree, self._host, salt, raw, units)
        return joint.longest(self._places, chain, limit, salt, raw)

    def _fetch(self, raw, salt, limit, deadline_s) -> list[HostBlock]:
        """What came from the store, held."""
        if self.store is None:
            return []
        tree, units = self._holdings.tree, limit // self._places.unit
        chain = joint.chain_of(tree, self._host, salt, raw, units)
        fetch = Fetch(self.store, self.tier, self._host, self._places, chain, deadline_s)
        key = chain[-1].key if chain else tree.namespace(salt)
        return fetch.run_or_note(self._trouble, key, raw, units)
