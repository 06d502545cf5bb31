"""Variants of a spec: one rank of several, another dtype, no regions."""

import json

import pytest

import kvpool as kv

STATE = kv.RecurrentState({"conv": ((64, 3), "bfloat16"), "ssm": ((8, 4, 4), "float32")})


def spec_of(*layers, **options):
    return kv.CacheSpec.from_layers(layers, **options)


def test_heads_and_channels_are_divided_and_what_has_no_heads_is_not():
    scaled = {"k": ((8, 16), "int8"), "v": ((8, 16), "int8"), "k_scale": ((8,), "float32"),
              "v_scale": ((8,), "float32")}  # fmt: skip
    latent, entry = kv.LatentAttention(512, 64), kv.Compressed(4, 512)
    spec = spec_of(kv.FullAttention(8, 64, 32), STATE, latent, entry, kv.Region("all", scaled))
    part = {name: ((2, *shape[1:]), dtype) for name, (shape, dtype) in scaled.items()}
    half = kv.RecurrentState({"conv": ((16, 3), "bfloat16"), "ssm": ((2, 4, 4), "float32")})
    assert kv.per_rank(spec, 4) == spec_of(
        kv.FullAttention(2, 64, 32), half, latent, entry, kv.Region("all", part)
    )
    assert kv.per_rank(spec, 1) is spec


def test_fewer_heads_than_ranks_are_replicated():
    assert kv.per_rank(spec_of(kv.FullAttention(2, 64)), 4) == spec_of(kv.FullAttention(1, 64))


def test_groups_that_become_equal_are_one():
    spec = spec_of(kv.FullAttention(4, 64), {"a": kv.FullAttention(8, 64), "b": STATE})
    rank = kv.per_rank(spec, 8)
    assert [(g.name, g.layers) for g in rank.groups] == [("full", (0, 1)), ("state", (1,))]
    assert rank.resolve(1, "a") == ("full", 1)


@pytest.mark.parametrize(
    ("layer", "ranks", "message"),
    [
        (kv.FullAttention(3, 64), 2, "buffer 'k': 3 heads cannot be divided among 2 ranks"),
        (kv.FullAttention(4, 64), 6, "buffer 'k': 4 heads cannot be divided among 6 ranks"),
        (STATE, 16, "buffer 'ssm': 8 heads or channels cannot be divided among 16 ranks"),
        (STATE, 0, "ranks: wanted an integer of at least 1, got 0"),
    ],
)
def test_what_ranks_cannot_divide_is_refused_with_both_numbers(layer, ranks, message):
    with pytest.raises(kv.SpecError, match=message):
        kv.per_rank(spec_of(layer), ranks)


def test_another_dtype_is_for_16_bit_entries_of_tokens():
    ring = kv.Region(("window", 8), {"kv": ((4,), "float32")})
    spec = spec_of(kv.FullAttention(1, 4), STATE, ring, block_sizes={"window8": 4})
    cast = kv.with_dtype(spec, "float8_e4m3fn")
    assert cast == spec_of(
        kv.FullAttention(1, 4, dtype="float8_e4m3fn"), STATE, ring, block_sizes={"window8": 4}
    )
    with pytest.raises(kv.SpecError, match="dtype: no dtype 'fp8'; there are float32"):
        kv.with_dtype(spec, "fp8")


def test_without_regions_every_layer_keeps_everything():
    ring = kv.Region(("window", 8), {"kv": ((4,), "float32")})
    window, chunk = kv.SlidingWindow(8, 1, 4), kv.ChunkedLocal(16, 2, 4)
    spec = spec_of(window, chunk, kv.FullAttention(1, 4), STATE, {"r": ring}, kv.SharedWith(0))
    whole = kv.FullAttention(2, 4)
    assert kv.without_regions(spec) == spec_of(
        kv.FullAttention(1, 4), whole, kv.FullAttention(1, 4), STATE, {"r": ring}, kv.SharedWith(0)
    )
    draft = kv.with_draft(spec, spec_of(window), packed=False)
    assert kv.without_regions(draft).drafts == draft.drafts


def test_blocks_no_longer_than_a_share_of_the_window():
    windows = [kv.SlidingWindow(span, 1, 4) for span in (8, 128, 129, 1024)]
    spec = spec_of(*windows, kv.ChunkedLocal(32, 1, 4), kv.FullAttention(1, 4), STATE)
    sizes = {g.name: g.block_size for g in kv.with_window_blocks(spec).groups}
    windows = {"window8": 1, "window128": 8, "window129": 8, "window1024": 16}
    assert sizes == {**windows, "chunk32": 16, "full": 16, "state": 16}
    sizes = {g.name: g.block_size for g in kv.with_window_blocks(spec, 1 / 2).groups}
    assert [sizes[name] for name in windows] == [4, 16, 16, 16]
    for share in (0, 1.5, float("nan")):
        with pytest.raises(kv.SpecError, match="share: wanted above 0 and at most 1"):
            kv.with_window_blocks(spec, share)


def test_joined_segments_are_divided_each_for_itself_and_count_in_no_comparison():
    joined = spec_of(kv.RecurrentState({"conv": ((16, 3), "bfloat16", (4, 4, 8))}))
    (conv,) = kv.per_rank(joined, 2).groups[0].region.buffers
    assert (conv.shape, conv.segments) == ((8, 3), (2, 2, 4))
    assert joined == spec_of(kv.RecurrentState({"conv": ((16, 3), "bfloat16")}))
    again = kv.CacheSpec.from_dict(joined.to_dict())
    assert again.groups[0].region.buffers[0].segments == (4, 4, 8)
    with pytest.raises(kv.SpecError, match=r"buffer 'conv': 4 heads or channels .* 8 ranks"):
        kv.per_rank(joined, 8)
    with pytest.raises(kv.SpecError, match=r"segment: wanted rows or \(heads, rows of a head\)"):
        kv.RecurrentState({"conv": ((16, 3), "bfloat16", ((4, 2, 1), 8))})
    with pytest.raises(
        kv.SpecError, match=r"segments \(4, 4\) are 8 in all, wanted the first axis"
    ):
        kv.RecurrentState({"conv": ((16, 3), "bfloat16", (4, 4))})


def test_segments_with_heads_are_never_cut_inside_one():
    """16 channels of a convolution, and the B and C of one group, which every rank needs whole."""
    mamba2 = spec_of(kv.RecurrentState({"conv": ((32, 3), "bfloat16", ((4, 4), (1, 8), (1, 8)))}))
    for ranks, heads in ((2, 2), (4, 1)):
        (conv,) = kv.per_rank(mamba2, ranks).groups[0].region.buffers
        assert (conv.shape, conv.segments) == (
            (4 * heads + 16, 3), ((heads, 4), (1, 8), (1, 8))
        )  # fmt: skip
    again = kv.CacheSpec.from_dict(json.loads(json.dumps(mamba2.to_dict())))
    assert again.groups[0].region.buffers[0].segments == ((4, 4), (1, 8), (1, 8))
    two = kv.per_rank(kv.per_rank(mamba2, 2), 2)
    assert two.groups[0].region.buffers[0].segments == ((1, 4), (1, 8), (1, 8))
    with pytest.raises(kv.SpecError, match=r"buffer 'conv': 4 heads cannot be .* among 3 ranks"):
        kv.per_rank(mamba2, 3)
