"""A cache on a mesh and the same without one, asked the same and compared bit for bit.

Per shard there are as many caches without a mesh as there are shards; under replicated bookkeeping
there is one. "Books" are how many.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from lockstep import leaves_equal

import kvpool as kv

EVERY_PAYLOAD = [
    kv.FullAttention(2, 8, dtype="bfloat16"),
    kv.SlidingWindow(5, 2, 8, 4, dtype="float32"),
    kv.RecurrentState({"ssm": ((4, 3, 2), "float32"), "conv": ((8, 3), "bfloat16")}),
    {
        "int8": kv.FullAttention(2, 8, dtype="int8", scales="token"),
        "fp8": kv.FullAttention(2, 8, dtype="float8_e4m3fn", scales="block"),
    },
    kv.LatentAttention(8, 4),
    kv.Compressed(2, 8),
    kv.FullAttention(2, 8, dtype="bfloat16"),
]


def mesh_of(shards: int, ranks: int, kind=AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh(
        (shards, ranks),
        ("data", "model"),
        devices=jax.devices()[: shards * ranks],
        axis_types=(kind, kind),
    )


def collectives(compiled) -> set[str]:
    """Those in a compiled program."""
    program = compiled.as_text()
    names = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")
    return {name for name in names if name in program}


class Twins:
    """`spec` on a mesh, with what `limits` says of a device's plan, and without one."""

    def __init__(self, spec, mesh, rules, **limits):
        self.spec, self.mesh, self.rules = spec, mesh, rules
        self.shards, self.ranks = rules.sizes(mesh)
        self.replicated = rules.bookkeeping == "replicated"
        self.of_rank = kv.per_rank(spec, self.ranks)
        self.plan = kv.plan(self.of_rank, **limits)
        self.state, self.storage = kv.init(spec, self.plan, mesh=mesh, rules=rules)
        self.books = 1 if self.replicated else self.shards
        for name in limits.keys() & {"budget_bytes", "slab_bytes"}:
            limits[name] *= self.ranks
        whole = kv.plan(spec, **limits)
        assert (whole.blocks, whole.slabs) == (self.plan.blocks, self.plan.slabs)
        self.plain = [kv.init(spec, whole) for _ in range(self.books)]
        self.compiled = {}  # {(function, shapes of what it is given): its program on the mesh}
        self.alone = {}

    def stack(self, *trees):
        """What the books are given, as it is given on the mesh."""
        if self.replicated:
            return trees[0]
        return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)

    def everywhere(self, function, *args):
        """function(*args) on the mesh."""
        key = function, str(jax.tree.map(np.shape, args))
        if key not in self.compiled:
            made = kv.on_mesh(function, self.mesh, self.rules)
            self.compiled[key] = made.lower(*args).compile()
        return self.compiled[key](*args)

    def on_its_own(self, function, *args):
        """function(*args) of one of the books without a mesh."""
        return self.alone.setdefault(function, jax.jit(function))(*args)

    def ask(self, verb, args: list[tuple]):
        """A verb of the state, for each of the books; gives their results, where it has any."""
        got = self.everywhere(verb, self.state, *self.stack(*args))
        want = [
            self.on_its_own(verb, state, *given)
            for (state, _), given in zip(self.plain, args, strict=True)
        ]
        states, results = want, None
        if isinstance(want[0], tuple) and not isinstance(want[0], kv.State):
            states, results = (list(part) for part in zip(*want, strict=True))
            got, result = got
            assert leaves_equal(result, self.stack(*results))
            self._copy(result, results)
        self.state = got
        self.plain = [(s, blocks) for s, (_, blocks) in zip(states, self.plain, strict=True)]
        self.compare_state()
        return results

    def _copy(self, result, results):
        if not result.copies:
            return
        self.storage = self.everywhere(kv.copy_blocks, self.storage, result.copies)
        self.plain = [
            (state, self.on_its_own(kv.copy_blocks, storage, r.copies))
            for (state, storage), r in zip(self.plain, results, strict=True)
        ]

    def compare_state(self):
        """Every array of every book; the plans differ in the bytes of blocks alone."""
        ours = jax.tree.leaves(self.state)
        theirs = jax.tree.leaves(self.stack(*(state for state, _ in self.plain)))
        assert leaves_equal(ours, theirs)
        kv.check(kv.clear_faults(self.state))

    def write(self, num: list, values: list):
        """Tokens i32[S] of each book and {(layer, tag): {buffer: [S, T, ...]}} with all heads."""
        args = self.stack(*zip(num, values, strict=True))
        cut = _cut_and_written(self.rules)
        self.storage = self.everywhere(cut, self.storage, self.state, *args)
        self.plain = [
            (state, self.on_its_own(written, storage, state, *given))
            for (state, storage), *given in zip(self.plain, num, values, strict=True)
        ]

    def compare_blocks(self):
        """Of every block, every rank has the heads that are its own of what is there without.

        Of slabs only what rows hold: the rest may be another group's.
        """
        for group in self.of_rank.groups:
            index = self.of_rank.group_index(group.name)
            ids = np.arange(self.plan.blocks[index], dtype=np.int32)
            ours = self._blocks_of(group.name, ids)
            for book, (state, storage) in enumerate(self.plain):
                held = np.isin(ids, kv.block_table(state, group.name))
                seen = held if self.plan.slabs else ids >= 0
                assert held.any()
                whole = decoded(self.spec.groups[index], kv.export_blocks(storage, group.name, ids))
                for rank in range(self.ranks):
                    got = decoded(group, ours[book, rank])
                    for name, values in whole.items():
                        want = heads_of(values, got[name].shape, rank, self.ranks)
                        same = got[name][seen].tobytes() == want[seen].tobytes()
                        assert same, (group.name, name, rank)

    def _blocks_of(self, name, ids) -> np.ndarray:
        """u[books, ranks, K, W] as every rank exports them."""
        ranks = PartitionSpec("data" if not self.replicated else None, "model")

        def export(storage):
            data = kv.export_blocks(storage, name, ids)[None]
            return data if not self.replicated else data[None]

        function = kv.on_mesh(export, self.mesh, self.rules, out_specs=ranks)
        return np.asarray(function(self.storage))


