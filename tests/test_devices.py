"""The bookkeeping on one device, the blocks on another; and blocks divided among devices."""

import os
import subprocess
import sys

CODE = """
import jax, jax.numpy as jnp, numpy as np
import kvpool as kv

near, far = jax.devices("cpu")
layers = [kv.FullAttention(1, 4, dtype="float32"), kv.SlidingWindow(4, 1, 4)]
spec = kv.CacheSpec.from_layers(layers, block_size=2)
limits = dict(max_seqs=2, max_seq_len=16, max_step_tokens=4)
plan = kv.plan(spec, num_blocks={"full": 8, "window4": 8}, **limits)
state, storage = kv.init_state(spec, plan, near), kv.init_storage(spec, plan, far)
state, _ = kv.admit(state, np.array([0]))
k = jax.device_put(jnp.arange(32, dtype="float32").reshape(2, 4, 1, 4), far)
for _ in range(2):
    state, result = kv.reserve(state, np.array([4, 0]))
    view = jax.device_put(kv.step_view(state, np.array([4, 0])), far)
    storage = kv.write(storage, view, 0, {"k": k, "v": k})
    values, mask = kv.read(storage, view, 0)
    state = kv.advance(state, np.array([4, 0]))
state, result = kv.fork(state, np.array([0]), np.array([1]))
storage = kv.copy_blocks(storage, jax.device_put(result.copies, far))
kv.check(state)
assert {x.device for x in jax.tree.leaves(state)} == {near}
assert {x.device for x in jax.tree.leaves(storage)} == {far}
assert values["k"].device == far and int(mask.sum()) == 8
want = np.tile(np.arange(16.0).reshape(4, 4), (2, 1))
assert np.array_equal(np.asarray(values["k"])[0, :8, 0], want)
"""


def run(code: str, **environment: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, **environment}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_the_state_may_live_on_another_device_than_the_storage():
    run(CODE)


def test_64_bit_mode_changes_no_dtype():
    same = "assert all(x.dtype in (jnp.int32, bool) for x in jax.tree.leaves(state))"
    run(CODE.replace("kv.check(state)", f"kv.check(state)\n{same}"), JAX_ENABLE_X64="1")


DIVIDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
import kvpool as kv

mesh = jax.make_mesh((2,), ("rank",), axis_types=(AxisType.Auto,))
spec = kv.CacheSpec.from_layers([kv.FullAttention(1, 8, dtype="float32")], block_size=4)
plan = kv.plan(spec, num_blocks={"full": 8}, max_seqs=2, max_seq_len=16)
state, storage = kv.init(spec, plan)  # what one rank keeps: one of two heads
state, _ = kv.admit(state, np.array([0, 1]))
state, _ = kv.reserve(state, np.array([6, 3]))
k = jnp.arange(2 * 6 * 2 * 8, dtype="float32").reshape(2, 6, 2, 8)


def step(state, blocks, k):
    storage = jax.tree.unflatten(jax.tree.structure(kv.init_storage(spec, plan)), [blocks[0]])
    view = kv.step_view(state, jnp.array([6, 3], jnp.int32))
    storage = kv.write(storage, view, 0, {"k": k, "v": k})
    return kv.read(storage, view, 0)[0]["k"]


blocks = jnp.stack([storage.blocks[0]] * 2)
heads = P(None, None, "rank")
divided = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("rank"), heads), out_specs=heads)
got = np.asarray(jax.jit(divided)(state, blocks, k))
assert np.array_equal(got[0, :6], k[0]) and np.array_equal(got[1, :3], k[1, :3])
assert not got[0, 6:].any() and not got[1, 3:].any()
"""


def test_each_rank_of_a_shard_map_has_heads_of_its_own():
    run(DIVIDED)
