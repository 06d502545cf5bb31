"""Ranks with caches of their own, filled with bytes that tell row, layer and position apart."""

import jax.numpy as jnp
import numpy as np

import kvpool as kv
from kvpool.transfer import Inbox, Sender, Shards, TransferError, fetch, rows

HOST = "127.0.0.1"
LAYERS = [
    kv.FullAttention(4, 4),
    kv.SlidingWindow(8, 4, 4),
    {"main": kv.FullAttention(4, 4, dtype="int8", scales="token"), "idx": kv.Compressed(2, 8)},
    kv.RecurrentState({"conv": ((16, 3), "bfloat16", (4, 4, 8)), "ssm": ((4, 3, 2), "float32")}),
]
SPEC = kv.CacheSpec.from_layers(LAYERS, block_size=4)
LIMITS = {"max_seqs": 2, "max_seq_len": 64, "max_step_tokens": 32}


def bytes_of(offer, listed, number):
    """u8[num_bytes] of a parcel."""
    return np.concatenate([*offer.portions(listed, listed.parcels[number])])


def put(inbox, sender, number, data):
    """Fills a parcel's places with u8[num_bytes]."""
    for portion in inbox.portions(sender, number, inbox.aside()):
        portion[:], data = data[: portion.size], data[portion.size :]
    assert data.size == 0


def blocks_for(spec, rows_of_all=2):
    return {g.name: 2 if g.is_state else rows_of_all * 16 for g in spec.groups}


class Machine:
    """The state and storage of each of `degree` ranks."""

    def __init__(self, degree=1, spec=SPEC, blocks=None, **limits):
        self.spec, self.shards = spec, Shards(degree)
        own = kv.per_rank(spec, degree)
        plan = kv.plan(own, num_blocks=blocks or blocks_for(own), **{**LIMITS, **limits})
        self.ranks = [kv.init(own, plan) for _ in range(degree)]

    def fill(self, row, tokens, seed=0):
        """A row of so many tokens, of random bytes; every rank has its part of the same."""
        random = np.random.default_rng(seed)
        whole = {
            g.name: random.integers(0, 256, (1 if g.is_state else 16, g.bytes_per_block), np.uint8)
            for g in self.spec.groups
        }
        from simulation import cut_of, shares

        for rank, (state, storage) in enumerate(self.ranks):
            state, _ = kv.admit(state, [row])
            left = tokens
            while left:
                counts = np.zeros(state.plan.max_seqs, np.int32)
                counts[row] = min(left, state.plan.max_step_tokens)
                state, result = kv.reserve(state, counts)
                assert bool(result.ok)
                state = kv.advance(state, counts)
                left -= int(counts[row])
            for group, part in zip(self.spec.groups, state.plan.spec.groups, strict=True):
                owned = shares(self.spec, group, self.shards.heads, rank)
                blocks = np.stack([cut_of(group, b, part, owned) for b in whole[group.name]])
                ids = np.asarray(kv.block_table(state, group.name))[row]
                (columns,) = np.nonzero(ids >= 0)
                storage = kv.import_blocks(storage, group.name, ids[columns], blocks[columns])
            self.ranks[rank] = (state, storage)
        return whole

    def offers(self, row, request):
        return [
            rows.offer_of(state, storage, row, request, self.spec, self.shards, rank)
            for rank, (state, storage) in enumerate(self.ranks)
        ]

    def content(self, rank, row):
        """{group: u8[columns, bytes]} of the columns that a row holds, payload only."""
        from simulation import payload_bytes

        state, storage = self.ranks[rank]
        found = {}
        for group in state.plan.spec.groups:
            ids = np.asarray(kv.block_table(state, group.name))[row]
            data = np.asarray(kv.export_blocks(storage, group.name, jnp.asarray(ids[ids >= 0])))
            data = np.ascontiguousarray(data).view(np.uint8)
            found[group.name] = data * payload_bytes(group)
        return found

    def release(self, row):
        self.ranks = [(kv.release(state, [row]), storage) for state, storage in self.ranks]

    def check(self):
        for state, _ in self.ranks:
            kv.check(state)

    def free(self):
        return [
            {name: int(n) for name, n in kv.free_blocks(state).items()} for state, _ in self.ranks
        ]


async def receive(machine, row, tokens, sender_degree, request, peers, *, inbox=None, **options):
    """Every rank of a machine fetches its part: True, or False with the row free again."""
    plan = kv.transfer.plan(machine.spec, tokens, Shards(sender_degree), machine.shards)
    begun = []
    for rank, (state, storage) in enumerate(machine.ranks):
        state, result = rows.begin(state, row, tokens)
        if not bool(result.ok):
            for done in begun:
                machine.ranks[done] = (
                    rows.abandon(machine.ranks[done][0], row), machine.ranks[done][1],
                )  # fmt: skip
            return False
        machine.ranks[rank] = (state, storage)
        begun.append(rank)
    inboxes = [Inbox(plan, rank, **(inbox or {})) for rank in begun]
    try:
        for box in inboxes:
            await fetch(box, request, peers, **options)
    except TransferError:
        for rank, (state, storage) in enumerate(machine.ranks):
            machine.ranks[rank] = (rows.abandon(state, row), storage)
        return False
    for rank, (state, storage) in enumerate(machine.ranks):
        machine.ranks[rank] = rows.finish(state, storage, row, inboxes[rank])
    return True


async def serve(machine, row, request, **options):
    """(senders, peers) that serve a row of every rank of a machine."""
    senders, peers = [], {}
    for rank, offer in enumerate(machine.offers(row, request)):
        senders.append(Sender(**options))
        peers[rank] = (HOST, await senders[-1].listen())
        senders[-1].offer(offer)
    return senders, peers


async def close(senders):
    for sender in senders:
        await sender.close()
