"""Shards: a state that lies on a mesh, as the host sees it; for `check`."""

from collections.abc import Iterator

import jax
import numpy as np

from kvpool.state import State
from kvpool.status import InvariantError


def shards_of(state: State) -> Iterator[tuple[str, State]]:
    """(where, state of numpy arrays) of every shard that this process can read.

    `where` is what to say before a complaint, "" for a state without an axis of shards.

    Raises:
      InvariantError: where devices that should have the same differ, naming them and the array.
    """
    paths, structure = jax.tree_util.tree_flatten_with_path(state)
    if state.seq_lens.ndim == 1:
        yield "", jax.tree.unflatten(structure, [_parts(*leaf, False)[0] for leaf in paths])
        return
    leaves = [_parts(path, x, True) for path, x in paths]
    for number in sorted(leaves[0]):
        yield f"shard {number}: ", jax.tree.unflatten(structure, [leaf[number] for leaf in leaves])


def _parts(path, leaf, stacked: bool) -> dict[int, np.ndarray]:
    """{shard: its part} of an array with an axis of shards in front; without one {0: the array}."""
    if not isinstance(leaf, jax.Array):
        leaf = np.asarray(leaf)
        return dict(enumerate(leaf)) if stacked else {0: leaf}
    parts: dict[int, tuple[jax.Device, np.ndarray]] = {}
    for shard in leaf.addressable_shards:
        data = np.asarray(shard.data)
        first = (shard.index[0].start or 0) if stacked else 0
        for number, part in enumerate(data if stacked else [data], first):
            device, known = parts.setdefault(number, (shard.device, part))
            if not np.array_equal(known, part):
                where = f"shard {number}: " if stacked else ""
                name = jax.tree_util.keystr(path)
                raise InvariantError(
                    f"{where}state{name} is not the same on {device} and on {shard.device}"
                )
    return {number: part for number, (_, part) in parts.items()}
