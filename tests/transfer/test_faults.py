"""Hundreds of faults between two machines: nothing leaks on either side, no wrong byte counts."""

import asyncio
import collections
import contextlib
import random

import numpy as np
import pytest
from faulty_proxy import KINDS, Proxy
from machines import SPEC, Machine, bytes_of, put

import kvpool as kv
from kvpool.transfer import Shards, rows
from kvpool.transfer.receiver import Inbox, TransferError, fetch
from kvpool.transfer.sender import Sender

TOKENS, RETRIES = 21, 2
PLAN = kv.transfer.plan(SPEC, TOKENS, Shards(2), Shards(1))


async def one_fault(seed, source, target, senders, ports):
    """One transfer with harm done to it; "came" or "recomputed", and the proxies' harm."""
    dice = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    seconds = 0.4 if dice.random() < 0.05 else 0.005  # longer than the timeout, or not
    offers = source.offers(1, seed)
    for sender, offer in zip(senders, offers, strict=True):
        sender.offer(offer)
    proxies = [
        Proxy(("127.0.0.1", port), kind, dice.choice((0, 1, 2, 9)), dice, seconds) for port in ports
    ]
    state, storage = target.ranks[0]
    state, result = rows.begin(state, 0, TOKENS)
    assert bool(result.ok)
    inbox = Inbox(PLAN, 0, max_bytes=dice.choice((64, 300, 4096)), by_layer=dice.random() < 0.3)
    async with contextlib.AsyncExitStack() as stack:
        peers = {rank: await stack.enter_async_context(proxy) for rank, proxy in enumerate(proxies)}
        try:
            await fetch(
                inbox, seed, peers, streams=dice.choice((1, 2)), timeout=0.3, retries=RETRIES
            )
            target.ranks[0] = rows.finish(state, storage, 0, inbox)
            outcome = "came"
        except TransferError:
            target.ranks[0] = (rows.abandon(state, 0), storage)
            outcome = "recomputed"
    for sender, offer in zip(senders, offers, strict=True):
        if outcome == "recomputed":
            sender.withdraw(offer)
        await sender.delivered(offer, 0.05)
    check_bytes(inbox, offers)
    return outcome, sum(proxy.harmed for proxy in proxies)


def check_bytes(inbox, offers):
    """What counts as arrived is what was sent."""
    copy = Inbox(PLAN, 0, inbox.max_bytes, inbox.by_layer)
    for sender, listed in inbox.arrivals.outlines.items():
        for number in np.flatnonzero(inbox.arrivals.here(sender)):
            put(copy, sender, number, bytes_of(offers[sender], listed, number))
            inbox_part = Inbox(PLAN, 0, inbox.max_bytes, inbox.by_layer)
            put(
                inbox_part, sender, number, np.full(listed.parcels[number].num_bytes, 255, np.uint8)
            )
            for got, right, mask in zip(inbox.blocks, copy.blocks, inbox_part.blocks, strict=True):
                assert ((got ^ right) & mask).max(initial=0) == 0


@pytest.mark.parametrize(
    "seeds", [range(120), pytest.param(range(120, 500), marks=pytest.mark.slow)]
)
def test_faults_leak_nothing_and_let_no_wrong_byte_in(seeds):
    async def run():
        source, target = Machine(2), Machine(1)
        source.fill(1, TOKENS)
        whole = Machine(1)
        whole.fill(0, TOKENS)
        wanted, free = whole.content(0, 0), target.free()
        senders = [Sender(timeout=0.3) for _ in range(2)]
        ports = [await sender.listen() for sender in senders]
        outcomes = collections.Counter()
        for seed in seeds:
            outcome, harmed = await one_fault(seed, source, target, senders, ports)
            outcomes[outcome, harmed > 0] += 1
            assert outcome == "came" or harmed
            if outcome == "came":
                got = target.content(0, 0)
                for name, blocks in wanted.items():
                    np.testing.assert_array_equal(got[name], blocks, err_msg=f"seed {seed}")
                target.release(0)
            assert target.free() == free
            assert not any(sender.offers for sender in senders)
            if seed % 10 == 0:
                target.check()
                source.check()
        for sender in senders:
            await sender.close()
            assert not sender._tasks
        target.check()
        source.check()
        source.release(1)
        source.check()
        return outcomes

    outcomes = asyncio.run(run())
    assert outcomes["came", True] > len(seeds) // 3
    assert outcomes["recomputed", True] > len(seeds) // 10


async def through(kind, when=4, **options):
    """An inbox of one machine from another's, through one kind of harm to every connection."""
    source = Machine(1)
    source.fill(1, TOKENS)
    (offer,) = source.offers(1, "r")
    sender = Sender(timeout=0.3)
    port = await sender.listen()
    sender.offer(offer)
    inbox = Inbox(kv.transfer.plan(SPEC, TOKENS), 0, **options)
    failed = None
    async with Proxy(("127.0.0.1", port), kind, 9, random.Random(when)) as peer:
        try:
            await fetch(inbox, "r", {0: peer}, streams=1, retries=0, timeout=0.3)
        except TransferError as error:
            failed = error
    await sender.close()
    return inbox, offer, failed


@pytest.mark.parametrize("kind", ["reorder", "duplicate"])
def test_order_and_repetition_need_no_second_connection(kind):
    inbox, offer, failed = asyncio.run(through(kind, max_bytes=64))
    assert failed is None
    for got, wanted in zip(inbox.blocks, offer.blocks, strict=True):
        assert got.tobytes() == wanted.tobytes()


@pytest.mark.parametrize(
    ("kind", "message"),
    [("foreign", "a message of an unknown request 0x0"), ("other key", "wanted the key =r/")],
)
def test_messages_of_others_are_refused_by_name(kind, message):
    _, _, failed = asyncio.run(through(kind, max_bytes=64))
    assert message in str(failed)


def test_a_wrong_copy_of_what_is_right_changes_nothing():
    ended = set()
    for when in range(12):
        inbox, offer, failed = asyncio.run(through("corrupt copy", when))
        ended.add(failed is None)
        for got, wanted in zip(inbox.blocks, offer.blocks, strict=True):
            assert got.tobytes() in (wanted.tobytes(), bytes(wanted.nbytes))
    assert ended == {True, False}
