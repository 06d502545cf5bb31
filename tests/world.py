"""A lockstep with block arrays: every token written is known, every read is compared.

Cells carry stamps that no two writes share, so a foreign or stale read shows. Blocks that nobody
holds are filled with all-one bits (NaN as a float) after every verb.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from lockstep import JIT, Lockstep, Setup, i32

import kvpool as kv


def cells(values, shape, buffer: int):
    """What a token of this value holds in a buffer: f32[..., *shape], exact in float32."""
    lanes = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) / 16 + 0.5 * buffer
    return values.reshape(*values.shape, *(1,) * len(shape)) + lanes


def layers_of(setup: Setup, recurrent: bool):
    """(layer, {buffer: shape of an entry}) of the token layers, or of the recurrent ones."""
    for layer, kind in enumerate(setup.kinds):
        if (kind == "state") == recurrent:
            yield layer, setup.shapes(layer)


def _write_tokens(setup, storage, view, values):
    for layer, shapes in layers_of(setup, recurrent=False):
        data = {
            b: cells(values, s, i).astype(setup.dtype) for i, (b, s) in enumerate(shapes.items())
        }
        storage = kv.write(storage, view, layer, data)
    return storage


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def write_step(setup: Setup, storage, state, num, values, sums):
    """Tokens f32[S, T] and sums f32[S, 2] through a rectangular view of i32[S] tokens."""
    view = kv.step_view(state, num)
    storage = _write_tokens(setup, storage, view, values)
    for layer, _ in layers_of(setup, recurrent=True):
        storage = kv.write_state(storage, view, layer, {"sum": sums})
    return storage


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def write_ragged(setup: Setup, storage, state, rows, positions, values):
    """Tokens f32[T] through a flat view."""
    return _write_tokens(setup, storage, kv.ragged_view(state, rows, positions), values)


@functools.partial(jax.jit, static_argnums=0)
def read_all(setup: Setup, storage, state, num):
    """Per layer (values, mask, key positions), or a recurrent layer's values."""
    view, out = kv.step_view(state, num), {}
    for layer, _ in layers_of(setup, recurrent=False):
        values, mask = kv.read(storage, view, layer)
        out[layer] = values, mask, view.key_positions(setup.group(layer))
    for layer, _ in layers_of(setup, recurrent=True):
        out[layer] = kv.read_state(storage, view, layer)
    return out


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def fill_blocks(setup: Setup, storage, ids):
    """All-one bits into blocks {group: i32[N]}."""
    for name, which in ids.items():
        data = kv.export_blocks(storage, name, which)
        ones = jax.tree.map(lambda x: jnp.full(x.shape, ~np.zeros((), x.dtype)), data)
        storage = kv.import_blocks(storage, name, which, ones)
    return storage


