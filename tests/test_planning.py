"""Planning: ratios, mixes of explicit counts and budget, requests, shares kept free, the peak."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvpool as kv
from kvpool.budget import kept_free
from kvpool.needs import bytes_of, row_blocks
from kvpool.text import parse_bytes, parse_tokens

FULL = kv.FullAttention(8, 64)  # 32 KiB a block of 16 tokens
FULL_BYTES = 8192  # of 4 tokens
LIMITS = {"max_seqs": 2, "max_seq_len": 64}


def two_groups(first=48_000, second=32_000):
    """Blocks of so many bytes, of one token each."""
    regions = [kv.Region("all", {"k": ((size,), "int8")}) for size in (first, second)]
    return kv.CacheSpec.from_layers(regions, block_size=1)


def gemma(**options):
    """Gemma-3-27B: 10 layers of full attention, 52 with a window of 1,024."""
    heads = {"num_kv_heads": 16, "head_dim": 128}
    layers = [kv.SlidingWindow(1024, **heads) if i % 6 < 5 else kv.FullAttention(**heads)
              for i in range(62)]  # fmt: skip
    return kv.CacheSpec.from_layers(layers, **options)


# ---------------------------------------------------------------- ratio
def test_a_ratio_is_the_budgets_shares():
    plan = kv.plan(two_groups(), 1_000_000, ratio="4:1", max_seqs=1, max_seq_len=100)
    assert plan.num_blocks == {"full": 16, "full_2": 6}
    plan = kv.plan(two_groups(), 1_000_000, ratio=" 2.5 : 0.5", max_seqs=1, max_seq_len=100)
    assert plan.num_blocks == {"full": 17, "full_2": 5}


@pytest.mark.parametrize(
    ("ratio", "message"),
    [
        ("4", r"ratio '4': wanted 2 numbers, .*full, full_2; got 1 \(4\)"),
        ("4:1:1", r"wanted 2 numbers, .*full, full_2; got 3 \(4, 1, 1\)"),
        ("4:x", "ratio '4:x': .*2 groups full, full_2, got 'x'"),
        ("", "ratio '': .*2 groups full, full_2, got ''"),
        (":", "2 groups full, full_2, got ''"),
        ("4:", "2 groups full, full_2, got ''"),
        ("0:1", "above 0 .*2 groups full, full_2, got '0'"),
        ("0.0:1", "above 0 .*2 groups full, full_2, got '0.0'"),
        ("-1:2", "2 groups full, full_2, got '-1'"),
        ("nan:1", "2 groups full, full_2, got 'nan'"),
        ("inf:1", "got 'inf'"),
        ("1e999999999:1", "got '1e999999999'"),
        ("9" * 30 + ":1", "got '9999"),
        ((4, 1), r"ratio: .*2 groups full, full_2, got \(4, 1\)"),
        (4, "ratio: .*2 groups full, full_2, got 4"),
    ],
)
def test_ratios_that_are_none_are_refused_with_the_token_and_the_groups(ratio, message):
    with pytest.raises(kv.SpecError, match=message):
        kv.plan(two_groups(), 1_000_000, ratio=ratio, max_seqs=1, max_seq_len=100)


def test_a_share_too_small_says_the_smallest_budget_that_works():
    with pytest.raises(kv.SpecError, match="'full' gets 40,000 of 50,000 bytes, which is 0") as e:
        kv.plan(two_groups(), 50_000, ratio="4:1", max_seqs=1, max_seq_len=100)
    assert str(e.value).endswith("the smallest budget_bytes for this ratio is 160,000")
    plan = kv.plan(two_groups(), 160_000, ratio="4:1", max_seqs=1, max_seq_len=100)
    assert plan.num_blocks == {"full": 2, "full_2": 1}
    with pytest.raises(kv.SpecError, match="'full_2' gets 31,999 of 159,999 bytes"):
        kv.plan(two_groups(), 159_999, ratio="4:1", max_seqs=1, max_seq_len=100)
    window = kv.CacheSpec.from_layers([FULL, kv.SlidingWindow(32, 8, 64)])
    with pytest.raises(kv.SpecError, match="is 3 blocks of 32,768, but one row can hold 4 blocks"):
        kv.plan(window, 131_071 * 2, ratio="1:1", **LIMITS)
    assert kv.plan(window, 131_072 * 2, ratio="1:1", **LIMITS).num_blocks["window32"] == 4


# ---------------------------------------------------------------- a mix
def test_explicit_groups_beside_the_budget_or_within_it():
    spec = kv.CacheSpec.from_layers([FULL, kv.FullAttention(4, 64)])  # 32 and 16 KiB a block
    mix = {"num_blocks": {"full_2": 10}, "max_seqs": 4, "max_seq_len": 1600}
    budget = 20 << 15
    beside = kv.plan(spec, budget, charge_explicit=False, **mix)
    assert beside.num_blocks == {"full": 20, "full_2": 10}
    within = kv.plan(spec, budget, charge_explicit=True, **mix)
    assert within.num_blocks == {"full": 15, "full_2": 10}
    assert within.total_bytes == budget
    with pytest.raises(kv.SpecError, match="no count for full; the groups are full, full_2"):
        kv.plan(spec, budget, **mix)


def test_a_ratio_divides_what_is_left_of_the_budget():
    regions = [kv.Region("all", {"k": ((size,), "int8")}) for size in (160, 32, 16)]
    spec = kv.CacheSpec.from_layers(regions, block_size=1)
    mix = {"num_blocks": {"full": 10}, "ratio": "4:1", "max_seqs": 1, "max_seq_len": 99}
    plan = kv.plan(spec, 2600, charge_explicit=True, **mix)
    assert plan.num_blocks == {"full": 10, "full_2": 25, "full_3": 12}
    with pytest.raises(kv.SpecError, match=r"wanted 2 numbers, .*full_2, full_3; got 3"):
        kv.plan(spec, 2600, charge_explicit=True, **{**mix, "ratio": "1:1:1"})
    with pytest.raises(kv.SpecError, match="smallest budget_bytes for this ratio is 1,680"):
        kv.plan(spec, 1610, charge_explicit=True, **mix)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"budget_bytes": 300_000, "num_blocks": {"window16": 4}, "charge_explicit": True},
            None,
        ),
        (
            {"budget_bytes": 33_000, "num_blocks": {"window16": 4}, "charge_explicit": True},
            r"got 33,000, but one token needs at least 33,792 .* with 1,024 for the explicit",
        ),
        (
            {"budget_bytes": 1000, "num_blocks": {"window16": 4}, "charge_explicit": True},
            "budget_bytes: got 1,000, but the explicit groups alone are 1,024",
        ),
        ({"num_blocks": {"window16": 4}, "charge_explicit": False}, "got neither for full"),
        ({"num_blocks": 5}, "num_blocks: wanted {group name: blocks}, got 5"),
        ({"budget_bytes": 1 << 20, "ratio": "1:1", "request_tokens": 8}, "got both"),
        ({"budget_bytes": 1 << 20, "request_tokens": 65}, "got 65, but max_seq_len is 64"),
        ({"budget_bytes": 1 << 20, "request_tokens": 0}, "request_tokens: .* got 0"),
        ({"budget_bytes": 1 << 20, "snapshots_per_row": -1}, "snapshots_per_row: .* got -1"),
        ({"budget_bytes": 1 << 20, "keep_free": 1}, "keep_free: .* below 1, got 1"),
        ({"budget_bytes": 1 << 20, "keep_free": -0.1}, "keep_free: .* got -0.1"),
        ({"budget_bytes": 1 << 20, "keep_free": float("nan")}, "keep_free: .* got nan"),
        ({"budget_bytes": 1 << 20, "keep_free": "0.1"}, "keep_free: .* got '0.1'"),
        ({"budget_bytes": 1 << 20, "keep_free": {"full": True}}, r"keep_free\['full'\]: .* True"),
        ({"budget_bytes": 1 << 20, "keep_free": {"x": 0.1}}, "no group 'x'; there are full, win"),
    ],
)
def test_plans_that_contradict_themselves_are_refused(options, message):
    spec = kv.CacheSpec.from_layers([FULL, kv.SlidingWindow(16, 1, 4)])
    if message is None:
        assert kv.plan(spec, **LIMITS, **options).num_blocks == {"full": 8, "window16": 4}
        return
    with pytest.raises(kv.SpecError, match=message):
        kv.plan(spec, **LIMITS, **options)


# ---------------------------------------------------------------- shares and snapshots
@pytest.mark.parametrize(
    ("sizes", "share", "kept"),
    [
        ((100, 50, 10), 0.1, (10, 5, 1)),
        ((15, 15, 10), 0.1, (2, 1, 1)),  # 1.5, 1.5, 1: the sum is 4
        ((4, 3, 3), 0.33, (2, 1, 1)),  # 1.32, 0.99, 0.99: the sum is 3.3
        ((1, 1, 1), 0.01, (1, 0, 0)),
        ((5, 5, 5), 0, (0, 0, 0)),
        ((20, 20, 20), {"b": 0.25}, (0, 5, 0)),
    ],
)
def test_the_shares_kept_free_sum_to_the_whole(sizes, share, kept):
    assert kept_free(sizes, ("a", "b", "c"), share) == kept


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=6), st.integers(0, 99))
def test_shares_are_the_largest_remainders(sizes, percent):
    names = tuple(map(str, range(len(sizes))))
    kept = kept_free(tuple(sizes), names, percent / 100)
    parts = [Fraction(percent, 100) * size for size in sizes]
    assert sum(kept) == -(-sum(parts) // 1)
    assert all(part // 1 <= have <= part // 1 + 1 for have, part in zip(kept, parts, strict=True))
    up = [p % 1 for have, p in zip(kept, parts, strict=True) if have > p // 1]
    down = [p % 1 for have, p in zip(kept, parts, strict=True) if have == p // 1]
    assert min(up, default=1) >= max(down, default=0)


def test_what_is_kept_free_is_a_plans_and_admission_leaves_it():
    spec = kv.CacheSpec.from_layers([FULL, kv.SlidingWindow(16, 1, 4)])
    counts = {"full": 10, "window16": 5}
    limits = {"max_seqs": 2, "max_seq_len": 192, "max_step_tokens": 16}
    plan = kv.plan(spec, num_blocks=counts, keep_free=0.2, **limits)
    assert plan.keep_free == {"full": 2, "window16": 1}
    assert kv.plan(spec, num_blocks=counts, **limits).keep_free == {"full": 0, "window16": 0}
    state = kv.init_state(spec, plan)
    asked = [8 * 16, 9 * 16]
    assert kv.fits(state, asked, plan.keep_free).tolist() == [kv.Status.OK, kv.Status.LATER]
    assert kv.fits(state, asked).tolist() == [kv.Status.OK, kv.Status.OK]


def test_snapshots_per_row_and_in_all_add_up():
    spec = kv.CacheSpec.from_layers([FULL, kv.RecurrentState({"s": ((4,), "float32")})])
    limits = {"max_seqs": 4, "max_seq_len": 64, "budget_bytes": 1 << 20}
    plan = kv.plan(spec, snapshots=3, snapshots_per_row=2, **limits)
    assert (plan.snapshots, plan.num_blocks["state"]) == (11, 15)


# ---------------------------------------------------------------- one row of a real model
def test_bytes_of_a_row_of_gemma_3():
    spec = gemma()
    assert {g.name: g.bytes_per_block for g in spec.groups} == {
        "window1024": 6_815_744,
        "full": 1_310_720,
    }
    plan = kv.plan(spec, 16 << 30, max_seqs=1, max_seq_len=1 << 15, max_step_tokens=2048)
    state, _ = kv.admit(kv.init_state(spec, plan), [0])
    for _ in range(16):
        state, result = kv.reserve(state, [2048], tail_only=True)
        assert result.ok
        state = kv.advance(state, [2048])
    held = {n: plan.num_blocks[n] - int(free) for n, free in kv.free_blocks(state).items()}
    assert held == {"window1024": 64, "full": 2048}
    sizes = {group.name: group.bytes_per_block for group in spec.groups}
    assert sum(held[name] * sizes[name] for name in held) == 2976 << 20


def test_bytes_of_a_row_of_qwen3_next():
    state = kv.RecurrentState(
        {"conv": ((8192, 3), "bfloat16"), "recurrent": ((32, 128, 128), "float32")}
    )
    layers = [kv.FullAttention(2, 256) if i % 4 == 3 else state for i in range(48)]
    spec = kv.CacheSpec.from_layers(layers)
    assert {g.name: (g.bytes_per_block, g.block_size) for g in spec.groups} == {
        "state": (77_266_944, 16),
        "full": (393_216, 16),
    }
    blocks = row_blocks(spec.groups, [8192])[:, 0]
    assert blocks.tolist() == [1, 512]
    assert bytes_of(spec.groups, blocks) == 265.6875 * 2**20


def test_the_peak_of_a_prefill():
    plan = kv.plan(gemma(), 16 << 30, max_seqs=1, max_seq_len=1 << 15, max_step_tokens=2048)
    peak = plan.peak(8192, tail_only=True)
    assert peak == kv.Peak(
        128 * 6_815_744 + 512 * 1_310_720, {"window1024": 128, "full": 512}, 6144
    )
    assert plan.peak(8192).blocks == {"window1024": 192, "full": 512}
    assert plan.peak(8192, 8192).blocks == {"window1024": 512, "full": 512}
    assert plan.peak(1).blocks == {"window1024": 1, "full": 1}
    for bad in ({"num_tokens": 0}, {"num_tokens": 8, "step_tokens": 0}):
        with pytest.raises(kv.SpecError, match="at least 1, got 0"):
            plan.peak(**bad)


def test_pools_shaped_for_requests():
    limits = {"max_seqs": 64, "max_seq_len": 1 << 15, "max_step_tokens": 2048}
    options = {"request_tokens": 1 << 15, "tail_only": True, **limits}
    plan = kv.plan(gemma(), 16 << 30, growing=False, **options)
    assert plan.num_blocks == {"window1024": 4 * 64 + 128, "full": 5 * 2048}
    plan = kv.plan(gemma(), 16 << 30, **options)
    assert plan.num_blocks == {"window1024": 4 * 65 + 128, "full": 5 * 2048}
    with pytest.raises(kv.SpecError, match="one request of 32,768 tokens needs at least") as error:
        kv.plan(gemma(), 1 << 30, **options)
    least = int(str(error.value).split("at least ")[1].replace(",", ""))
    assert kv.plan(gemma(), least, **options).num_blocks == {"window1024": 193, "full": 2048}
    with pytest.raises(kv.SpecError, match="needs at least"):
        kv.plan(gemma(), least - 1, **options)


def test_requests_that_grow_are_never_short_of_blocks():
    """At a multiple of the chunk a resting request holds none of it, a growing one up to all."""
    spec = kv.CacheSpec.from_layers([kv.ChunkedLocal(32, 1, 4), FULL], block_size=4)
    limits = {"max_seqs": 9, "max_seq_len": 64, "max_step_tokens": 8, "request_tokens": 64}
    budget = 3 * 16 * FULL_BYTES + 27 * 64
    resting = kv.plan(spec, budget, growing=False, **limits)
    assert resting.num_blocks == {"chunk32": 11, "full": 48}
    growing = kv.plan(spec, budget, **limits)
    assert growing.num_blocks == {"chunk32": 27, "full": 48}
    assert kv.plan(spec, budget - 1, **limits).num_blocks == {"chunk32": 18, "full": 32}
    state = kv.init_state(spec, growing)
    state, _ = kv.admit(state, [0, 1, 2])
    for _ in range(64):
        state, result = kv.reserve(state, [1, 1, 1, *[0] * 6])
        assert result.ok
        state = kv.advance(state, [1, 1, 1, *[0] * 6])


# ---------------------------------------------------------------- text
def test_sizes_as_people_write_them():
    sizes = {"64GiB": 64 << 30, "1.5 GB": 1_500_000_000, "4096": 4096, "10kb": 10_000, "2ki": 2048}
    assert {text: parse_bytes("budget", text) for text in sizes} == sizes
    assert [parse_tokens("n", text) for text in ("8k", "500", "1M")] == [8192, 500, 1 << 20]


@pytest.mark.parametrize("text", ["", "GiB", "-1", "64 gigs", "1e9", "nan", "0", "0.2", "1,000"])
def test_sizes_that_are_none(text):
    with pytest.raises(kv.SpecError, match=r"budget: wanted .*got "):
        parse_bytes("budget", text)
    with pytest.raises(kv.SpecError, match="length: wanted tokens like"):
        parse_tokens("length", text)
