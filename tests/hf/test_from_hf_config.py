"""`CacheSpec.from_hf_config`: published configurations, and each thing they may say."""

import json
from pathlib import Path

import pytest
from published import CONFIGS, EXAMPLES, FP8, example, flat, gated_delta, kinds, latent, nested

import kvpool as kv

BYTES = json.loads((Path(__file__).parent / "bytes.json").read_text())
LENGTHS = (1024, 8192, 32768, 131072)
SHARED = Path(__file__).parents[3] / "shared" / "configs"
read = kv.CacheSpec.from_hf_config


def bytes_needed(spec, length):
    """Bytes of what the query at the last of `length` tokens reads."""
    return sum(
        group.entries_read(length) * len(group.layers) * buffer.entry_bytes
        for group in spec.groups
        for buffer in group.region.buffers
    )


def groups(spec):
    return [(group.name, len(group.layers)) for group in spec.groups]


def region(spec, layer, tag=None):
    return spec.group(spec.resolve(layer, tag)[0]).region


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_configuration_gives_the_preset(name):
    spec = read(CONFIGS[name], dtype=FP8 if name.endswith("fp8") else None)
    assert spec == kv.preset(name)
    assert spec.to_dict() == kv.preset(name).to_dict()  # also the segments, which == leaves out


@pytest.mark.parametrize("name", CONFIGS)
def test_bytes_of_a_request(name):
    assert [bytes_needed(kv.preset(name), length) for length in LENGTHS] == BYTES[name]


@pytest.mark.skipif(not SHARED.is_dir(), reason="no unabridged configurations at hand")
def test_unabridged_files_give_what_the_examples_give():
    whole = {read(path).digest for path in SHARED.glob("*.json")}
    assert whole == {read(path).digest for path in EXAMPLES.glob("*.json")}


class Config:
    def to_dict(self):
        return example("llama-3.1-8b")


def test_a_dict_a_file_its_folder_and_a_config_object_read_alike(tmp_path):
    config = example("llama-3.1-8b")
    (tmp_path / "config.json").write_text(json.dumps(config))
    specs = [read(c) for c in (config, tmp_path, str(tmp_path / "config.json"), Config())]
    assert specs == [specs[0]] * 4
    assert groups(specs[0]) == [("full", 32)]


def test_examples_name_their_groups():
    found = {path.stem: groups(read(path)) for path in EXAMPLES.glob("*.json")}
    assert found["gemma4-26b"] == [("window1024", 25), ("full", 5)]
    assert found["llama4-scout"] == [("chunk8192", 36), ("full", 12)]
    assert found["mimo-v2-flash"] == [("full", 9), ("window128", 39)]
    assert found["nemotron-3-nano-30b-a3b"] == [("state", 23), ("full", 6)]
    assert found["qwen3-32b"] == [("full", 64)]
    assert found["step-3.7-flash"] == [("full", 12), ("window512", 33)]


def test_the_cache_dtype_is_the_models_or_what_is_asked_for():
    def dtypes(**fields):
        return {
            buffer.dtype for buffer in region(read(flat("llama", 1, 64, 4, **fields)), 0).buffers
        }

    assert dtypes() == dtypes(dtype="bfloat16") == dtypes(torch_dtype="float32") == {"bfloat16"}
    assert dtypes(torch_dtype="torch.float16") == {"float16"}
    assert dtypes(quantization_config={"quant_method": "fp8"}) == {"bfloat16"}
    spec = read(CONFIGS["qwen3-next-80b-a3b"], dtype="float8_e4m3fn")
    assert {b.dtype for b in spec.group("full").region.buffers} == {"float8_e4m3fn"}
    assert [b.dtype for b in spec.group("state").region.buffers] == ["bfloat16", "float32"]


def test_the_state_dtype_is_what_the_configuration_says():
    config = gated_delta(4, 2048, 16, 2, 32) | {"model_type": "qwen3_next"}
    assert read(config).group("state").region.buffers[1].dtype == "float32"
    spec = read(config | {"mamba_ssm_dtype": "bfloat16"})
    assert spec.group("state").region.buffers[1].dtype == "bfloat16"


def test_a_text_part_takes_type_and_dtype_from_around_it():
    text = flat("", 2, 64, 4, 2)
    del text["model_type"]
    spec = read({"model_type": "llama", "torch_dtype": "float16", "text_config": text})
    assert spec.groups[0].region == kv.FullAttention(2, 16, dtype="float16")


