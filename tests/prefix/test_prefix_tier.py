"""Hits of device, host and store together, against what a plain search over all lengths finds."""

import numpy as np
import pytest
from tiered import DictStore, Tiered

import kvpool as kv
from kvpool.tiers.fetch import digest_of

FULL = kv.FullAttention(1, 4, dtype="float32")
WINDOW = kv.SlidingWindow(6, 1, 4, dtype="float32")
STATE = kv.RecurrentState({"sum": ((2,), "float32")})
UNITS = 6
PLACES = ("device", "host", "store", None)


def names_of(serving, tokens):
    """(group, column, name) of every block that the tokens can have."""
    places, keys = serving.cache._places, serving.keys(tokens)
    for group in places.groups:
        for column in range(len(keys) * group.count):
            unit, place = divmod(column, group.count)
            yield group, column, (keys[unit], group.first + place)


def arrange(serving, tokens, where, master):
    """Puts each block where `where` {(group, column): place} says, and nowhere else."""
    serving.state = serving.prefixes.clear(serving.state)
    serving.prefixes.store.blocks.clear()
    serving.prefixes.policy = "none"
    serving.fill(tokens)
    places, host = serving.cache._places, serving.prefixes._host
    present = {}
    for group, column, name in reversed([*names_of(serving, tokens)]):
        place = where[group.name, column]
        if (group.name, digest_of(places, name)) not in master:
            continue  # the end of a chunk, which no hit reads and no row publishes
        if place != "device" and not group.keeps_all:
            serving.lose(group.name, tokens, [column])
        payload = master[group.name, digest_of(places, name)]
        if place == "host":
            block = host.add(name)
            serving.tier.memory[group.name].put_one(block.block, payload)
            block.ready = True
        if place == "store":
            serving.prefixes.store.blocks[group.name, digest_of(places, name)] = payload
    # Last, since windows and states go with them, and leaf first.
    not_there = [
        column // group.count
        for group, column, _ in names_of(serving, tokens)
        if group.keeps_all and where[group.name, column] != "device"
    ]
    cut = min(not_there, default=UNITS)
    for unit in reversed(range(cut, UNITS)) if places.whole else ():
        serving.lose(places.whole[0].name, tokens, [unit * places.whole[0].count])
    known = len(serving.cache._tree.walk(None, np.int32(tokens).tobytes(), UNITS))
    for group, column, _ in names_of(serving, tokens):
        place = where[group.name, column]
        gone = place == "device" and column // group.count >= known  # with the block below it
        present[group.name, column] = place is not None and not gone
    return present


def longest(serving, present):
    """By trying every length."""
    unit = serving.cache.unit
    for length in range(UNITS * unit, 0, -unit):
        needs = []
        for group in serving.spec.groups:
            size, span = group.block_size, group.region.span
            if group.region.kind == "state":
                needs.append((group.name, length // unit - 1))
                continue
            first = {"window": max(0, length - (span or 0) + 1)}
            first["chunk"] = length - length % (span or 1)
            begin = first.get(group.region.kind, 0)
            needs += [(group.name, c) for c in range(begin // size, -(-length // size))]
        if all(present[need] for need in needs):
            return length
    return 0


@pytest.mark.parametrize(
    ("layers", "sizes", "rounds"),
    [
        ([FULL, WINDOW, STATE], None, 12),
        pytest.param([FULL, WINDOW, STATE], {"window6": 2}, 60, marks=pytest.mark.slow),
        pytest.param([WINDOW, STATE], None, 40, marks=pytest.mark.slow),
        pytest.param(
            [FULL, kv.Compressed(2, 4), kv.ChunkedLocal(8, 1, 4, dtype="float32")],
            None, 40, marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_hit_is_the_longest_that_all_groups_can_be_restored_at(layers, sizes, rounds):
    random = np.random.default_rng(0)
    serving = Tiered(layers, 4, sizes=sizes, store=DictStore)
    tokens = [(5 * p) % 13 for p in range(UNITS * serving.cache.unit)]
    serving.fill(tokens)
    serving.state, stored = serving.prefixes.save_all(serving.state, serving.storage)
    assert stored
    master = dict(serving.prefixes.store.blocks)
    kept = {name for group, _, name in names_of(serving, tokens)
            if (group.name, digest_of(serving.cache._places, name)) in master}  # fmt: skip
    serving.admit(2, [*tokens, 99], hit=False)
    serving.run(2, len(tokens))
    lengths = set()
    for _ in range(rounds):
        odds = random.choice([[0.5, 0.2, 0.25, 0.05], [0.1, 0.4, 0.4, 0.1], [0.3, 0.3, 0.3, 0.1]])
        where = {
            (group.name, column): PLACES[random.choice(4, p=odds)] if name in kept else None
            for group, column, name in names_of(serving, tokens)
        }
        present = arrange(serving, tokens, where, master)
        wanted = longest(serving, present)
        alone = serving.cache.match([*tokens, 99], touch=False).length
        hit = serving.match([*tokens, 99])
        assert (hit.length, hit.length >= alone) == (wanted, True)
        lengths.add(hit.length)
        if hit.length:
            serving.admit(1, [*tokens, 99], hit=hit)
            if hit.length < len(tokens):
                serving.run(1, len(tokens))
            serving.same_content(2, 1)
            serving.release(1)
    assert len(lengths) > 2


def test_room_for_a_block_on_a_full_host_is_found_without_a_walk_over_it():
    serving = Tiered([FULL, WINDOW, STATE], host=100)
    host, (offered,) = serving.prefixes._host, serving.tier.reclaimers
    seen = []

    def counted(group):
        for one in offered(group):
            seen.append(one)
            yield one

    serving.tier.reclaimers[0] = counted
    for number in range(300):
        seen.clear()
        host.add((number.to_bytes(16, "little"), 0)).ready = True
        assert len(seen) == (number >= 100)
    assert [one.name[0][0] for one in host.everything()] == [n % 256 for n in range(200, 300)]
