"""Scales per block through the life of rows, against codes and scales computed in plain numpy."""

import copy
import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lockstep import i32
from storage_cases import numpy_dtype
from test_quantized_bounds import assert_within, least_power, one_row

import kvpool as kv

ROWS, BLOCK, BLOCKS, MAX_LEN, STEP, HEADS, LAYER = 3, 4, 14, 16, 6, 2, 1
SIZES = {"k": 4, "v": 3}


class Block:
    """What one block should hold: {buffer: [BLOCK, HEADS, D]} numbers of codes and f64 scales."""

    def __init__(self):
        self.scale = {name: np.zeros(HEADS) for name in SIZES}
        self.codes = {name: np.zeros((BLOCK, HEADS, size)) for name, size in SIZES.items()}

    def write(self, places, values, dtype):
        """Values {buffer: f64 [n, HEADS, D]} at ascending places."""
        if places[0] == 0:
            self.scale = {name: np.zeros(HEADS) for name in SIZES}
        for name, x in values.items():
            finite = np.abs(np.where(np.isfinite(x), x, 0)).max(axis=(0, 2))
            needed = np.asarray([least_power(a, dtype) for a in finite])
            old, new = self.scale[name], np.maximum(self.scale[name], needed)
            self.codes[name] = to_codes(self.codes[name] * (old / new)[:, None], dtype)
            self.codes[name][places] = to_codes(x / new[:, None], dtype)
            self.scale[name] = new


def to_codes(x, dtype):
    """The numbers nearest to f64 [...] that codes can be, NaN for what is not finite."""
    x = np.where(np.isfinite(x), x, np.nan)
    if dtype == "int8":
        return np.rint(x)
    return x.astype(np.float32).astype(numpy_dtype(dtype)).astype(np.float64)