class World(Lockstep):
    """`tokens[row]`: the value written at each settled position of a live row."""

    def __init__(self, setup: Setup, verbs=JIT):
        super().__init__(setup, verbs)
        self.storage = kv.init_storage(setup.spec, setup.plan)
        self.tokens: dict[int, list[float]] = {}
        self.stamp = 0
        self._poison()

    # ---------------------------------------------------------------- verbs
    def admit(self, *rows, tokens=None, **prefix):
        result = super().admit(*rows, **prefix)
        for i, r in enumerate(rows):
            if bool(result.granted[i]):
                self.tokens[r] = list(tokens[i]) if tokens else []
        return self._after(result)

    def fork(self, src, dst):
        result = super().fork(src, dst)
        for s, d, g in zip(np.atleast_1d(src), np.atleast_1d(dst), result.granted, strict=True):
            if bool(g):
                self.tokens[int(d)] = list(self.tokens[int(s)])
        return self._after(result)

    def truncate(self, lens):
        result = super().truncate(lens)
        for r, m in enumerate(self._vector(lens, -1).tolist()):
            if bool(result.granted[r]):
                del self.tokens[r][m:]
        return self._after(result)

    def snapshot(self, *rows):
        return self._after(super().snapshot(*rows))

    def release(self, *rows):
        super().release(*rows)
        for r in rows:
            self.tokens.pop(r, None)
        self._poison()

    def drop(self, ids):
        super().drop(ids)
        self._poison()

    def step(self, num, keep=None, ragged=False, **options):
        """Reserves, writes and settles tokens; of a row in `keep` only so many are accepted."""
        num = self._vector(num)
        result = self.reserve(num, each=True, **options)
        num = np.where(result.granted, num, 0)
        keep = np.minimum(num, self._vector({**dict(enumerate(num)), **(keep or {})}))
        # Tokens that would stop inside a gap are not taken in: the state stays before them.
        settled = kv.advance(self.state, keep).seq_lens - self.state.seq_lens
        values = self.write(num, np.asarray(settled), ragged)
        if not options.get("tail_only"):
            self.verify(num, values)
        self.advance(keep)
        for (
            r,
            tokens,
        ) in self.tokens.items():  # past a gap an advance is a fault and settles nothing
            tokens += values[r, : self.n(r) - len(tokens)].tolist()
        self._poison()
        self.verify()
        return result

    def write(self, num, keep=None, ragged=False) -> np.ndarray:
        """Writes stamped tokens at n.. of every row; the values f32[S, step]."""
        setup, width, num = self.setup, self.setup.step, self._vector(num)
        self.stamp += 1
        lens = np.asarray(self.state.seq_lens)
        positions = lens[:, None] + np.arange(width, dtype=np.int32)
        rows = np.arange(setup.rows, dtype=np.float32)[:, None]
        values = (100.0 * (self.stamp * setup.rows + rows) + positions).astype(np.float32)
        asked = np.arange(width) < num[:, None]
        shown = np.where(asked, values, np.nan).astype(np.float32)
        sums = self._sums(values, num if keep is None else keep)
        if ragged:
            flat = [i32(np.where(asked, x, -1).reshape(-1))
                    for x in (np.broadcast_to(rows, asked.shape), positions)]  # fmt: skip
            self.storage = write_ragged(setup, self.storage, self.state, *flat, shown.reshape(-1))
            values_now = np.zeros((setup.rows, 0), np.float32)
        else:
            values_now = shown
        self.storage = write_step(setup, self.storage, self.state, i32(num), values_now, sums)
        return values

    def _sums(self, values, keep) -> np.ndarray:
        """The recurrent state of each row once `keep` tokens are taken in: sum and last token."""
        out = np.full((self.setup.rows, 2), np.nan, np.float32)
        for r, k in enumerate(np.asarray(keep).tolist()):
            if r in self.tokens:
                out[r] = state_of(self.tokens[r] + values[r, :k].tolist())
        return out

    # ---------------------------------------------------------------- comparing
    def _after(self, result):
        self.storage = kv.copy_blocks(self.storage, result.copies)
        self._poison()
        self.verify()
        return result

    def _poison(self):
        """Fills what nobody holds; after the owed copies, which may read given-back blocks."""
        plan, ids = self.setup.plan, {}
        taken = {pool: set(of_pool.values()) for pool, of_pool in self.ids.items()}
        per_slab = dict(zip((g.pool for g in self.model.groups), plan.per_slab, strict=False))
        for g, size in zip(self.model.groups, plan.blocks, strict=True):
            each = per_slab.get(g.pool, 0)
            others = {
                block // per_slab[pool]
                for pool, blocks in taken.items()
                if each and pool != g.pool and per_slab[pool]
                for block in blocks
            }  # slabs that hold blocks of another size
            free = [i not in taken[g.pool] and (not each or i // each not in others)
                    for i in range(size)]  # fmt: skip
            ids[g.name] = i32(np.where(free, np.arange(size), -1))
        self.storage = fill_blocks(self.setup, self.storage, ids)

    def verify(self, num=None, values=None):
        """Every row reads exactly its settled tokens, those of the step, and 0 elsewhere."""
        setup = self.setup
        num = np.zeros(setup.rows, np.int32) if num is None else i32(num)
        seen = read_all(setup, self.storage, self.state, num)
        for r in range(setup.rows):
            tokens = self.tokens.get(r, [])
            shown = tokens + (values[r, : num[r]].tolist() if num[r] else [])
            for layer, _ in layers_of(setup, recurrent=False):
                self._verify_layer(layer, r, shown, len(tokens), seen[layer])
            for layer, _ in layers_of(setup, recurrent=True):
                if values is None:  # within a step the state is already the next one
                    got = np.asarray(seen[layer]["sum"])[r]
                    assert got.tolist() == state_of(tokens), (r, got, state_of(tokens))

    def _verify_layer(self, layer, r, shown, n, seen):
        values, mask, positions = jax.tree.map(np.asarray, seen)
        group, kind = self.model.groups[layer], self.setup.kinds[layer]
        ratio = kind[1] if kind[0] == "comp" else 1
        want = [p for p in range(group.first_read(n), len(shown)) if (p + 1) % ratio == 0]
        got = positions[r][mask[r]].tolist()
        assert got == want, f"layer {layer} row {r}: reads {got}, wanted {want}"
        assert (positions[r][~mask[r]] == -1).all()
        wanted = np.asarray([shown[p] for p in want], np.float32)
        for i, (name, shape) in enumerate(dict(layers_of(self.setup, False))[layer].items()):
            data = values[name][r]
            expect = cells(wanted, shape, i).astype(data.dtype)
            assert data[mask[r]].tobytes() == expect.tobytes(), (layer, r, name, data[mask[r]])
            assert not data[~mask[r]].tobytes().strip(b"\0"), f"layer {layer}: fill is not 0"


def state_of(tokens) -> list[float]:
    """The recurrent state after these tokens: their sum and the last of them."""
    return [float(sum(tokens)), float(tokens[-1])] if tokens else [0.0, 0.0]
