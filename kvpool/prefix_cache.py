"""PrefixCache: rows begin with what others computed. Host side, above the verbs.

What is cached is held by `retain` and `snapshot`, one holder a block, so the state knows it like
any other holder and eviction can free nothing that a row uses. A request goes through

    hit = cache.match(prompt)
    state, freed = cache.evict(state, need, protect=hit)   # where blocks are short
    state, result = kv.admit(state, [row], hit.prefix)     # then kv.copy_blocks, as always
    ... steps from hit.length on, which end at each of hit.stops and at the prompt's end; there
    and when the answer is done, while the row still holds its blocks:
    state, storage = cache.insert(state, storage, tokens, row)

all of it from `match` to `admit` before any other eviction: a hit holds nothing by itself. Windows
and recurrent states can be published only where the row stands, hence the stops.
"""

import types
from collections.abc import Callable, Mapping

import jax

from kvpool.plan import Plan
from kvpool.prefix import audit, cap, keys, making_room, match, needs, publish
from kvpool.prefix.growth import Growth
from kvpool.prefix.holdings import Event, Holdings
from kvpool.prefix.keys import Salt
from kvpool.prefix.lasting import Lasting
from kvpool.prefix.match import Hit
from kvpool.prefix.pending import Pending
from kvpool.prefix.places import Places
from kvpool.prefix.reuse import Reuse
from kvpool.prefix.snapshots import FAR, Auto
from kvpool.prefix.stats import Stats
from kvpool.prefix.tree import Tree
from kvpool.spec import CacheSpec
from kvpool.state import State, check_plan
from kvpool.storage import Storage

_NOTHING: Mapping[str, int] = types.MappingProxyType({})


