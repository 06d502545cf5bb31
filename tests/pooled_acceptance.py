"""A pytest plugin: runs tests that know nothing of pooling with caches that share memory.

    KVPOOL_POOLING=elastic pytest -p pooled_acceptance ...

Specs that do not say how their pools are made take the pooling of the environment. Explicit counts
give a group memory of its own whatever the pooling; so a cache of one group, whose counts mean the
same there, gets slabs of two of its blocks, or of one where its count is odd.
"""

import functools
import inspect
import os

import kvpool as kv

POOLING = os.environ["KVPOOL_POOLING"]


def _from_layers(plain):
    @functools.wraps(plain)
    def from_layers(layers, block_size=16, pooling=POOLING, **options):
        return plain(layers, block_size, pooling, **options)

    return from_layers


def _plan(plain):
    @functools.wraps(plain)
    def plan(spec, budget_bytes=None, *, num_blocks=None, **options):
        made = plain(spec, budget_bytes, num_blocks=num_blocks, **options)
        if spec.pooling != "elastic" or num_blocks is None or len(spec.groups) > 1:
            return made
        (count,), (group,) = made.blocks, spec.groups
        slab = group.bytes_per_block * (1 if count % 2 else 2)
        memory = count * group.bytes_per_block
        slabbed = plain(spec, memory, slab_bytes=slab, **options)
        # No more slabs are made than all rows can use.
        return slabbed if slabbed.blocks == made.blocks else made

    plan.__signature__ = inspect.signature(plain)
    return plan


kv.CacheSpec.from_layers = _from_layers(kv.CacheSpec.from_layers)
kv.plan = _plan(kv.plan)