def decoded(group, data) -> dict:
    """{(layer of the group, buffer): [K, entries, *shape]} of exported blocks."""
    data = np.ascontiguousarray(np.asarray(data)).view(np.uint8)
    values = {}
    for layer in range(len(group.layers)):
        for buffer, start in zip(group.region.buffers, group.buffer_offsets, strict=False):
            entries = 1 if buffer.per_block else group.entries_per_block
            start += layer * group.buffer_offsets[-1]
            raw = data[:, start : start + entries * buffer.entry_bytes]
            typed = np.ascontiguousarray(raw).view(buffer.numpy_dtype)
            values[layer, buffer.name] = typed.reshape(len(data), entries, *buffer.shape)
    return values


def heads_of(values, shape, rank, ranks) -> np.ndarray:
    """The heads, axis 2, of a rank that has an array of `shape`."""
    heads, own = values.shape[2:3], shape[2:3]
    if heads == own:
        return values
    first = rank * heads[0] // ranks
    return np.ascontiguousarray(values[:, :, first : first + own[0]])


def written(storage, state, num, values, own=lambda buffer, x, axis: x):
    """The storage with a step of all layers; `own` takes a rank's part of values."""
    view = kv.step_view(state, num)
    spec = storage.plan.spec
    for (layer, tag), given in values.items():
        group = spec.group(spec.resolve(layer, tag)[0])
        lead = 1 if group.is_state else 2
        mine = {b.name: own(b, given[b.name], lead) for b in group.region.values}
        put = kv.write_state if group.is_state else kv.write
        storage = put(storage, view, layer, mine, tag)
    return storage


@functools.cache
def _cut_and_written(rules):
    def own(buffer, x, axis):
        cut = x.ndim > axis and x.shape[axis] != buffer.shape[0]
        return kv.own_heads(x, axis, rules) if cut else x

    return functools.partial(written, own=own)


def values_for(spec, rows: int, width: int, seed: int) -> dict:
    """Random values of a step, in every layer, for `written`."""
    random, values = np.random.default_rng(seed), {}
    for layer in range(len(spec.layers)):
        for tag in spec.tags(layer):
            group = spec.group(spec.resolve(layer, tag)[0])
            lead = (rows,) if group.is_state else (rows, width)
            values[layer, tag] = {
                b.name: np.asarray(
                    jnp.asarray(random.standard_normal((*lead, *b.shape))).astype(b.numpy_dtype)
                )
                for b in group.region.values
            }
    return values
