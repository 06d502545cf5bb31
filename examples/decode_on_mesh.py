"""Decode on a mesh of devices, and the same without one: the texts must be equal.

    python examples/decode_on_mesh.py
    python examples/decode_on_mesh.py --shards 1 --ranks 4
    python examples/decode_on_mesh.py --bookkeeping replicated

Blocks are divided over the shards and heads over the ranks. With bookkeeping per shard every shard
serves rows of its own; replicated, all shards serve the same rows, whose blocks lie on all of them.
Without as many devices the program simulates them on the CPU. The model's weights and its
projections are the same on every rank; what is divided is the cache and the attention over it.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec

import kvpool as kv
import prompts
from paged_memory import NONE, PagedMemory, cache_spec, chunk_step, decode_steps
from tiny_model import Config, load

RULES = kv.Rules(blocks="data", heads="model")


def mesh_spec(config: Config, block_size: int = 16) -> kv.CacheSpec:
    """`cache_spec`, but of the convolution's inputs the heads are the first axis, to be divided."""
    spec = cache_spec(config, block_size)
    shapes = config.state_shapes
    taps, _ = shapes["conv"][0]
    shapes["conv"] = ((config.query_heads, taps, 3, config.head_dim), "float32")
    state = kv.RecurrentState(shapes)
    layers = [
        state if kind == "recurrent" else layer
        for kind, layer in zip(config.pattern, spec.layers, strict=True)
    ]
    return kv.CacheSpec.from_layers(layers, block_size=block_size)


class MeshMemory(PagedMemory):
    """`PagedMemory` of one device of the mesh, which keeps and reads the heads of its rank."""

    def put(self, layer, k, v):
        """Write this rank's keys and values."""
        super().put(layer, *(kv.own_heads(x, 2, RULES) for x in (k, v)))

    def look(self, layer, q):
        """Attention of this rank's queries; the others' come from where they are."""
        return _of_all_ranks(super().look(layer, kv.own_heads(q, 2, RULES)), 2)

    def read_state(self, layer):
        """The whole state, for a model that computes all heads everywhere."""
        state = super().read_state(layer)
        state = {name: _of_all_ranks(value, 1) for name, value in state.items()}
        conv = jnp.moveaxis(state["conv"], 1, 3)
        return {**state, "conv": conv.reshape(*conv.shape[:2], -1)}

    def write_state(self, layer, state):
        """Write this rank's heads of the state."""
        c, conv = self.config, state["conv"]
        conv = conv.reshape(*conv.shape[:2], 3, c.query_heads, c.head_dim)
        state = {**state, "conv": jnp.moveaxis(conv, 3, 1)}
        own = {name: kv.own_heads(value, 1, RULES) for name, value in state.items()}
        super().write_state(layer, own)


def _of_all_ranks(values, axis):
    return jax.lax.all_gather(values, RULES.heads, axis=axis, tiled=True)


def generation(model, spec: kv.CacheSpec, new_tokens: int, memory: type[PagedMemory]):
    """(function, parameters): prompts in, greedy texts out, all of it in one dispatch.

    The function takes (parameters, state, storage, tokens i32[S, T], counts i32[S]), counts being
    those of the prompts' tokens, and gives (state, storage, texts i32[S, new_tokens]).
    """
    graph, parameters = nnx.split(model)

    def generate(parameters, state, storage, tokens, counts):
        rows = jnp.arange(counts.shape[0], dtype=jnp.int32)
        greedy = rows, jnp.int32(0), jnp.float32(0)
        state, _ = kv.admit(state, rows)
        state, storage, _, first = chunk_step(
            graph, spec, parameters, state, storage, tokens, counts, counts > 0, greedy, memory
        )
        left = jnp.full_like(counts, new_tokens - 1)
        state, storage, rest = decode_steps(
            graph, spec, parameters, state, storage, first, left, greedy, new_tokens - 1, memory
        )
        return state, storage, jnp.concatenate([first[None], rest]).T

    return generate, parameters


