"""The loop over the blocks that move, and the running sums under it, against plain Python."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvpool.moves import WIDTH, for_each_block
from kvpool.running import running_sum


@pytest.mark.parametrize("shape", [(1,), (16,), (17,), (256,), (3, 100), (2, 3, 300), (5000,)])
def test_running_sums(shape):
    values = np.random.default_rng(0).integers(0, 9, shape).astype(np.int32)
    chex.assert_trees_all_equal(running_sum(jnp.asarray(values)), np.cumsum(values, -1, np.int32))


def listed(counts):
    """Every move that the loop hands out, as (group, row, place)."""
    room = WIDTH * (-(-int(counts.sum()) // WIDTH) + 1)

    def body(carry, moves):
        seen, end = carry
        columns = jnp.stack([moves.group, moves.row, moves.place, moves.pick(jnp.asarray(counts))])
        columns = jnp.where(moves.valid, columns, -1).T
        seen = jax.lax.dynamic_update_slice(seen, columns, (end, 0))
        return seen, end + WIDTH

    start = (jnp.full((room, 4), -1, jnp.int32), jnp.int32(0))
    seen, _ = jax.jit(lambda counts: for_each_block(counts, body, start))(jnp.asarray(counts))
    return np.asarray(seen)


@pytest.mark.parametrize(
    ("groups", "rows", "most"),
    [
        (1, 1, 3),
        (1, 1, 1000),
        (2, 5, 4),
        (3, 16, 9),
        (3, 1024, 1),
        (8, 33, 40),
        (2, 7, 0),
    ],
)
def test_every_move_is_handed_out_once(groups, rows, most):
    rng = np.random.default_rng(groups + rows)
    counts = rng.integers(0, most + 1, (groups, rows)).astype(np.int32)
    counts[:, rng.random(rows) < 0.5] = 0
    seen = listed(counts)
    valid = seen[:, 0] >= 0
    assert valid[: counts.sum()].all()
    assert not valid[counts.sum() :].any()
    want = {
        (g, r, place) for g in range(groups) for r in range(rows) for place in range(counts[g, r])
    }
    assert {tuple(move) for move in seen[valid][:, :3].tolist()} == want
    assert (seen[valid][:, 3] == counts[seen[valid][:, 0], seen[valid][:, 1]]).all()


def test_no_move_is_no_pass():
    counts = jnp.zeros((2, 5), jnp.int32)
    assert for_each_block(counts, lambda passes, moves: passes + 1, jnp.int32(0)) == 0
    counts = counts.at[1, 3].set(2 * WIDTH + 1)
    assert for_each_block(counts, lambda passes, moves: passes + 1, jnp.int32(0)) == 3
