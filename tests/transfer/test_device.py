"""The same plans over the backend's own transfer server."""

import numpy as np
import pytest
from machines import SPEC, Machine

import kvpool as kv
from kvpool.transfer import Disagreement, Shards, device, rows


@pytest.fixture(scope="module")
def server():
    try:
        return device.start_server()
    except NotImplementedError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("degrees", [(1, 1), (2, 1), (1, 2)])
def test_a_row_arrives_as_it_was(server, degrees):
    source, target = map(Machine, degrees)
    source.fill(1, 21)
    plan = kv.transfer.plan(SPEC, 21, *map(Shards, degrees))
    for sender, offer in enumerate(source.offers(1, "r")):
        blocks = {g.name: b for g, b in zip(SPEC.groups, offer.blocks, strict=True)}
        device.serve(server, plan, "r", sender, blocks)
    peers = dict.fromkeys(range(degrees[0]), server.address())
    wanted = Machine(degrees[1])
    wanted.fill(0, 21)
    for rank, (state, storage) in enumerate(target.ranks):
        state, result = rows.begin(state, 0, 21)
        assert bool(result.ok)
        inbox = device.pull(server, plan, "r", rank, peers)
        target.ranks[rank] = rows.finish(state, storage, 0, inbox)
        for name, blocks in wanted.content(rank, 0).items():
            np.testing.assert_array_equal(target.content(rank, 0)[name], blocks)
    target.check()


@pytest.fixture(scope="module")
def offered():
    source = Machine()
    source.fill(1, 21)
    (offer,) = source.offers(1, "r")
    return {g.name: b for g, b in zip(SPEC.groups, offer.blocks, strict=True)}


def test_another_plan_is_refused_before_a_byte_moves(server, offered):
    """A pull that nobody serves would be waited for without an end."""
    other = kv.CacheSpec.from_layers(
        [*SPEC.layers[:1], kv.SlidingWindow(9, 4, 4), *SPEC.layers[2:]], block_size=4
    )
    peers = {0: server.address()}
    for request, spec, tokens, told in (
        (1, SPEC, 20, "plans differ: 20 tokens here, 21 there"),
        (2, other, 21, "group window8: nothing here, window 8;"),
    ):
        device.serve(server, kv.transfer.plan(SPEC, 21), request, 0, offered)
        with pytest.raises(Disagreement, match=told):
            device.pull(server, kv.transfer.plan(spec, tokens), request, 0, peers)


def test_what_cannot_be_served_or_pulled(server, offered):
    plan = kv.transfer.plan(SPEC, 21)
    less = {**offered, "window8": offered["window8"][1:]}
    for call, told in (
        (lambda: device.serve(server, plan, "r", 1, offered), "sender: wanted a rank from 0 to 0"),
        (lambda: device.serve(server, plan, None, 0, offered), "request: wanted an integer"),
        (
            lambda: device.serve(server, plan, "r", 0, {"full": offered["full"]}),
            r"blocks\['window8'\]: wanted u8\[3, 256\], got nothing",
        ),
        (
            lambda: device.serve(server, plan, "r", 0, less),
            r"blocks\['window8'\]: wanted u8\[3, 256\], got u8\[2, 256\]",
        ),
        (lambda: device.pull(server, plan, "r", 0, {}), r"peers: wanted senders \[0\] too"),
        (lambda: device.pull(server, plan, "r", 1, {0: ""}), "rank: wanted a rank from 0 to 0"),
    ):
        with pytest.raises(kv.SpecError, match=told):
            call()


def test_a_backend_without_one_is_refused_by_name(monkeypatch):
    def none(*arguments):
        raise RuntimeError("not implemented")

    monkeypatch.setattr("jax.experimental.transfer.start_transfer_server", none)
    with pytest.raises(NotImplementedError, match=r"no transfer server for cpu in jax"):
        device.start_server()
