"""Plans: explicit counts, the budget strategy, and what is refused with numbers."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpool as kv

FULL = kv.FullAttention(8, 64)  # 32 KiB a block of 16 tokens


def unit_region(units, tokens_per_entry=1):
    """A region of `units` times 16 bytes an entry."""
    return kv.Region("all", {"k": ((16 * units,), "int8")}, tokens_per_entry)


def capacity(spec, budget, max_seqs=1, max_seq_len=4096, **options):
    plan = kv.plan(spec, budget_bytes=budget, max_seqs=max_seqs, max_seq_len=max_seq_len, **options)
    assert plan.total_bytes <= budget
    return plan.token_capacity


def test_the_largest_capacity_whose_cost_fits():
    """cost(T) = 10 + 3T + 5 ceil(T/4), in units of 16 bytes."""
    fixed = kv.RecurrentState({"s": ((160,), "int8")})
    four = kv.Region("all", {"entry": ((80,), "int8")}, 4)
    spec = kv.CacheSpec.from_layers([fixed, unit_region(3), four], block_size=1)
    budgets = {18: 1, 27: 4, 34: 4, 35: 5, 44: 8, 51: 8, 52: 9}
    assert {b: capacity(spec, b * 16) for b in budgets} == budgets
    with pytest.raises(kv.SpecError, match=r"got 272, but one token needs at least 288"):
        capacity(spec, 17 * 16)
    spec = kv.CacheSpec.from_layers([fixed, unit_region(3), unit_region(5)], block_size=1)
    assert {b: capacity(spec, b * 16) for b in (18, 34)} == {18: 1, 34: 3}
    with pytest.raises(kv.SpecError, match="one token needs at least 288"):
        capacity(spec, 17 * 16)


def test_states_need_no_common_block_size():
    state = kv.RecurrentState({"ssm": ((250_000,), "float32")})
    spec = kv.CacheSpec.from_layers([FULL, state], block_size=16)
    plan = kv.plan(spec, budget_bytes=64 << 20, max_seqs=8, max_seq_len=8192)
    assert plan.num_blocks == {"full": 1803, "state": 8}
    assert plan.total_bytes == 1803 * 32_768 + 8_000_000
    assert plan.token_capacity == 1803 * 16


def test_states_have_a_block_a_row_and_the_snapshots():
    state = kv.RecurrentState({"s": ((4,), "float32")})
    spec = kv.CacheSpec.from_layers([FULL, state, state])
    budget = 100 * 32_768 + 4 * 32
    plan = kv.plan(spec, budget_bytes=budget, max_seqs=4, max_seq_len=4096)
    assert plan.num_blocks == {"full": 100, "state": 4}
    plan = kv.plan(spec, budget_bytes=budget + 64, max_seqs=4, max_seq_len=4096, snapshots=2)
    assert plan.num_blocks == {"full": 100, "state": 6}


def test_windows_get_no_more_than_the_tokens_need_or_the_rows_can_hold():
    window = kv.Region(("window", 8), {"k": ((16,), "int8")})
    spec = kv.CacheSpec.from_layers([window, unit_region(1)], block_size=4)
    for tokens, blocks in ((40, 10), (400, 16)):
        budget = blocks * 64 + tokens // 4 * 64
        plan = kv.plan(spec, budget_bytes=budget, max_seqs=4, max_seq_len=1000, max_step_tokens=4)
        assert (plan.num_blocks["window8"], plan.token_capacity) == (blocks, tokens)


@pytest.mark.parametrize(
    ("window", "step", "block", "most"),
    [
        (1024, 1024, 16, 129),
        (1024, 8192, 16, 577),
        (128, 8192, 16, 521),
        (1024, 1, 16, 65),
    ],
)
def test_most_blocks_a_row_can_hold(window, step, block, most):
    region = kv.SlidingWindow(window, 1, 4)
    assert region.blocks_per_row(block, step, 10**6) == most
    start = held = 0
    for settled in range(0, 3 * window, step):
        start = max(0, (settled - window + 1) // block)
        held = max(held, -(-(settled + step) // block) - start)
    assert held <= most


def test_explicit_counts_go_before_the_budget():
    spec = kv.CacheSpec.from_layers([FULL, kv.SlidingWindow(16, 1, 4)])
    counts = {"full": 50, "window16": 11}
    plan = kv.plan(spec, budget_bytes=1 << 30, num_blocks=counts, max_seqs=2, max_seq_len=64)
    assert plan.num_blocks == counts
    assert plan.max_step_tokens == 64


def test_a_full_budget_stops_at_what_the_rows_can_hold():
    plan = kv.plan(
        kv.CacheSpec.from_layers([FULL]), budget_bytes=1 << 40, max_seqs=3, max_seq_len=100
    )
    assert (plan.token_capacity, plan.num_blocks) == (300, {"full": 19})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_blocks": {"full": 3, "none": 1}}, "no group 'none'; the groups are full, window16"),
        ({"num_blocks": {"full": 3}}, "no count for window16; the groups are full, window16"),
        ({"num_blocks": {"full": 0, "window16": 3}}, r"num_blocks\['full'\]: .* got 0"),
        ({"num_blocks": {"full": 2.0, "window16": 3}}, r"num_blocks\['full'\]: .* got 2.0"),
        ({"num_blocks": {"full": 3, "window16": 2}}, "got 2, but one row can hold 4 blocks"),
        ({"budget_bytes": 1000}, "budget_bytes: got 1,000, but one token needs at least 33,024"),
        ({"budget_bytes": 0}, "budget_bytes: wanted an integer of at least 1, got 0"),
        ({}, "wanted budget_bytes or num_blocks, got neither"),
        ({"budget_bytes": 1 << 20, "max_seqs": 0}, "max_seqs: .* got 0"),
        ({"budget_bytes": 1 << 20, "max_seq_len": -1}, "max_seq_len: .* got -1"),
        ({"budget_bytes": 1 << 20, "max_step_tokens": 0}, "max_step_tokens: .* got 0"),
        ({"budget_bytes": 1 << 20, "snapshots": -1}, "snapshots: .* got -1"),
        ({"budget_bytes": 1 << 20, "max_seq_len": (1 << 30) + 1}, r"max_seq_len: .* 2\^30 tokens"),
        ({"num_blocks": {"full": 1 << 31, "window16": 4}}, r"less than 2\^31 blocks in all"),
        ({"budget_bytes": 1 << 20, "max_seqs": 1 << 20, "max_seq_len": 1 << 20}, "table entries"),
    ],
)
def test_plans_that_cannot_be_met_are_refused_with_numbers(options, message):
    spec = kv.CacheSpec.from_layers([FULL, kv.SlidingWindow(16, 1, 4)])
    with pytest.raises(kv.SpecError, match=message):
        kv.plan(spec, **{"max_seqs": 2, "max_seq_len": 64, **options})


def test_a_window_pool_of_one_rows_bound():
    """W=6 on blocks of 4: query 8 reads 3..8, on three blocks; W=5 is content with two."""
    for window, blocks in ((6, 3), (5, 2)):
        spec = kv.CacheSpec.from_layers([kv.SlidingWindow(window, 1, 4)], block_size=4)
        name, limits = f"window{window}", {"max_seqs": 1, "max_seq_len": 32, "max_step_tokens": 1}
        assert kv.plan(spec, num_blocks={name: blocks}, **limits).num_blocks == {name: blocks}
        with pytest.raises(kv.SpecError, match=f"got {blocks - 1}, but one row can hold {blocks} "):
            kv.plan(spec, num_blocks={name: blocks - 1}, **limits)


def test_a_plan_is_for_its_own_spec():
    spec = kv.CacheSpec.from_layers([FULL])
    plan = kv.plan(spec, num_blocks={"full": 4}, max_seqs=1, max_seq_len=64)
    with pytest.raises(kv.SpecError, match="plan: made for the spec"):
        kv.init(kv.CacheSpec.from_layers([FULL, FULL]), plan)


def test_plans_compare_and_hash_by_value():
    spec = kv.CacheSpec.from_layers([FULL])
    one, same, other = (
        kv.plan(spec, num_blocks={"full": n}, max_seqs=1, max_seq_len=64) for n in (4, 4, 5)
    )
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != "plan"


def test_printing_shows_every_group():
    state = kv.RecurrentState({"s": ((4,), "float32")})
    spec = kv.CacheSpec.from_layers([FULL, FULL, state])
    text = str(kv.plan(spec, budget_bytes=10 << 20, max_seqs=2, max_seq_len=4096))
    assert "full        2            16       65,536     159  9.9" in text
    assert "state       1             -           16       2  0.0" in text
    assert "2,544 tokens in up to 2 rows of up to 4,096" in text


def cost(plan, tokens):
    """`Plan.cost`, but where no group keeps everything a window has the most that a row holds."""
    groups = plan.spec.groups
    alone = not any(group.region.kind == "all" for group in groups)
    floors = [plan.blocks_per_row(g) if alone and g.region.span else 1 for g in groups]
    pairs = zip(groups, floors, strict=True)
    return sum(max(n, plan.blocks_for(g, tokens)) * g.bytes_per_block for g, n in pairs)


@given(st.data())
def test_the_search_is_exact(data):
    """cost(T) <= budget < cost(T + 1), for any mix of groups."""
    size = st.integers(1, 9)
    layers = data.draw(
        st.lists(
            st.one_of(
                st.builds(unit_region, size, size),
                st.builds(
                    lambda w, u: kv.Region(("window", w), {"k": ((16 * u,), "int8")}), size, size
                ),
                st.builds(lambda u: kv.RecurrentState({"s": ((16 * u,), "int8")}), size),
            ),
            min_size=1,
            max_size=5,
        )
    )
    spec = kv.CacheSpec.from_layers(layers, block_size=data.draw(size))
    limits = {
        "max_seqs": data.draw(size),
        "max_seq_len": data.draw(st.integers(1, 50)),
        "max_step_tokens": data.draw(size),
        "snapshots": data.draw(st.integers(0, 3)),
    }
    budget = data.draw(st.integers(1, 50_000))
    try:
        plan = kv.plan(spec, budget_bytes=budget, **limits)
    except kv.SpecError as error:  # the least that it names is the least
        least = int(re.search(r"needs at least ([\d,]+)", str(error))[1].replace(",", ""))
        assert least > budget
        with pytest.raises(kv.SpecError, match=f"needs at least {least:,}"):
            kv.plan(spec, budget_bytes=least - 1, **limits)
        plan, budget = kv.plan(spec, budget_bytes=least, **limits), least
    tokens = plan.token_capacity
    assert plan.total_bytes == cost(plan, tokens) <= budget
    assert tokens == plan.max_tokens or cost(plan, tokens + 1) > budget
