"""The same plans over the backend's own transfer server."""

import numpy as np
import pytest
from machines import SPEC, Machine

import kvpool as kv
from kvpool.transfer import Shards, device, rows


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


def test_a_backend_without_one_is_refused_by_name(monkeypatch):
    def none(*arguments):
        raise RuntimeError("not implemented")

    monkeypatch.setattr("jax.experimental.transfer.start_transfer_server", none)
    with pytest.raises(NotImplementedError, match=r"no transfer server for cpu in jax"):
        device.start_server()
