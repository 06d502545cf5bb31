"""Random verbs on groups that share a pool or slabs, against the oracle."""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test
from lockstep import Setup
from test_against_oracle import EXAMPLES, Bookkeeping

LIMITS = {"block": 2, "max_len": 18, "step": 5}
WINDOW = ("window", 4)
SHARED = [
    Setup(("all", WINDOW, "state"), (None,) * 3, memory=14 * 64, heads=(1, 1, 8),
          pooling="shared", **LIMITS),
    Setup(("all", WINDOW, ("chunk", 4)), (None, 5, None), memory=9 * 64, pooling="shared",
          **LIMITS),
]  # fmt: skip
ELASTIC = [
    # Bytes of a block: 64 and 128, so 3 and 1 in a slab of 192.
    Setup(("all", WINDOW), (None, None), memory=7 * 192, slab=192, heads=(1, 2), pooling="elastic",
          **LIMITS),
    # 64, 192 and 32: 3, 1 and 6.
    Setup(("all", WINDOW, "state"), (None,) * 3, memory=9 * 192, slab=192, heads=(1, 3, 4),
          pooling="elastic", **LIMITS),
    # 64, 64 and 32: the first two are one pool, 3 of them and 6 of the others.
    Setup(("all", ("chunk", 6), ("comp", 4)), (None,) * 3, memory=6 * 192, slab=192,
          heads=(1, 1, 2), pooling="elastic", **LIMITS),
    # The window has blocks of its own, the others 3 and 6 in a slab.
    Setup((WINDOW, "all", "state"), (7, None, None), memory=5 * 192, slab=192, heads=(1, 1, 4),
          pooling="elastic", **LIMITS),
    # 11 and 44: their bits take two words.
    Setup(("all", "state"), (None, None), memory=4 * 704, slab=704, pooling="elastic", **LIMITS),
]  # fmt: skip


class Pooled(Bookkeeping):
    """The same rules over pools that groups share; each setup compiles every verb anew."""

    setups = (SHARED[0], ELASTIC[1])  # the long runs have them all


TestPooled = Pooled.TestCase


@pytest.mark.slow
@pytest.mark.parametrize("setup", SHARED + ELASTIC, ids=lambda s: f"{s.pooling}-{s.heads}")
def test_long_runs(setup):
    machine = type("Long", (Pooled,), {"setups": [setup]})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=EXAMPLES, stateful_step_count=60)
    )
