"""What is wrong is answered, and changes nothing: not the state, not what is cached."""

import jax
import numpy as np
import pytest
from lockstep import copy_of, leaves_equal
from serving import Serving

import kvpool as kv

FULL = kv.FullAttention(1, 4, dtype="float32")
STATE = kv.RecurrentState({"sum": ((2,), "float32")})
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def serving():
    """Row 0 is live with 4 tokens, which are cached; row 1 was released."""
    serving = Serving([FULL, STATE], block=2, blocks=24, max_len=12)
    serving.serve(1, [7, 7])
    serving.release(1)
    serving.serve(0, PROMPT[:4])
    serving.tokens[0] = PROMPT
    return serving


@pytest.fixture(autouse=True)
def nothing_changes(serving):
    before = copy_of((serving.state, serving.storage))
    stats, cached = serving.cache.stats(), serving.cached_blocks("full")
    serving.cache.events()
    yield
    assert leaves_equal(before, (serving.state, serving.storage))
    assert serving.cache.stats() == stats
    assert serving.cached_blocks("full") == cached
    assert serving.cache.events() == []
    serving.settle()


@pytest.mark.parametrize(
    ("tokens", "named"),
    [
        ([1.0, 2.0, 3.0], "float64"),
        (np.ones(4, np.float32), "float32"),
        (jax.numpy.ones(4, jax.numpy.bfloat16), "bfloat16"),
        (np.zeros(0, np.float32), "float32"),
        ([True, False], "bool"),
        (["a", "b"], "<U1"),
        ([None, 1], "object"),
        (5, r"int64\[\]"),
        ([[1, 2], [3, 4]], r"int64\[2, 2\]"),
        ([[1, 2], [3]], "wanted integers"),
        ([1, 2**31], "2147483648"),
        ([1, -(2**31) - 1], "-2147483649"),
        ([1, 2**70], "object"),
        (np.array([2**63], np.uint64), "9223372036854775808"),
        ("text", "<U4"),
        (None, "object"),
    ],
)
def test_tokens_that_are_no_integers(serving, tokens, named):
    for call in (
        lambda: serving.cache.match(tokens),
        lambda: serving.cache.insert(serving.state, serving.storage, tokens, 0),
        lambda: serving.cache.pin(tokens),
        lambda: serving.cache.unpin(tokens),
    ):
        with pytest.raises(ValueError, match=f"^tokens: .*{named}"):
            call()


@pytest.mark.parametrize(
    "salt", [1.0, True, ["a"], {"a": 1}, ("a", None, 2.0), np.int32(3), object()]
)
def test_a_salt_of_an_unknown_kind(serving, salt):
    for call in (
        lambda: serving.cache.match(PROMPT, salt),
        lambda: serving.cache.insert(serving.state, serving.storage, PROMPT, 0, salt),
        lambda: serving.cache.pin(PROMPT, salt),
    ):
        with pytest.raises(
            ValueError, match=r"^salt: wanted None, a str, bytes, an int or a tuple"
        ):
            call()