def test_a_flat_configuration_goes_before_an_unused_text_part():
    assert groups(read(flat("llama", 3, 64, 4) | {"text_config": {}})) == [("full", 3)]
    config = flat("llama", 3, 64, 4) | {"text_config": flat("llama", 5, 64, 4)}
    assert groups(read(config)) == [("full", 3)]


def test_heads_default_as_in_the_class():
    assert read(flat("llama", 1, 96, 6)).groups[0].region == kv.FullAttention(6, 16)
    assert read(flat("qwen3", 1, 96, 6, 2)).groups[0].region == kv.FullAttention(2, 128)
    assert read(CONFIGS["gemma3-4b"]).group("full").region == kv.FullAttention(4, 256)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (flat("gemma3_text", 8, 64, 4, 2, sliding_window=64), "SSSSSFSS"),
        (flat("gemma3_text", 4, 64, 4, 2, sliding_window=64, sliding_window_pattern=2), "SFSF"),
        (flat("exaone4", 5, 64, 4, 2, sliding_window_pattern="LLG"), "SSFSS"),
        (flat("exaone4", 3, 64, 4, 2, sliding_window=None, sliding_window_pattern="LLG"), "FFF"),
        (flat("gemma4_text", 4, 64, 4, 2), "SSSF"),
        (flat("mistral", 2, 64, 4, 2), "SS"),
        (flat("mistral", 2, 64, 4, 2, sliding_window=None), "FF"),
        (flat("mixtral", 2, 64, 4, 2), "FF"),
        (flat("phi3", 2, 64, 4, sliding_window=2047), "SS"),
        (flat("qwen2", 4, 64, 4, 2, sliding_window=64), "FFFF"),
        (flat("qwen2", 4, 64, 4, 2, use_sliding_window=True, max_window_layers=1), "FSSS"),
        (flat("qwen3_moe", 2, 64, 4, 2, sliding_window=64), "FF"),
        (flat("qwen3_moe", 2, 64, 4, 2, use_sliding_window=True), "SS"),
        (flat("llama", 2, 64, 4, layer_types=kinds("FF")), "FF"),
    ],
)
def test_which_layers_have_a_window(config, wanted):
    spec = read(config)
    kind = {"window": "S", "all": "F"}
    assert "".join(kind[region(spec, i).kind] for i in range(len(wanted))) == wanted


def test_no_rope_layers_are_full_and_a_null_chunk_leaves_all_full():
    config = flat("llama4_text", 4, 64, 4, 2, attention_chunk_size=64)
    assert groups(read(config | {"no_rope_layers": [1, 0, 0, 1]})) == [("chunk64", 2), ("full", 2)]
    assert groups(read(config | {"no_rope_layer_interval": 2})) == [("chunk64", 2), ("full", 2)]
    assert groups(read(config | {"attention_chunk_size": None})) == [("full", 4)]


def test_keys_and_values_of_other_sizes_and_windows_with_heads_of_their_own():
    spec = read(example("mimo-v2-flash"))
    assert spec.group("full").region == kv.FullAttention(4, 192, 128)
    assert spec.group("window128").region == kv.SlidingWindow(128, 8, 192, 128)
    spec = read(CONFIGS["gemma4-31b"])
    assert spec.group("window1024").region == kv.SlidingWindow(1024, 16, 256)
    assert spec.group("full").region == kv.FullAttention(4, 512)
    text = CONFIGS["gemma4-31b"]["text_config"]
    spec = read(text | {"attention_k_eq_v": False})  # then the heads are as many as elsewhere
    assert spec.group("full").region == kv.FullAttention(16, 512)


def test_the_last_layers_of_gemma_use_the_last_owner_of_their_kind():
    spec = read(CONFIGS["gemma3n-e2b"])
    assert groups(spec) == [("window512", 16), ("full", 4)]
    assert spec.resolve(29) == spec.resolve(19) == ("full", 3)
    assert {spec.resolve(layer) for layer in (20, 23, 25, 28)} == {("window512", 15)}


def test_indexers_are_shared():
    config = latent("glm_moe_dsa", 7)
    assert groups(read(config)) == [("latent", 7), ("full", 7)]  # each layer its own
    spec = read(config | {"index_topk_freq": 4})
    assert [spec.resolve(layer, "indexer")[1] for layer in range(7)] == [0, 1, 1, 1, 1, 2, 2]
    assert read(config | {"index_topk_pattern": "FSSFSSS"}).groups[1].layers == (0, 3)
    assert read(config | {"indexer_types": ["full"] + ["shared"] * 6}).groups[1].layers == (0,)


