"""What device, host and store have of prompts, as dictionaries of tokens; faults in copies."""

import contextlib
import copy
from unittest import mock

import numpy as np
from plain_model import Model
from tiered import DictStore, Tiered

import kvpool as kv
from kvpool.tiers.host_blocks import HostBlocks
from kvpool.tiers.pool_group import HostPoolGroup

FAULTS = (
    (HostBlocks, "put_one"),
    (HostBlocks, "put"),
    (HostBlocks, "seen_by"),
    (HostPoolGroup, "allocate"),
    (DictStore, "put"),
    (DictStore, "prefetch"),
)


class Failure(Exception):
    """What a copy raises here."""


@contextlib.contextmanager
def failing(fault):
    """Lets the call number `at` of ((class, method), at) raise; a list of what was raised."""
    raised: list[str] = []
    if fault is None:
        yield raised
        return
    (owner, name), at = fault
    calls, original = [], getattr(owner, name)

    def call(*args, **kwargs):
        calls.append(name)
        if len(calls) == at + 1:
            raised.append(name)
            raise Failure(name)
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield raised


class Promoting(Tiered):
    """A `Tiered` with any number of promotions under way, and host blocks that nobody reads."""

    def __init__(self, *args, **options):
        self.promotions = []
        super().__init__(*args, **options)

    def cached_blocks(self, group):
        of_place = self.cache._places.of_place
        coming = [one for promotion in self.promotions for _, one in promotion.fresh]
        mine = [one.block for one in coming if of_place[one.place].name == group]
        return super().cached_blocks(group) + mine

    def settle(self):
        super().settle()
        for name, memory in self.tier.memory.items() if self.prefixes else ():
            memory.array[self.tier.pools._pools[name].free_ids()] = 255


class TierModel(Model):
    """The device's as the events tell it; the host's and the store's by their names."""

    def __init__(self, serving):
        super().__init__(serving.cache)
        self.serving, self.removals = serving, 0
        self.expected: set[tuple[bytes, int]] = set()  # names that the host must have
        self.bytes_of: dict[tuple[bytes, int], bytes] = {}

    def listen(self, arriving: str = ""):
        """Takes in the events; those of a kind are expected on the host from now on."""
        places, events = self.serving.cache._places, self.cache.events()
        first = {group.name: group.first for group in places.groups}
        for event in events:
            self.removals += event.kind == "removed"
            if event.kind == arriving:
                self.expected.add((event.key, first[event.group] + event.place))
        with mock.patch.object(self.cache, "events", return_value=events):
            super().listen()

    def host(self) -> set[tuple[bytes, int]]:
        """The names of what the host has."""
        return {one.name for one in self.serving.prefixes._host.everything() if one.ready}

    def store(self) -> set[tuple[bytes, int]]:
        """The names of what the store has."""
        store, places = self.serving.prefixes.store, self.serving.cache._places
        first = {group.name: group.first for group in places.groups}
        return {
            (digest[:-4], first[group] + int.from_bytes(digest[-4:], "little"))
            for group, digest in (store.blocks if store else ())
        }

    def with_names(self, names) -> Model:
        """A model that holds these as well."""
        joint = copy.copy(self)
        joint.held = {at: set(held) for at, held in self.held.items()}
        for key, place in names:
            group = self.serving.cache._places.of_place[place]
            at = joint.held.setdefault(self.meaning[key], set())
            at.add((group.name, place - group.first))
        return joint

    def check_bytes(self):
        """Whatever has a name has the bytes that were first seen under it, on every level."""
        serving = self.serving
        places, storage = serving.cache._places, serving.storage
        whole = {
            group.name: np.asarray(
                kv.export_blocks(storage, group.name, np.arange(size, dtype=np.int32))
            ).view(np.uint8)
            for group, size in zip(serving.spec.groups, serving.plan.blocks, strict=True)
        }
        for kept in serving.cache.holdings.everything():
            name = kept.node.key, kept.place
            self._same(name, whole[places.of_place[kept.place].name][kept.block])
        for one in serving.prefixes._host.everything():
            if one.ready:
                memory = serving.tier.memory[places.of_place[one.place].name]
                self._same(one.name, memory.get([one.block]))
        for (group, digest), payload in (
            serving.prefixes.store.blocks.items() if serving.prefixes.store else ()
        ):
            place = next(g.first for g in places.groups if g.name == group)
            self._same((digest[:-4], place + int.from_bytes(digest[-4:], "little")), payload)

    def _same(self, name, payload):
        seen = payload.tobytes()
        assert self.bytes_of.setdefault(name, seen) == seen, name
