"""One of two processes with four devices each, which serve as one mesh.

    python one_of_two_processes.py NUMBER PORT shards|ranks per_shard|replicated ...

Of every pair the first says what lies in different processes, the second is the bookkeeping. Each
process compares what it can read, its own devices' part, with a cache without a mesh.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import kvpool as kv

SPEC = kv.CacheSpec.from_layers(
    [
        kv.FullAttention(4, 4, dtype="bfloat16"),
        kv.SlidingWindow(4, 4, 4, dtype="int8", scales="token"),
        kv.RecurrentState({"ssm": ((4, 2), "float32")}),
    ],
    block_size=2,
)
LIMITS = {"max_seqs": 2, "max_seq_len": 16, "num_blocks": {"full": 16, "window4": 16, "state": 8}}
NUM = np.array([5, 0], np.int32)


def session(state, storage, k, s, cut=lambda x, axis: x):
    """Two rows, a fork that owes copies, one row let go."""
    state, _ = kv.admit(state, jnp.array([0, -1]))
    state, _ = kv.reserve(state, NUM)
    view, mine = kv.step_view(state, NUM), cut(k, 2)
    for layer in (0, 1):
        storage = kv.write(storage, view, layer, {"k": mine, "v": -mine})
    storage = kv.write_state(storage, view, 2, {"ssm": cut(s, 1)})
    state = kv.advance(state, NUM)
    state, result = kv.fork(state, jnp.array([0]), jnp.array([1]))
    storage = kv.copy_blocks(storage, result.copies)
    state = kv.release(state, jnp.array([0]))
    view = kv.step_view(state, jnp.array([0, 0]))
    read = [kv.read(storage, view, layer)[0]["k"] for layer in (0, 1)]
    return state, storage, (*read, kv.read_state(storage, view, 2)["ssm"], result.granted)


def compare(mesh, bookkeeping: str) -> None:
    rules = kv.Rules(bookkeeping=bookkeeping)
    shards, ranks = rules.sizes(mesh)
    random = np.random.default_rng(0)
    k = random.standard_normal((shards, 2, 5, 4, 4)).astype(jnp.bfloat16)
    s = random.standard_normal((shards, 2, 4, 2)).astype(np.float32)
    plain = kv.plan(SPEC, **LIMITS)
    want = [jax.jit(session)(*kv.init(SPEC, plain), k[d], s[d]) for d in range(shards)]
    books = bookkeeping == "per_shard"
    if not books:
        k, s = k[0], s[0]
    plan = kv.plan(kv.per_rank(SPEC, ranks), **LIMITS)
    state, storage = kv.init(SPEC, plan, mesh=mesh, rules=rules)

    def everywhere(state, storage, k, s):
        def cut(x, axis):
            return kv.own_heads(x, axis, rules)

        state, storage, (*read, granted) = session(state, storage, k, s, cut)
        return state, storage, ([x[None] for x in read], granted)

    lead = ("data",) if books else ()
    of_ranks = PartitionSpec(*lead, "model")
    step = kv.on_mesh(
        everywhere, mesh, rules, out_specs=(rules.state, rules.storage, (of_ranks, rules.state))
    )
    placed = NamedSharding(mesh, rules.state)
    k, s = (jax.make_array_from_callback(x.shape, placed, lambda i, x=x: x[i]) for x in (k, s))
    state, storage, (read, granted) = step(state, storage, k, s)
    kv.check(state)
    for part in granted.addressable_shards:
        assert np.asarray(part.data).all()
    compared = 0
    for number, x in enumerate(read):
        for part in x.addressable_shards:
            place = [i.start or 0 for i in part.index]
            shard, rank = place[:2] if books else (0, place[0])
            whole = np.asarray(want[shard][2][number])
            own = np.split(whole, ranks, axis=whole.ndim - 2)[rank]
            data = np.asarray(part.data).reshape(own.shape)
            assert data.tobytes() == own.tobytes(), (number, shard, rank)
            compared += 1
    assert compared == 3 * 4
    told = [int(x) for x in want[0][0].seq_lens]
    seq_lens = np.asarray(state.seq_lens.addressable_shards[0].data).reshape(-1)
    assert seq_lens.tolist() == told == [0, 5]


def main() -> None:
    number, port = map(int, sys.argv[1:3])
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
    assert (jax.local_device_count(), jax.device_count()) == (4, 8)
    devices = np.array(jax.devices()).reshape(2, 4)
    for divided, bookkeeping in zip(sys.argv[3::2], sys.argv[4::2], strict=True):
        ours = devices if divided == "shards" else devices.T
        compare(jax.sharding.Mesh(ours, ("data", "model")), bookkeeping)
    multihost_utils.sync_global_devices("done")
    print(f"process {number} compared all")


if __name__ == "__main__":
    main()