def alone(model, tokens, counts, new_tokens: int) -> np.ndarray:
    """The texts that one device writes."""
    plan = plan_for(cache_spec(model.config), len(counts), model.config)
    generate, parameters = generation(model, plan.spec, new_tokens, PagedMemory)
    state, _, texts = jax.jit(generate)(parameters, *kv.init(plan.spec, plan), tokens, counts)
    kv.check(state)
    return np.asarray(texts)


def on_mesh(model, tokens, counts, new_tokens: int, mesh, rules: kv.Rules):
    """(texts, plan of a device, storage) of the devices of a mesh."""
    shards, ranks = rules.sizes(mesh)
    spec, rows = mesh_spec(model.config), len(counts)
    given = tokens, counts
    if rules.bookkeeping == "per_shard":  # each has an equal share of the rows
        rows = rows // shards
        given = tokens.reshape(shards, rows, -1), counts.reshape(shards, rows)
    plan = plan_for(kv.per_rank(spec, ranks), rows, model.config)
    state, storage = kv.init(spec, plan, mesh=mesh, rules=rules)
    generate, parameters = generation(model, plan.spec, new_tokens, MeshMemory)
    everywhere = kv.on_mesh(
        generate,
        mesh,
        rules,
        in_specs=(PartitionSpec(), rules.state, rules.storage, rules.state, rules.state),
        check_vma=False,  # that all ranks choose the same tokens, from what they gathered
    )
    donating = jax.jit(everywhere, donate_argnums=(1, 2))
    state, storage, texts = donating(parameters, state, storage, *given)
    kv.check(state)
    return np.asarray(texts).reshape(len(counts), -1), plan, storage


def plan_for(spec: kv.CacheSpec, rows: int, config: Config) -> kv.Plan:
    """Blocks for all rows at their longest; of each group a multiple of 8, for any shards."""
    limits = {"max_seqs": rows, "max_seq_len": config.context}
    blocks = {}
    for group in spec.groups:
        most = rows * group.blocks_per_row(config.context, config.context)
        blocks[group.name] = most + -most % 8
    return kv.plan(spec, num_blocks=blocks, **limits)


def main() -> None:
    """Decode both ways, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=2, help="of the blocks")
    parser.add_argument("--ranks", type=int, default=2, help="of the heads")
    parser.add_argument("--bookkeeping", choices=["per_shard", "replicated"], default="per_shard")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=48)
    args = parser.parse_args()
    count = args.shards * args.ranks
    if args.requests % args.shards:
        sys.exit(f"{args.requests} requests cannot be dealt to {args.shards} shards")
    jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices() if len(jax.devices()) >= count else jax.devices("cpu")
    axes = (RULES.blocks, RULES.heads)
    mesh = jax.make_mesh((args.shards, args.ranks), axes, devices=devices[:count])
    rules = dataclasses.replace(RULES, bookkeeping=args.bookkeeping)

    model, (tokens, counts) = load(), padded(prompts.prompts(args.requests, longest=120))
    texts, plan, storage = on_mesh(model, tokens, counts, args.new_tokens, mesh, rules)
    print(plan)
    for array in storage.blocks:
        print(f"{array.dtype}{list(array.shape)} divided as {array.sharding.spec}")
    first = np.concatenate([tokens[0, : counts[0]], texts[0, texts[0] != NONE]])
    print(f"\n--- request 0\n{prompts.decode(first)}\n")
    same = (texts == alone(model, tokens, counts, args.new_tokens)).all(axis=1)
    print(f"checked: {same.sum()} of {len(same)} requests equal those of one device")
    if not same.all():
        sys.exit("the texts differ")


def padded(requests: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """(tokens i32[S, T], counts i32[S])."""
    counts = np.array([len(request) for request in requests], np.int32)
    tokens = np.zeros((len(requests), counts.max()), np.int32)
    for row, request in enumerate(requests):
        tokens[row, : counts[row]] = request
    return tokens, counts


if __name__ == "__main__":
    main()