def test_attention_and_state_side_by_side():
    spec = read(CONFIGS["falcon-h1-34b"])
    assert groups(spec) == [("full", 72), ("state", 72)]
    assert spec.tags(71) == ("full", "state")
    assert region(spec, 0, "state") == kv.RecurrentState(
        {"conv": ((5120, 3), "bfloat16"), "ssm": ((32, 128, 256), "float32")}
    )


def test_layers_without_a_cache():
    spec = read(CONFIGS["nemotron-nano-9b-v2"])
    assert spec.group("full").layers == (14, 21, 30, 39)
    assert [spec.tags(layer) for layer in range(3)] == [(None,), (), (None,)]
    words = ["mamba", "moe", "attention", "mlp"]
    listed = CONFIGS["nemotron-h-8b"] | {"layers_block_type": words, "num_hidden_layers": 4}
    assert [spec_layer is None for spec_layer in read(listed).layers] == [False, True, False, True]


def test_a_searched_architecture_has_other_heads_in_each_layer():
    def attention(**fields):
        return {"attention": fields, "ffn": {}}

    blocks = [attention(n_heads_in_group=4), attention(no_op=True), attention(n_heads_in_group=2)]
    blocks.append(attention(replace_with_linear=True))
    spec = read(flat("nemotron-nas", 4, 64, 8, block_configs=blocks))
    assert spec.layers == (kv.FullAttention(2, 8), None, kv.FullAttention(4, 8), None)


def test_layers_that_share_in_pairs():
    config = flat("hunyuan", 4, 64, 4, 2, use_cla=True, cla_share_factor=2)
    assert groups(read(config)) == [("full", 2)]
    assert groups(read(config | {"use_cla": False})) == [("full", 4)]


def test_latent_attention_in_fp8():
    spec = read(example("deepseek-v3.2"), dtype=FP8)
    entry = {group.name: sum(b.entry_bytes for b in group.region.buffers) for group in spec.groups}
    assert entry == {"latent": 656, "full": 132}
    plain = read(CONFIGS["deepseek-v3"], dtype=FP8)
    assert plain.groups[0].region == kv.LatentAttention(512, 64, FP8)


def test_two_attentions_a_layer():
    config = latent("longcat_flash", 3, num_layers=3)
    del config["num_hidden_layers"]
    assert groups(read(config)) == [("latent", 6)]


def test_the_default_of_a_mamba_head_is_the_inner_width_dealt_out():
    config = CONFIGS["granite-4.0-h-tiny"] | {"mamba_d_head": "auto"}
    assert read(config) == kv.preset("granite-4.0-h-tiny")
    config = CONFIGS["falcon-h1-34b"] | {"mamba_d_ssm": None, "mamba_d_head": "auto"}
    assert read(config).group("state").region.buffers[1].shape == (32, 320, 256)


def test_blocks_of_a_short_window_are_at_most_half_of_it():
    spec = read(example("gpt-oss-120b"), block_size=256)
    assert [group.block_size for group in spec.groups] == [64, 256]
    assert [group.block_size for group in read(example("gpt-oss-120b")).groups] == [16, 16]


def test_draft_layers_are_a_spec_of_their_own():
    draft = kv.draft_from_hf_config(example("deepseek-v3.2"))
    assert groups(draft) == [("latent", 1), ("full", 1)]
    draft = kv.draft_from_hf_config(example("qwen3.5-27b"), block_size=32)
    assert (groups(draft), draft.block_size) == ([("full", 1)], 32)
    with pytest.raises(kv.SpecError, match="num_nextn_predict_layers"):
        kv.draft_from_hf_config(CONFIGS["deepseek-v3"])
    with pytest.raises(kv.SpecError, match=r"'llama'.*draft layers"):
        kv.draft_from_hf_config(example("llama-3.1-8b"))


def test_a_nested_configuration_may_be_nested_twice():
    text = flat("qwen3", 2, 64, 4, 2)
    assert groups(read(nested("omni", nested("thinker", text)))) == [("full", 2)]


def test_windows_that_are_switched_off_are_none():
    """A null window is none, wherever the class of the model has a default."""
    config = example("qwen3-32b") | {"use_sliding_window": True, "sliding_window": None}
    assert groups(read(config)) == groups(read(example("qwen3-32b")))


def test_the_dtype_of_a_nested_model_goes_before_that_around_it():
    inner = example("llama-3.1-8b") | {"dtype": None, "torch_dtype": None}
    outer = {"model_type": "x_vl", "torch_dtype": "float16", "text_config": inner}
    assert read(outer).groups[0].region.buffers[0].dtype == "float16"