@pytest.mark.parametrize("tokens", [[], [1], np.zeros(0, np.int64), (1,), [1, 2]])
def test_a_prompt_shorter_than_a_block_and_a_token(serving, tokens):
    hit = serving.cache.match(tokens, touch=False)
    assert (hit.length, hit.known, hit.stops, hit.pending) == (0, 0, (), 0)
    assert hit.missed == {"full": None, "state": None}
    _, result = kv.admit(serving.state, np.array([2], np.int32), hit.prefix)
    assert bool(result.ok)


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        (-1, "priority: wanted at least 0, got -1"),
        (0.5, "priority: wanted an integer, got 0.5"),
        (None, "priority: wanted an integer, got None"),
        ([1], r"priority: wanted an integer, got \[1\]"),
    ],
)
def test_a_priority_that_is_none(serving, priority, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        serving.cache.insert(serving.state, serving.storage, PROMPT, 0, priority=priority)


@pytest.mark.parametrize("most", [0, -1, 1.5, True])
def test_a_cap_that_is_none(serving, most):
    wanted = "an integer" if most in (1.5, True) else "at least 1"
    with pytest.raises(ValueError, match=f"^max_snapshots: wanted {wanted}, got {most}$"):
        kv.PrefixCache(serving.spec, serving.plan, max_snapshots=most)


@pytest.mark.parametrize(
    ("row", "tokens", "message"),
    [
        (1, PROMPT, "row: wanted one that is live, got 1, which is free"),
        (2, PROMPT, "row: wanted one that is live, got 2, which is free"),
        (3, PROMPT, "row: wanted 0 to 2, got 3"),
        (-1, PROMPT, "row: wanted 0 to 2, got -1"),
        (True, PROMPT, "row: wanted an integer, got True"),
        (0.0, PROMPT, "row: wanted an integer, got 0.0"),
        (0, PROMPT[:3], "tokens: wanted the 4 that row 0 settled, got 3"),
    ],
)
def test_a_row_that_cannot_be_published(serving, row, tokens, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        serving.cache.insert(serving.state, serving.storage, tokens, row)


@pytest.mark.parametrize(
    ("need", "message"),
    [
        ({"window4": 1}, "no group 'window4'; the groups are full, state"),
        ({"full": 1.0}, r"need\['full'\]: wanted a number of blocks, got 1.0"),
        ({"full": True}, r"need\['full'\]: wanted a number of blocks, got True"),
        ([("full", 1)], "need: wanted {group: blocks}, got list"),
    ],
)
def test_a_need_that_is_none(serving, need, message):
    with pytest.raises(ValueError, match=message):
        serving.cache.evict(serving.state, need)
    with pytest.raises(ValueError, match=message.replace("need", "short")):
        serving.cache.evict(serving.state, short=need)


@pytest.mark.parametrize("need", [{}, {"full": 0}, {"full": -3}, {"full": 20, "state": 20}])
def test_a_need_that_is_met_evicts_nothing(serving, need):
    state, freed = serving.cache.evict(serving.state, need)
    assert state is serving.state
    assert freed == {"full": 0, "state": 0}


def test_a_need_beyond_the_pool_frees_what_there_is(serving):
    """Tried on a cache of its own: it does change something."""
    other = Serving([FULL, STATE], block=2, blocks=24, max_len=12)
    other.serve(0, [1, 2, 3])
    other.release(0)
    assert other.evict({"full": 1000}) == {"full": 1, "state": 0}
    assert other.free() == {"full": 24, "state": 24}


def test_what_is_published_again_changes_nothing(serving):
    state, storage = serving.cache.insert(serving.state, serving.storage, PROMPT, 0)
    assert state is serving.state
    assert storage is serving.storage


def test_a_state_of_another_plan(serving):
    other = Serving([FULL], block=2, blocks=24, max_len=12)
    for call in (
        lambda: serving.cache.insert(other.state, other.storage, PROMPT, 0),
        lambda: serving.cache.evict(other.state, {"full": 1}),
        lambda: serving.cache.clear(other.state),
        lambda: serving.cache.check(other.state),
        lambda: kv.PrefixCache(serving.spec, other.plan),
    ):
        with pytest.raises(kv.SpecError, match="plan"):
            call()


def test_pins_that_are_not_there(serving):
    with pytest.raises(ValueError, match=r"^tokens: wanted some that are pinned"):
        serving.cache.unpin(PROMPT)
    assert serving.cache.pin([9, 9, 9]) == 0
    with pytest.raises(ValueError, match=r"^tokens: wanted some that are pinned"):
        serving.cache.unpin([9, 9, 9])
    assert serving.cache.pin(PROMPT) == 4
    with pytest.raises(ValueError, match=r"^tokens: wanted some that are not pinned"):
        serving.cache.pin(PROMPT)
    serving.cache.unpin(PROMPT)
