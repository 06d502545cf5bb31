"""Drives kvpool and the oracle side by side: every verb is asked of both, every answer compared."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import numpy as np
from oracle import ABSENT, UNHELD
from setups import MIXED, PLAIN, SMALL, Setup

import kvpool as kv

__all__ = ["EAGER", "I32MAX", "I32MIN", "JIT", "MIXED", "PLAIN", "SMALL", "Lockstep", "Setup",
           "copy_of", "i32", "leaves_equal"]  # fmt: skip

I32MAX, I32MIN = 2**31 - 1, -(2**31)

# One jitted function per verb for the whole run: jax caches by the state's static sizes.
JIT = SimpleNamespace(
    admit=jax.jit(kv.admit),
    reserve=jax.jit(kv.reserve, static_argnames=("each", "tail_only")),
    advance=jax.jit(kv.advance),
    truncate=jax.jit(kv.truncate),
    fork=jax.jit(kv.fork),
    snapshot=jax.jit(kv.snapshot),
    release=jax.jit(kv.release),
    retain=jax.jit(kv.retain),
    drop=jax.jit(kv.drop),
    fits=kv.fits,  # `keep_free` is static, and there would be a compilation for each value
    clear_faults=jax.jit(kv.clear_faults),
)
EAGER = SimpleNamespace(**{name: getattr(kv, name) for name in vars(JIT)})


def i32(values) -> np.ndarray:
    return np.asarray(values, np.int32)


def leaves_equal(a, b) -> bool:
    """Whether two pytrees have the same structure and bit for bit the same leaves."""
    la, lb = jax.tree.leaves(a), jax.tree.leaves(b)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        for x, y in zip(map(np.asarray, la), map(np.asarray, lb), strict=True)
    )


def copy_of(tree):
    """A host copy that donation and later steps cannot reach."""
    return jax.tree.map(lambda x: np.array(x), tree)


class Lockstep:
    """One state of kvpool beside the oracle's, compared after every verb.

    Rows are given as in the contract; `verbs` is JIT or EAGER. `ids` maps the model's blocks of
    each pool to the ids that kvpool handed out, for every block that is held.
    """

    def __init__(self, setup: Setup, verbs=JIT):
        self.setup, self.verbs = setup, verbs
        self.state = kv.init_state(setup.spec, setup.plan)
        self.model = setup.oracle()
        self.ids: dict[str, dict[int, int]] = self.model.ids
        self.compare_state()

    # ---------------------------------------------------------------- verbs with a result
    def admit(self, *rows, lengths=None, blocks=None, shared=False):
        """`blocks`: {group: [ids, ...] per row}, or {group: ids} where shared."""
        prefix, per_row = None, None
        if lengths is not None:
            prefix = kv.Prefix(i32(lengths), {g: i32(x) for g, x in blocks.items()})
            spread = {g: [x] * len(rows) if shared else x for g, x in blocks.items()}
            per_row = [{g: self._model_ids(g, x[i]) for g, x in spread.items()}
                       for i in range(len(rows))]  # fmt: skip
            lengths = [lengths] * len(rows) if np.ndim(lengths) == 0 else list(lengths)
        want = self.model.admit(list(rows), lengths, per_row)
        return self._judge(want, self.verbs.admit(self.state, i32(rows), prefix))

    def reserve(self, num, each=False, tail_only=False):
        num = self._vector(num)
        want = self.model.reserve(num.tolist(), each, tail_only)
        return self._judge(
            want, self.verbs.reserve(self.state, num, each=each, tail_only=tail_only)
        )

    def truncate(self, lens):
        lens = self._vector(lens, -1)
        return self._judge(
            self.model.truncate(lens.tolist()), self.verbs.truncate(self.state, lens)
        )

    def fork(self, src, dst):
        src, dst = np.atleast_1d(i32(src)), np.atleast_1d(i32(dst))
        want = self.model.fork(src.tolist(), dst.tolist())
        return self._judge(want, self.verbs.fork(self.state, src, dst))

    def snapshot(self, *rows):
        want = self.model.snapshot(list(rows))
        return self._judge(want, self.verbs.snapshot(self.state, i32(rows)))

    # ---------------------------------------------------------------- verbs without one
    def advance(self, num):
        num = self._vector(num)
        self.model.advance(num.tolist())
        self._settled(self.verbs.advance(self.state, num))

    def release(self, *rows):
        self.model.release(list(rows))
        self._settled(self.verbs.release(self.state, i32(rows)))

    def retain(self, ids):
        self.model.retain({g: self._model_ids(g, x) for g, x in ids.items()})
        self._settled(self.verbs.retain(self.state, {g: i32(x) for g, x in ids.items()}))

    def drop(self, ids):
        self.model.drop({g: self._model_ids(g, x) for g, x in ids.items()})
        self._settled(self.verbs.drop(self.state, {g: i32(x) for g, x in ids.items()}))

    def fits(self, num, keep_free=0):
        """Verdicts per row, by name."""
        num = self._vector(num)
        got = np.asarray(self.verbs.fits(self.state, num, keep_free=keep_free))
        want = self.model.fits(num.tolist(), keep_free)
        assert got.tolist() == [int(kv.Status[w]) for w in want], (got, want)
        return want

    # ---------------------------------------------------------------- looks
    def table(self, row, layer=0) -> list[int]:
        return np.asarray(kv.block_table(self.state, self.setup.group(layer)))[row].tolist()

    def held(self, row, layer=0) -> list[int]:
        return [c for c, b in enumerate(self.table(row, layer)) if b != kv.NULL_BLOCK]

    def free(self, layer=0) -> int:
        return int(kv.free_blocks(self.state)[self.setup.group(layer)])

    def holders(self, layer, block) -> int:
        """Holders of an id as the oracle counts them; the tables agree after every verb."""
        name = self.setup.group(layer)
        return self.model.holders(self.pool(name))[self._model_ids(name, [block])[0]]

    def pool(self, group: str) -> str:
        """The oracle's pool of a group."""
        return next(g.pool for g in self.model.groups if g.name == group)

    def n(self, row) -> int:
        return int(np.asarray(self.state.seq_lens)[row])

    def chunk_start(self, row, chunks_before) -> int:
        """Where the row's present chunk begins, or one of those before it; 0 without chunks."""
        size = next((g.size for g in self.model.groups if g.kind == "chunk"), None)
        return max(self.n(row) // size - chunks_before, 0) * size if size else 0

    # ---------------------------------------------------------------- comparing
    def _vector(self, x, fill=0) -> np.ndarray:
        if isinstance(x, dict):
            x = [x.get(r, fill) for r in range(self.setup.rows)]
        return i32(x)

    def _model_ids(self, group, ids) -> list:
        back = {i: m for m, i in self.ids[self.pool(group)].items()}
        size = self.model.pools[self.pool(group)]
        return [back.get(i, UNHELD) if 0 <= i < size else ABSENT for i in np.asarray(ids).tolist()]

    def _judge(self, want, answer):
        before, (self.state, result) = self.state, answer
        old = {p: dict(ids) for p, ids in self.ids.items()}  # a copy's source may be given back
        status = np.asarray(result.status).tolist()
        names = [kv.Status(s).name for s in status]
        assert names == want.status, (names, want.status)
        assert np.asarray(result.granted).tolist() == want.granted
        assert np.asarray(result.granted).dtype == bool
        assert bool(result.ok) == want.ok
        assert {g: int(x) for g, x in result.shortfall.items()} == want.shortfall
        assert {g: int(x) for g, x in result.cached.items()} == want.cached
        if not any(want.granted):
            assert leaves_equal(before, self.state), "a call that grants nothing changed the state"
        for group, blocks in want.blocks.items():
            got = np.asarray(result.blocks[group]).tolist()
            assert [b is ABSENT for b in blocks] == [i == kv.NULL_BLOCK for i in got]
            self._learn(group, {m: i for m, i in zip(blocks, got, strict=True) if m is not ABSENT})
        self.compare_state()
        self._compare_copies(want, result, old)
        return result

    def _settled(self, state):
        self.state = state
        if self.model.fault:
            assert int(state.faults) != 0, "misuse went unreported"
            try:
                kv.check(state)
            except kv.InvariantError:
                pass
            else:
                raise AssertionError("kv.check passes over a fault")
            self.state = self.verbs.clear_faults(state)
            self.model.clear_faults()
        assert int(self.state.faults) == 0, "a fault without misuse"
        self.compare_state()

    def _learn(self, group, pairs):
        for m, i in pairs.items():
            known = self.ids[self.pool(group)].setdefault(m, i)
            assert known == i, f"{group}: a held block moved from id {known} to {i}"

    def compare_state(self):
        """Lengths, tables and free counts equal the oracle's, up to the names of blocks."""
        kv.check(self.state)
        model = self.model
        lens = np.asarray(self.state.seq_lens).tolist()
        assert lens == [model.span(r).n for r in range(len(model.rows))]
        for g in model.groups:
            table = np.asarray(kv.block_table(self.state, g.name))
            for r, row in enumerate(model.rows):
                want = row.table[g.name] if row else {}
                got = {c: b for c, b in enumerate(table[r].tolist()) if b != kv.NULL_BLOCK}
                assert sorted(got) == sorted(want), f"{g.name} row {r}: {got}, wanted {want}"
                self._learn(g.name, {want[c]: got[c] for c in want})
        for pool in model.pools:
            held = +model.holders(pool)
            ids = {m: i for m, i in self.ids[pool].items() if m in held}
            self.ids[pool].clear()
            self.ids[pool].update(ids)
            assert set(ids) == set(held), pool
            assert len(set(ids.values())) == len(ids), f"{pool}: one id for two blocks"
            assert all(0 <= i < model.pools[pool] for i in ids.values())
        free = model.free()
        got = {name: int(count) for name, count in kv.free_blocks(self.state).items()}
        assert got == {g.name: free[g.pool] for g in model.groups}

    def _compare_copies(self, want, result, old):
        for g in self.model.groups:
            src, dst = result.copies.get(g.name, (i32([]), i32([])))
            pairs = zip(np.asarray(src).tolist(), np.asarray(dst).tolist(), strict=True)
            got = {(s, d) for s, d in pairs if s != kv.NULL_BLOCK and d != kv.NULL_BLOCK}
            ids = old[g.pool] | self.ids[g.pool]
            owed = {(ids[s], ids[d]) for s, d in want.copies[g.name]}
            assert got == owed, f"{g.name}: copies {got}, owed {owed}"