class PrefixCache:
    """The prompts that a state's blocks hold, for one spec and plan.

    Args:
      model: whose weights computed them; part of every key.
      evictor: makes the order in which blocks go; called for each pool, and once for those that
        share slabs.
      snapshots: says at which lengths a prompt should stop (`Hit.stops`).
      max_snapshots: lengths of one path at which states and windows' tails may be kept, a new one
        included; None: any number. What is pinned or has a priority is not counted.
    """

    def __init__(
        self,
        spec: CacheSpec,
        plan: Plan,
        *,
        model: str = "",
        evictor: Callable = Reuse,
        snapshots=None,
        max_snapshots: int | None = None,
    ):
        check_plan(spec, plan)
        self._plan, self._places = plan, Places.of(plan)
        self._tree = Tree(self._places, lambda salt: keys.namespace(spec, model, salt))
        self.holdings = Holdings(self._tree, evictor)  # for what is built on this, as the tiers
        if max_snapshots is not None:
            max_snapshots = needs.whole_number("max_snapshots", max_snapshots, 1)
        self._max_snapshots = max_snapshots
        self._snapshots = snapshots or Auto(self.unit, *self._places.costs)
        self._growth = Growth(self._tree, self.holdings)
        self._pending = Pending(self._places)
        self._lasting = Lasting(self.holdings)
        self._stats = Stats()

    @property
    def unit(self) -> int:
        """Tokens from one possible hit length to the next."""
        return self._places.unit

    def match(self, tokens, salt: Salt = None, *, touch: bool = True) -> Hit:
        """The longest beginning of a prompt that every group can serve.

        Args:
          tokens: integers [T]; at least one of them is left to compute.
          salt: None, a str, bytes, an int or a tuple of those; only equal salts share.
          touch: False for a look that is no use: it refreshes nothing and is not counted.

        Returns:
          A Hit, of length 0 where there is none. It is good until the next `evict` or `clear`
          that does not protect it.

        Raises:
          ValueError: for tokens that are not integers, an unknown kind of salt.
        """
        raw, salt = keys.token_bytes(tokens), keys.checked_salt(salt)
        num_tokens = len(raw) // keys.TOKEN_BYTES
        limit = self._places.last_hit(num_tokens)
        chain = self._tree.walk(salt, raw, limit // self.unit)
        length, missed = match.longest(self._places, chain, limit)
        used = match.used_by(self._places, chain, length)
        prefix = match.prefix_of(self._places, self._plan, used, length)
        if touch:
            self._stats.matches += 1
            self._stats.hits += length > 0
            self._stats.tokens += num_tokens
            self._stats.tokens_hit += length
            self.holdings.touch(used)
        known = len(chain) * self.unit
        stops: tuple[int, ...] = ()
        if self._places.windows or self._places.states:  # what else is kept, is at any length
            beyond = chain[-1].goes_on(FAR) if chain else 0
            pressed = any(self.holdings.removed.values())
            stops = tuple(self._snapshots.stops(num_tokens, length, known, beyond, pressed))
        pending = self._pending.longest(salt, raw, length, limit)
        return Hit(length, prefix, missed, known, stops, pending, raw, salt, used)

    def insert(
        self,
        state: State,
        storage: Storage | None,
        tokens,
        row: int,
        salt: Salt = None,
        *,
        priority: int = 0,
    ):
        """Publishes what a row has settled and still holds.

        Those are its full blocks, in place of which an equal one may be known already, and, where
        the settled length is a multiple of `unit`, its recurrent state. Where a snapshot finds no
        free block, room is made as `evict` makes it; where that fails it is skipped and counted.

        Args:
          storage: donated; go on with the one returned. None where there are no bytes, as in a
            simulation.
          tokens: of the row, from its first on: integers [T], at least the settled ones.
          priority: from 0 on. What a hit of the settled tokens uses goes after all of a lower
            priority, and for no snapshot of one; the highest given counts, until it goes.

        Returns:
          (state, storage).

        Raises:
          ValueError: as `match`; for a row that is free or does not exist, too few tokens, a
            priority that is none.
          SpecError: for a state or storage of another plan, a state of several shards, or a storage
            on a mesh where there are recurrent states. Nothing has changed in either case.
        """
        raw, salt = keys.token_bytes(tokens), keys.checked_salt(salt)
        row, priority = self._checked_row(row), needs.whole_number("priority", priority, 0)
        self._check_plan(state, storage)
        settled, ids = self._look_at_row(state, row, len(raw) // keys.TOKEN_BYTES)
        units = settled // self.unit
        if not units:
            return state, storage
        raw = raw[: units * self.unit * keys.TOKEN_BYTES]
        state, node = self._publish_blocks(state, row, raw, salt, settled, ids)
        ends_here = settled == units * self.unit
        if ends_here:
            state = cap.keep_to(self.holdings, state, node, self._max_snapshots)
        if ends_here and not all(node.kept[group.first] for group in self._places.states):
            state, storage, taken = self._take_snapshot(state, storage, row, priority)
            if not node.parent:  # it led to what made room, and left with that
                state, node = self._publish_blocks(state, row, raw, salt, settled, ids)
            places = [(group.first, taken[group.name]) for group in self._places.states if taken]
            self.holdings.watcher.came([self.holdings.keep(node, *place) for place in places])
        self._lasting.raise_to(priority, raw, salt)
        self._tree.prune(node)
        self._pending.settled(row, settled)
        return state, storage

    def _look_at_row(self, state, row, given):
        live, settled, ids = publish.look_at_row(state, row)
        if not live:
            raise ValueError(f"row: wanted one that is live, got {row}, which is free")
        if given < settled:
            raise ValueError(f"tokens: wanted the {settled} that row {row} settled, got {given}")
        return settled, ids

    def _publish_blocks(self, state, row, raw, salt, settled, ids):
        node, new = self._growth.add(row, raw, salt, settled, ids)
        self.holdings.watcher.came(new)
        return publish.retain(state, self._places, new), node

    def _checked_row(self, row) -> int:
        return needs.whole_number("row", row, 0, self._plan.max_seqs - 1)

    def _take_snapshot(self, state, storage, row, priority):
        state, storage, taken = publish.take_snapshot(state, storage, row)
        if not taken:
            need = {group.name: 1 for group in self._places.states}
            state, _ = making_room.make(self.holdings, state, need, _NOTHING, most=priority)
            state, storage, taken = publish.take_snapshot(state, storage, row)
        self._stats.snapshots_skipped += not taken
        return state, storage, taken

    def evict(
        self,
        state: State,
        need: Mapping[str, int] = _NOTHING,
        *,
        short: Mapping[str, int] = _NOTHING,
        protect: Hit | None = None,
    ):
        """Makes room: frees blocks that only the cache holds, until enough are free and no more.

        What goes are blocks of the groups in need, those of a low priority first, in the evictor's
        order, and what is of no use without them; of what keeps everything that is a whole `unit`.
        Of groups that share slabs it is any group's, and may be a little more, since only an empty
        slab is of use to another.

        Args:
          need: {group: blocks that are to be free}, those that are already included.
          short: {group: blocks that are missing}, such as the `shortfall` of a refused call.
          protect: a hit that is about to be admitted; it loses nothing.

        Returns:
          (state, freed {group: blocks}).  Where too few are free after it, nothing was left to go.

        Raises:
          SpecError, ValueError: for an unknown group, counts that are none, a state as in `insert`.
        """
        self._check_plan(state)
        protected = self.holdings.guards(protect.used) if protect else None
        return making_room.make(self.holdings, state, need, short, protected)

    def _check_plan(self, state: State, storage: Storage | None = None) -> None:
        publish.check_given(self._places, self._plan, state, storage)

    def follow(self, moves: Mapping[str, tuple]) -> None:
        """Goes along with the moves {group: (src, dst)} that `kv.compact` returned.

        Hits of before are of no use any more.
        """
        self.holdings.follow(jax.device_get(dict(moves)))

    def clear(self, state: State) -> State:
        """Lets go of everything, pinned or not; rows keep what they hold."""
        self._check_plan(state)
        gone = self.holdings.lose_all()
        self._lasting.forget()
        return publish.drop(state, self._places, gone)

    def pin(self, tokens, salt: Salt = None) -> int:
        """Keeps what a hit of these tokens uses until `unpin`, such as a system prompt's.

        Returns:
          The tokens of it that are cached now, which may be all. Nothing is pinned where it is 0.

        Raises:
          ValueError: as `match`; for tokens that are pinned already.
        """
        raw, salt = keys.token_bytes(tokens), keys.checked_salt(salt)
        return self._lasting.pin(raw, salt)

    def unpin(self, tokens, salt: Salt = None) -> None:
        """Lets go as anything else what `pin` kept.

        Raises:
          ValueError: as `match`; for tokens that are not pinned.
        """
        raw, salt = keys.token_bytes(tokens), keys.checked_salt(salt)
        self._lasting.unpin(raw, salt)

    def begin(self, row: int, hit: Hit) -> None:
        """Announces that a row computes the prompt of a hit now.

        Until the row is inserted at the last of its `stops`, or `end`, the hits of others say in
        `pending` what they could have if they waited for it.

        Raises:
          ValueError: for a row that does not exist.
        """
        self._pending.of_row[self._checked_row(row)] = hit

    def end(self, row: int) -> None:
        """A row does not compute what it was announced with; nothing if it was not."""
        self._pending.of_row.pop(self._checked_row(row), None)

    def check(self, state: State) -> None:
        """Verifies the cache's books, in themselves and against the state; for tests, host only.

        Raises:
          InvariantError: naming the group and the block.
        """
        self._check_plan(state)
        audit.check(self.holdings, state)

    def stats(self) -> Stats:
        """What was done so far, and what is held now."""
        return self.holdings.counted(self._stats)

    def events(self) -> list[Event]:
        """What came and went since the last call, oldest first."""
        return self.holdings.events()