class Rows:
    """kvpool's rows and, beside them, what each should hold: its blocks and its values."""

    def __init__(self, region, dtype):
        self.dtype = dtype
        spec = kv.CacheSpec.from_layers([region] * 2, block_size=BLOCK)
        self.group = spec.groups[0]
        plan = kv.plan(spec, num_blocks={self.group.name: BLOCKS}, max_seqs=ROWS,
                       max_seq_len=MAX_LEN, max_step_tokens=STEP)  # fmt: skip
        self.state, self.storage = kv.init(spec, plan)
        self.state, _ = kv.admit(self.state, i32(range(ROWS)))
        self.rng = np.random.default_rng(0)
        # What earlier owners left: scales of all bit patterns, NaN and infinity among them.
        shape, word = self.storage.blocks[0].shape, self.storage.blocks[0].dtype
        left = self.rng.integers(0, 256, shape).astype(word)
        left[::3] = 255
        ids = i32(range(BLOCKS))
        self.storage = kv.import_blocks(self.storage, self.group.name, ids, left)
        self.blocks: list[dict[int, Block]] = [{} for _ in range(ROWS)]
        self.values: list[list] = [[] for _ in range(ROWS)]  # {buffer: f64 [HEADS, D]} a token

    def n(self, row):
        return len(self.values[row])

    def table(self):
        return np.asarray(kv.block_table(self.state, self.group.name))

    def words(self):
        return np.asarray(self.storage.blocks[0])

    def tokens(self, exponents):
        """Values of every row {buffer: bfloat16 [ROWS, STEP, HEADS, D]}."""
        power = np.asarray(exponents)[:, None, None, None]
        out = {}
        for name, size in SIZES.items():
            shape = (ROWS, STEP, HEADS, size)
            spread = self.rng.integers(-3, 4, (ROWS, STEP, HEADS, 1))
            x = self.rng.normal(size=shape) * np.exp2(power + spread)
            x[self.rng.random(shape) < 0.02] = np.nan
            x[self.rng.random(shape) < 0.02] = -np.inf
            x[self.rng.random(shape[:3]) < 0.1] = 0
            out[name] = x.astype(numpy_dtype("bfloat16"))
        return out

    def write(self, num, keep, exponents, cuts):
        """Up to `num` tokens behind what each row has, of which up to `keep` are accepted.

        They are given in one rectangular call, or where `cuts` are given in flat calls that end
        there, each in an order of its own.
        """
        num = [min(k, MAX_LEN - self.n(row)) for row, k in enumerate(num)]
        self.state, result = kv.reserve(self.state, i32(num), each=True)
        num = np.where(result.granted, num, 0)
        values = self.tokens(exponents)
        if cuts is None:
            self.call(kv.step_view(self.state, i32(num)), num, values, values, 0, STEP)
        else:
            for begin, end in itertools.pairwise(sorted({0, *cuts, STEP})):
                self.flat_call(num, values, begin, end)
        keep = np.minimum(keep, num)
        for row, accepted in enumerate(keep):
            for i in range(accepted):
                self.values[row].append({name: x[row, i] for name, x in values.items()})
        self.state = kv.advance(self.state, i32(keep))

    def flat_call(self, num, values, begin, end):
        at = np.arange(STEP)
        asked = (at >= begin) & (at < np.minimum(end, num[:, None]))
        order = self.rng.permutation(asked.size)
        rows = np.where(asked, np.arange(ROWS)[:, None], -1).reshape(-1)[order]
        positions = (np.asarray(self.state.seq_lens)[:, None] + at).reshape(-1)[order]
        flat = {name: x.reshape(-1, *x.shape[2:])[order] for name, x in values.items()}
        view = kv.ragged_view(self.state, i32(rows), i32(positions))
        self.call(view, num, values, flat, begin, end)

    def call(self, view, num, values, given, begin, end):
        """One write of tokens begin..end-1 of each row; no other block may change."""
        before, table = self.words(), self.table()
        self.storage = kv.write(self.storage, view, LAYER, given)
        others = set(range(BLOCKS))
        for row, n in enumerate(map(self.n, range(ROWS))):
            positions = np.arange(n + begin, n + min(end, num[row]))
            for column in np.unique(positions // BLOCK):
                here = positions[positions // BLOCK == column]
                part = {name: x[row, here - n].astype(float) for name, x in values.items()}
                block = self.blocks[row].setdefault(int(column), Block())
                block.write(here - column * BLOCK, part, self.dtype)
                others.discard(int(table[row, column]))
        others = sorted(others)
        assert (self.words()[others] == before[others]).all()

    def fork(self, src, dst):
        if src == dst:
            return
        self.restart(dst)
        self.state = kv.release(self.state, i32([dst]))
        self.state, result = kv.fork(self.state, i32([src]), i32([dst]))
        self.storage = kv.copy_blocks(self.storage, result.copies)
        if bool(result.ok):
            self.values[dst], full = list(self.values[src]), self.n(src) // BLOCK
            self.blocks[dst] = {column: block if column < full else copy.deepcopy(block)
                                for column, block in self.blocks[src].items()}  # fmt: skip
        else:
            self.state, _ = kv.admit(self.state, i32([dst]))

    def truncate(self, row, length):
        lengths = np.full(ROWS, -1)
        lengths[row] = min(length, self.n(row))
        self.state, result = kv.truncate(self.state, i32(lengths))
        self.storage = kv.copy_blocks(self.storage, result.copies)
        if bool(result.granted[row]):
            del self.values[row][lengths[row] :]
            kept = {c: b for c, b in self.blocks[row].items() if c * BLOCK < self.n(row)}
            self.blocks[row] = copy.deepcopy(kept)

    def restart(self, row):
        self.state = kv.release(self.state, i32([row]))
        self.state, _ = kv.admit(self.state, i32([row]))
        self.values[row], self.blocks[row] = [], {}

    def check(self):
        """Codes and scales bit for bit, and what is read within the bounds of what was given."""
        kv.check(self.state)
        view = kv.step_view(self.state, i32([0] * ROWS))
        values, mask = jax.tree.map(np.asarray, kv.read(self.storage, view, LAYER))
        positions = np.asarray(view.key_positions(self.group.name))
        for row, name in itertools.product(range(ROWS), SIZES):
            shown, y = positions[row][mask[row]], values[name][row][mask[row]]
            assert not values[name][row][~mask[row]].tobytes().strip(b"\0")
            for column in np.unique(shown // BLOCK):
                block = self.blocks[row][int(column)]
                codes, scale = self.stored(self.table()[row, column], name)
                assert (scale == block.scale[name]).all()
                here = np.arange(column * BLOCK, min((column + 1) * BLOCK, self.n(row)))
                wanted = block.codes[name][here % BLOCK]
                assert np.array_equal(codes[here % BLOCK], wanted, equal_nan=True)
                here = here[np.isin(here, shown)]
                x = np.stack([self.values[row][i][name] for i in here]).astype(float)
                got = y[np.isin(shown, here)]
                exact = block.codes[name][here % BLOCK] * block.scale[name][:, None]
                assert np.array_equal(got.astype(float), exact, equal_nan=True)
                scale = block.scale[name][:, None]
                assert_within(x, got, scale, self.dtype, "bfloat16", grown=True)

    def stored(self, block, name):
        """(numbers of codes [BLOCK, HEADS, D], scales f64 [HEADS]) from the bytes of a block."""
        raw = self.words()[block].view(np.uint8)
        start, part = LAYER * self.group.buffer_offsets[-1], {}
        for buffer, at in zip(self.group.region.buffers, self.group.buffer_offsets, strict=False):
            shape = buffer.shape if buffer.per_block else (BLOCK, *buffer.shape)
            size = np.prod(shape, dtype=int) * buffer.numpy_dtype.itemsize
            data = raw[start + at : start + at + size]
            part[buffer.name] = data.view(buffer.numpy_dtype).reshape(shape).astype(float)
        codes = part[name]
        if self.dtype == "int8":
            codes = np.where(codes == -128, np.nan, codes)
        return codes, part[f"{name}_scale"]


counts = st.lists(st.integers(0, STEP), min_size=ROWS, max_size=ROWS)
row_numbers = st.integers(0, ROWS - 1)
operations = st.one_of(
    st.tuples(
        st.just("write"), counts, counts,
        st.lists(st.integers(-140, 90) | st.integers(-6, 6), min_size=ROWS, max_size=ROWS),
        st.none() | st.lists(st.integers(1, STEP - 1), max_size=3),
    ),
    st.tuples(st.just("fork"), row_numbers, row_numbers),
    st.tuples(st.just("truncate"), row_numbers, st.integers(0, MAX_LEN)),
    st.tuples(st.just("restart"), row_numbers),
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("all", "int8"),
        ("window", "float8_e4m3fn"),
        pytest.param("all", "float8_e5m2", marks=pytest.mark.slow),
        pytest.param("window", "int8", marks=pytest.mark.slow),
    ],
)
@given(steps=st.lists(operations, min_size=3, max_size=12))
@settings(max_examples=20)
def test_blocks_that_fill_and_change_hands(kind, dtype, steps):
    options = {"v_head_dim": SIZES["v"], "dtype": dtype, "scales": "block"}
    region = (
        kv.FullAttention(HEADS, SIZES["k"], **options)
        if kind == "all"
        else kv.SlidingWindow(5, HEADS, SIZES["k"], **options)
    )
    rows = Rows(region, dtype)
    for name, *arguments in steps:
        getattr(rows, name)(*arguments)
        rows.check()


@pytest.fixture(params=["cpu", "elsewhere"])
def platform(request, monkeypatch):
    """Both ways of rescaling: the CPU's passes, and what every other platform compiles."""
    if request.param == "elsewhere":
        jax.clear_caches()
        choose = lambda *arguments, default, **_: default(*arguments)  # noqa: E731
        monkeypatch.setattr(jax.lax, "platform_dependent", choose)
    yield request.param
    if request.param == "elsewhere":
        jax.clear_caches()


@pytest.mark.parametrize("view", ["rectangular", "flat"])
def test_many_rows_that_grow_together(view, platform):
    options = {"v_head_dim": SIZES["v"], "dtype": "int8", "scales": "block"}
    rows = Rows(kv.FullAttention(HEADS, SIZES["k"], **options), "int8")
    for step in range(4):
        power = [9 * step + row for row in range(ROWS)]
        rows.write([5, 3, 1], [4, 3, 1], power, None if view == "rectangular" else [2])
        rows.check()
    assert [rows.n(row) for row in range(ROWS)] == [16, 12, 4]


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_flat_calls_that_leave_positions_out(dtype, platform):
    """One row in the middle of many blocks at once, which all outgrow their scales."""
    region = kv.FullAttention(HEADS, 4, v_head_dim=3, dtype=dtype, scales="block")
    state, storage = one_row(region, BLOCK, blocks=5, max_len=20)
    state, _ = kv.reserve(state, i32([20]))
    blocks, rng = [Block() for _ in range(5)], np.random.default_rng(0)
    for place in range(BLOCK):
        positions = rng.permutation(np.arange(place, 20, BLOCK))
        values = {}
        for name, size in SIZES.items():
            growth = rng.integers(-2, 9, (5, HEADS, 1)) + 3.0 * place
            x = rng.normal(size=(5, HEADS, size)) * np.exp2(growth)
            values[name] = x.astype(numpy_dtype("bfloat16"))
        view = kv.ragged_view(state, i32([0] * 5), i32(positions))
        storage = kv.write(storage, view, 0, values)
        for i, position in enumerate(positions):
            part = {name: x[i : i + 1].astype(float) for name, x in values.items()}
            blocks[position // BLOCK].write([place], part, dtype)
        read, mask = kv.read(storage, view, 0)
        for name in SIZES:
            y = np.asarray(read[name])[0].astype(float).reshape(5, BLOCK, HEADS, -1)
            wanted = [b.codes[name] * b.scale[name][:, None] for b in blocks]
            assert (y[:, : place + 1] == np.stack(wanted)[:, : place + 1]).all()
    assert np.asarray(mask).all()
