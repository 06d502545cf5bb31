"""The kernels on the GPU against the references, bit for bit, in many block orders."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import DTYPES, OUTSIDE, random_bits, same_bits, word_of
from paged_cases import check
from where import IS_GPU, NAMED, ORDERS, SCALE, running

from kernel_moves import moves_of
from pallas_kernels import copy_blocks, paged_gather, paged_scatter, state_gather, state_scatter
from shapes import SHAPES

pytestmark = pytest.mark.gpu
check = functools.partial(check, context=running)

MOVES = [move for shape in SHAPES for move in moves_of(shape, SCALE)]
NAMES = [f"{move.shape.name}: {move.name}" for move in MOVES]
HEADS = (64, 80, 96, 128, 192, 256, 512, 576)


def with_absent(move, ids, order, rng):
    """The ids with some outside the pool, in every other order at least one."""
    ids_are_slots = "scatter" in move.name
    limit = move.blocks * (move.shape.group.entries_per_block if ids_are_slots else 1)
    absent = (limit, *OUTSIDE)
    holes = []
    for part in ids[: 2 if move.operation is copy_blocks else 1]:
        part = np.where(rng.random(part.shape) < 0.1, rng.choice(absent, part.shape), part)
        if order % 2:
            part.flat[rng.integers(part.size)] = absent[order // 2 % len(absent)]
        holes.append(part.astype(np.int32))
    return (*holes, *ids[len(holes) :])


def repeat(move, implementation, orders):
    """Makes the move so often, other ids and another layer each time; none may differ."""
    rng = np.random.default_rng(0)
    with running():
        differences = move.differences(implementation)
        blocks, values = move.random_blocks(), move.random_values(1)
        wrong = []
        for order in range(orders):
            layer = jnp.int32(order % move.shape.layers)
            ids = with_absent(move, move.ids(rng), order, rng)
            wrong.append(differences(blocks, layer, ids, values))
        assert [int(count) for count in wrong] == [0] * orders


@pytest.mark.parametrize("move", MOVES, ids=NAMES)
def test_shapes_of_models_in_many_orders(move):
    repeat(move, NAMED, ORDERS)


@pytest.mark.parametrize("move", MOVES[::6], ids=NAMES[::6])
def test_the_implementation_that_is_taken_by_itself(move):
    repeat(move, None, 2)


@pytest.mark.parametrize("implementation", [NAMED, None])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("entries", [1, 3, 16, 24])
def test_sizes(entries, head, implementation):
    check("bfloat16", entries, (3, head), word_of("bfloat16"), implementation)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(3, 16), (132,), (584,), (33,), (1,)], ids=str)
def test_dtypes_and_odd_sizes(name, shape):
    for entries in (3, 16):
        check(name, entries, shape, word_of(name), NAMED)


@pytest.mark.parametrize("tokens", [1, 2, 60])
def test_any_number_of_tokens(tokens):
    check("bfloat16", 16, (2, 64), word_of("bfloat16"), NAMED, tokens)
    check("uint8", 16, (5,), word_of("uint8"), NAMED, tokens)


def test_kernels_that_follow_each_other():
    """Each step of a scan reads what the one before it has just written, copied or brought."""
    blocks, entries, steps = (256, 16, 200) if IS_GPU else (12, 16, 3)
    rng = np.random.default_rng(0)
    orders = np.stack([rng.permutation(blocks) for _ in range(steps)]).astype(np.int32)
    values = random_bits(0, "bfloat16", (blocks // 2, 8, 64))

    @functools.partial(jax.jit, static_argnames="implementation")
    def chain(pool, orders, values, implementation):
        use = {"implementation": implementation}
        bounds = jnp.zeros(1, jnp.int32), jnp.full(1, blocks * entries, jnp.int32)

        def step(pool, order):
            half, other = order[: blocks // 2], order[blocks // 2 :]
            pool = paged_scatter(pool, half * entries + 3, values, entries=entries, **use)
            pool = copy_blocks(pool, half, other, **use)
            options = {"entries": entries, "shape": (8, 64), "dtype": np.dtype(jnp.bfloat16)}
            read = paged_gather(pool, order[None], *bounds, **options, **use)
            state = state_gather(pool, other, shape=(40, 128), dtype=np.dtype(np.uint16), **use)
            pool = state_scatter(pool, half, (state[::-1],), starts=(1024,), **use)
            bits = jax.lax.bitcast_convert_type(read, jnp.uint16).astype(jnp.uint32)
            mixed = bits * jnp.arange(1, bits.size + 1, dtype=jnp.uint32).reshape(bits.shape)
            return pool, jnp.sum(mixed, dtype=jnp.uint32)

        return jax.lax.scan(step, pool, orders)

    pool = random_bits(1, "uint16", (blocks, entries * 512))
    wanted = jax.device_get(chain(pool, orders, values, "xla"))
    with running():
        got = jax.device_get(chain(pool, orders, values, NAMED))
    assert same_bits(got[0], wanted[0])
    assert got[1].tolist() == wanted[1].tolist()


def test_more_elements_than_32_bits_count():
    """Blocks that a product in 32 bits would take for others, beyond 2^31 and beyond 2^32."""
    entries, entry = 16, 1024
    width, blocks = entries * entry, 300_004 if IS_GPU else 404
    half, last = (2**31 // width + 1, blocks - 3) if IS_GPU else (131, blocks - 3)
    written, copied, stated = [half, last, 1], [blocks - 1, half + 1], [blocks - 2, half + 2]
    use = {"implementation": NAMED}

    @functools.partial(jax.jit, donate_argnums=0)
    def writes(pool):
        slots = jnp.asarray([*written, -1, 2**27], jnp.int32) * entries + 15
        values = jnp.repeat(jnp.asarray([7, 3, 9, 99, 99], jnp.uint8)[:, None], entry, 1)
        pool = paged_scatter(pool, slots, values, entries=entries, **use)
        src, dst = jnp.asarray([last, half], jnp.int32), jnp.asarray(copied, jnp.int32)
        pool = copy_blocks(pool, src, dst, **use)
        states = (jnp.full((2, width), 5, jnp.uint8),)
        return state_scatter(pool, jnp.asarray(stated, jnp.int32), states, starts=(0,), **use)

    ids = np.asarray([*written, *copied, *stated, 0, blocks], np.int32)
    wanted = np.zeros((len(ids), entries, entry), np.uint8)
    wanted[[0, 4], 15], wanted[[1, 3], 15], wanted[2, 15], wanted[[5, 6]] = 7, 3, 9, 5
    with running():
        pool = writes(jnp.zeros((blocks, width), jnp.uint8))
        bounds = np.zeros(1, np.int32), np.full(1, ids.size * entries, np.int32)
        options = {"shape": (entry,), "dtype": np.dtype(np.uint8)}
        got = paged_gather(pool, ids[None], *bounds, entries=entries, **options, **use)
        whole = state_gather(pool, ids, shape=(width,), dtype=np.dtype(np.uint8), **use)
        nonzero = jnp.sum(jnp.any(pool != 0, axis=1))
    assert same_bits(got[0], wanted)
    assert same_bits(whole.reshape(wanted.shape), wanted)
    assert int(nonzero) == 7
