"""Pooling as a plan has it: which groups share, in what sizes, what it wastes, what it refuses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpool as kv

FULL = kv.FullAttention(2, 8, dtype="float32")
WINDOW = kv.SlidingWindow(8, 1, 8, dtype="float32")
STATE = kv.RecurrentState({"s": ((100,), "float32")})
LIMITS = {"max_seqs": 4, "max_seq_len": 64, "max_step_tokens": 8}


def spec(pooling, *layers, block_size=4, **options):
    layers = layers or (FULL, WINDOW, STATE)
    return kv.CacheSpec.from_layers(layers, block_size, pooling, **options)


def block_bytes(cache):
    return {group.name: group.bytes_per_block for group in cache.groups}


def test_slabs_take_the_whole_budget():
    cache = spec("elastic")
    assert block_bytes(cache) == {"full": 512, "window8": 256, "state": 400}
    plan = kv.plan(cache, 20_000, **LIMITS)
    assert (plan.slab_bytes, plan.slabs, plan.per_slab) == (512, 39, (1, 2, 1))
    assert plan.num_blocks == {"full": 39, "window8": 78, "state": 39}
    assert plan.total_bytes == 39 * 512
    # 100 tokens: 25 of full, 2 rows of windows would do, but all four may hold 20; 4 states.
    assert plan.token_capacity == 100
    assert 25 + 20 // 2 + 4 == 39


def test_there_are_no_more_slabs_than_all_rows_can_use():
    plan = kv.plan(spec("elastic"), 1 << 30, **LIMITS)
    assert plan.per_slab == (4, 8, 5)
    assert plan.slabs == 64 // 4 + -(-20 // 8) + 1


def test_the_text_says_what_is_wasted():
    text = str(kv.plan(spec("elastic"), 20_000, **LIMITS))
    assert "39 slabs of 512 bytes; at most 21.88% of each unused at its end" in text  # 112 of 512
    assert "up to 3 half used (7.69%)" in text  # of 39


def test_a_longer_slab_is_taken_where_its_end_wastes_less():
    # 640 and 256: one slab of 640 wastes a fifth of the window's, one of 1,280 nothing.
    cache = spec("elastic", kv.FullAttention(5, 4, dtype="float32"), WINDOW)
    assert list(block_bytes(cache).values()) == [640, 256]
    plan = kv.plan(cache, 1 << 20, max_seqs=64, max_seq_len=256, max_step_tokens=8)
    assert (plan.slab_bytes, plan.per_slab) == (1280, (2, 5))


def test_a_size_of_slabs_that_was_asked_for_is_taken():
    plan = kv.plan(spec("elastic"), 20_000, slab_bytes=1040, **LIMITS)
    assert (plan.slab_bytes, plan.slabs, plan.per_slab) == (1040, 19, (2, 4, 2))


def test_blocks_of_equal_bytes_are_one_pool():
    twin = kv.SlidingWindow(8, 2, 8, dtype="float32")
    plan = kv.plan(spec("elastic", FULL, twin, WINDOW), 20_000, **LIMITS)
    assert plan.pool_of == (0, 0, 1)


def test_shared_pools_make_blocks_longer_until_their_bytes_agree():
    cache = spec("shared", FULL, kv.SlidingWindow(32, 1, 8, dtype="float32"))
    assert [group.block_size for group in cache.groups] == [4, 8]
    assert list(block_bytes(cache).values()) == [512, 512]
    plan = kv.plan(cache, 20_000, **LIMITS)
    assert plan.pool_of == (0, 0)
    assert plan.num_blocks == {"full": 39, "window32": 39}
    assert "array 0: full, window32 share 39 blocks of 512 bytes; at most 0.00%" in str(plan)


def test_a_block_does_not_grow_beyond_half_a_window():
    cache = spec("shared", FULL, WINDOW)  # would have to cover all 8 tokens of the window
    assert [group.block_size for group in cache.groups] == [4, 4]
    assert kv.plan(cache, 20_000, **LIMITS).pool_of == (0, 1)


def test_a_row_of_shared_blocks_wastes_no_more_than_a_sixteenth():
    near = kv.RecurrentState({"s": ((121,), "float32")})  # 496 bytes of 512
    plan = kv.plan(spec("shared", FULL, near), 20_000, **LIMITS)
    assert plan.pool_of == (0, 0)
    assert "at most 3.12% of each unused" in str(plan)
    far = kv.RecurrentState({"s": ((116,), "float32")})  # 464
    assert kv.plan(spec("shared", FULL, far), 20_000, **LIMITS).pool_of == (0, 1)


def test_explicit_counts_have_memory_of_their_own():
    plan = kv.plan(spec("elastic"), 20_000, num_blocks={"state": 4}, charge_explicit=True, **LIMITS)
    assert plan.num_blocks["state"] == 4
    assert plan.per_slab == (1, 2, 0)
    assert plan.slabs == (20_000 - 4 * 400) // 512
    assert plan.array_of == (0, 0, 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slab_bytes": 256}, "slab_bytes: got 256, but a block of 'full' is 512; give that"),
        ({"slab_bytes": 520}, "wanted a multiple of 16, got 520; the nearest are 512 and 528"),
        ({"slab_bytes": 0}, "slab_bytes: wanted an integer of at least 1, got 0"),
        ({"slab_bytes": "1k"}, "slab_bytes: wanted an integer of at least 1, got '1k'"),
        ({"slab_bytes": 10**6}, "is 0 slabs of 1,000,000, but one row can hold 3; .* 3,000,000"),
        (
            {"budget_bytes": 500},
            "500 for full, window8, state, but a block of 'full' alone is 512;",
        ),
        (
            {"budget_bytes": 1},
            "a block of 'full' alone is 512; the smallest budget for it is 2,560",
        ),
        (
            {"budget_bytes": 1500, "num_blocks": {"state": 4}, "charge_explicit": True},
            "0 for full, window8, beside 1,600 for .* groups, but a block .* for it is 3,648",
        ),
        ({"budget_bytes": 1500}, "2 slabs of 512, but one row can hold 5; .* for it is 2,560"),
        ({"ratio": "1:1:1"}, "ratio: shapes pools, but full, window8, state draw from the same"),
        ({"request_tokens": 16}, "request_tokens: shapes pools, but full, window8, state draw"),
    ],
)
def test_what_cannot_be_is_refused_with_numbers(options, message):
    with pytest.raises(kv.SpecError, match=message):
        kv.plan(spec("elastic"), **{"budget_bytes": 20_000, **LIMITS, **options})


def smallest(cache, budget, **limits) -> int | None:
    """The budget that the refusal of this one names, None where it is not refused."""
    try:
        kv.plan(cache, budget, **limits)
    except kv.SpecError as error:
        return int(str(error).split("the smallest budget for it is ")[1].replace(",", ""))
    return None


def test_the_smallest_budget_that_a_refusal_names_works_and_none_below():
    assert kv.plan(spec("elastic"), 2560, **LIMITS).slabs == 5
    assert {smallest(spec("elastic"), budget, **LIMITS) for budget in range(1, 2560)} == {2560}
    # A block of 512 and five of 128: in 3 slabs of 512, but in 2 of 640.
    cache = spec("elastic", FULL, kv.ChunkedLocal(16, 1, 4, dtype="float32"))
    limits = {"max_seqs": 5, "max_seq_len": 100, "max_step_tokens": 1}
    assert block_bytes(cache) == {"full": 512, "chunk16": 128}
    assert {smallest(cache, budget, **limits) for budget in (1, 511, 1000, 1279)} == {1280}
    assert smallest(cache, 1280, **limits) is None
    fixed = {**LIMITS, "num_blocks": {"state": 4}, "charge_explicit": True}
    assert {smallest(spec("elastic"), b, **fixed) for b in (1, 1600, 3000, 3647)} == {3648}
    assert kv.plan(spec("elastic"), 3648, **fixed).total_bytes == 3648


@given(st.data())
def test_a_budget_works_from_the_smallest_on(data):
    """Of any mix of groups, with a size of slabs asked for or not."""
    units = st.integers(1, 40)
    layers = data.draw(
        st.lists(
            st.one_of(
                st.builds(lambda n: kv.Region("all", {"k": ((16 * n,), "int8")}), units),
                st.builds(
                    lambda w, n: kv.Region(("window", w), {"k": ((16 * n,), "int8")}), units, units
                ),
                st.builds(lambda n: kv.RecurrentState({"s": ((16 * n,), "int8")}), units),
            ),
            min_size=1,
            max_size=4,
        )
    )
    cache = spec("elastic", *layers, block_size=data.draw(st.integers(1, 8)))
    size, largest = st.integers(1, 20), max(block_bytes(cache).values())
    limits = {
        "max_seqs": data.draw(size),
        "max_seq_len": data.draw(size),
        "max_step_tokens": data.draw(size),
        "slab_bytes": data.draw(
            st.none() | st.integers(largest // 16, largest).map(lambda n: 16 * n)
        ),
    }
    enough = smallest(cache, 1, **limits)
    below = data.draw(st.lists(st.integers(1, enough - 1), max_size=20))
    assert {smallest(cache, budget, **limits) for budget in [*below, enough - 1]} == {enough}
    for more in [0, *data.draw(st.lists(st.integers(0, 3 * enough), max_size=20))]:
        plan = kv.plan(cache, enough + more, **limits)
        assert plan.total_bytes <= enough + more
        assert kv.Plan.from_dict(plan.to_dict()) == plan


def test_more_entries_than_a_storage_can_number_are_refused_when_the_plan_is_made():
    """2^16 entries in a block of 2^16 bytes, so that 2^31 bytes hold 2^31 entries."""
    byte = kv.Region("all", {"x": ((), "int8")})
    cache = spec("elastic", byte, block_size=1 << 16)
    limits = {"max_seqs": 4, "max_seq_len": 1 << 30, "slab_bytes": 1 << 16}
    message = (
        r"'full': wanted less than 2\^31 entries, got 32,768 blocks of 65,536, .* 32,768 slabs"
    )
    with pytest.raises(kv.SpecError, match=message):
        kv.plan(cache, 1 << 31, **limits)
    plan = kv.plan(cache, (1 << 31) - 1, **limits)
    assert plan.slabs == (1 << 15) - 1
    data = {**plan.to_dict(), "slabs": 1 << 15, "num_blocks": {"full": 1 << 15}}
    with pytest.raises(kv.SpecError, match=message):
        kv.Plan.from_dict(data)


@pytest.mark.parametrize("keep_free", [0.5, 0.9])
def test_more_kept_free_than_there_is_is_refused(keep_free):
    """50 snapshots of 400 bytes in 12 places: the plan has no room for a token beside them."""
    with pytest.raises(
        kv.SpecError, match=r"kept for keep_free: got .* more than the pools \(6, 12"
    ):
        kv.plan(spec("elastic", FULL, STATE), 5120, snapshots=50, keep_free=keep_free, **LIMITS)


@pytest.mark.parametrize("pooling", ["independent", "shared"])
def test_only_elastic_caches_have_slabs(pooling):
    with pytest.raises(kv.SpecError, match=f"no group here has slabs; pooling is '{pooling}'"):
        kv.plan(spec(pooling), 20_000, slab_bytes=512, **LIMITS)


def test_every_preset_holds_nearly_as_many_tokens_in_slabs():
    limits = {"max_seqs": 64, "max_seq_len": 8192, "max_step_tokens": 2048}
    for name in kv.preset_names():
        alone = kv.plan(kv.preset(name), 32 << 30, **limits)
        slabs = kv.plan(kv.with_pooling(kv.preset(name), "elastic"), 32 << 30, **limits)
        assert slabs.token_capacity >= 0.98 * alone.token_capacity, name
