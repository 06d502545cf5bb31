"""DeepSeek-V4: its five tags, both layouts, its blocks, and the published size of a request."""

import numpy as np
import pytest
from published import CONFIGS, FP8, example

import kvpool as kv
from kvpool.held import Lengths

MILLION = 2**20
GIB = 2**30
PAST = ("csa", "indexer", "hca", "swa")  # what attention reads; the states feed the compressors


def read(name="deepseek-v4-pro", **options):
    return kv.CacheSpec.from_hf_config(CONFIGS[name], **options)


def group(spec, layer, tag):
    return spec.group(spec.resolve(layer, tag)[0])


def bytes_of_tags(spec, tags, length):
    total = 0
    for layer in range(len(spec.layers)):
        for tag in set(tags) & set(spec.tags(layer)):
            found = group(spec, layer, tag)
            entry = sum(buffer.entry_bytes for buffer in found.region.buffers)
            total += found.entries_read(length) * entry
    return total


def test_tags_of_each_kind_of_layer():
    spec = read("deepseek-v4-flash")
    assert spec.tags(0) == spec.tags(1) == ("swa",)
    assert spec.tags(2) == ("swa", "csa", "csa_state", "indexer", "indexer_state")
    assert spec.tags(3) == ("swa", "hca", "hca_state")
    pro = read("deepseek-v4-pro")
    assert pro.tags(0) == pro.tags(1) == spec.tags(3)
    assert [len(group(pro, 2, tag).layers) for tag in ("swa", "csa", "indexer")] == [61, 30, 30]
    assert len(group(pro, 0, "hca").layers) == 31


def test_a_block_of_256_tokens():
    spec = read()
    entries = {tag: group(spec, 2, tag).entries_per_block for tag in ("csa", "indexer")}
    assert entries == {"csa": 64, "indexer": 64}
    assert group(spec, 0, "hca").entries_per_block == 2
    assert {group(spec, 2, tag).block_size for tag in ("csa", "indexer")} == {256}
    assert group(spec, 2, "swa").block_size == 64
    assert group(spec, 2, "csa_state").block_size == 8


def test_sixteen_bit_entries():
    spec = read()
    assert group(spec, 2, "csa").region == kv.Compressed(4, 512)
    assert group(spec, 0, "hca").region == kv.Compressed(128, 512)
    assert group(spec, 2, "indexer").region == kv.Compressed(4, 128)
    assert group(spec, 2, "swa").region == kv.Region(
        ("window", 128), {"entry": ((512,), "bfloat16")}
    )


def test_fp8_entries_are_584_and_132_bytes():
    spec = read(dtype=FP8)
    latent = {"latent": ((448,), FP8), "rope": ((64,), "bfloat16"), "scale": ((8,), "uint8")}
    assert group(spec, 2, "csa").region == kv.Region("all", latent, 4)
    assert group(spec, 0, "hca").region == kv.Region("all", latent, 128)
    assert group(spec, 2, "swa").region == kv.Region(("window", 128), latent)
    index = {"entry": ((128,), FP8), "scale": ((1,), "float32")}
    assert group(spec, 2, "indexer").region == kv.Region("all", index, 4)
    sizes = [
        sum(buffer.entry_bytes for buffer in group(spec, 2, tag).region.buffers)
        for tag in ("csa", "indexer")
    ]
    assert sizes == [584, 132]


@pytest.mark.parametrize("dtype", ["bfloat16", FP8])
def test_compressor_states_are_float32_whatever_the_layout(dtype):
    spec = read(dtype=dtype)
    wanted = {
        (2, "csa_state"): (8, 1024),
        (2, "indexer_state"): (8, 256),
        (0, "hca_state"): (128, 512),
    }
    for (layer, tag), (tokens, size) in wanted.items():
        buffers = {"kv": ((size,), "float32"), "score": ((size,), "float32")}
        assert group(spec, layer, tag).region == kv.Region(("window", tokens), buffers)


def test_a_million_tokens_take_9_625_gib():
    # Published for the Pro model in bf16: all that attention reads, without compressor states.
    spec = read()
    entries = 2**20 * (30 * (1024 + 256) // 4 + 31 * 1024 // 128)
    window = 61 * 128 * 1024
    assert bytes_of_tags(spec, PAST, MILLION) == entries + window == 10_334_371_840
    assert round(10_334_371_840 / GIB, 3) == 9.625
    states = 30 * 8 * (8192 + 2048) + 31 * 128 * 4096
    everything = (*PAST, "csa_state", "indexer_state", "hca_state")
    assert bytes_of_tags(spec, everything, MILLION) == 10_334_371_840 + states


def test_the_pool_holds_no_more_than_that_for_a_million_tokens():
    spec = read()
    lengths = Lengths.exactly(np.array([MILLION]))
    held = sum(int(g.held(lengths).count[0]) * g.bytes_per_block for g in spec.groups)
    assert held == 10_334_371_840 + 18_710_528


def test_draft_layers_have_nothing_but_the_window():
    draft = kv.draft_from_hf_config(example("deepseek-v4-flash"))
    assert [draft.tags(layer) for layer in range(len(draft.layers))] == [("swa",)]
    assert draft.groups[0].region == group(read("deepseek-v4-flash"), 0, "swa").region
    assert draft.groups[0].block_size == 64
    odd = example("deepseek-v4-flash")
    odd["compress_ratios"][-1] = 4
    with pytest.raises(kv.SpecError, match=r"draft layers: wanted 0, got \[4\]"):
        kv.draft_from_hf_config(odd)


def test_other_rates():
    rates = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 64}
    spec = kv.CacheSpec.from_hf_config(CONFIGS["deepseek-v4-pro"] | {"compress_rates": rates})
    assert group(spec, 2, "csa").region.tokens_per_entry == 8
    assert group(spec, 2, "csa_state").region.span == 16
    assert group(spec, 0, "hca").region.tokens_per_entry == 64
