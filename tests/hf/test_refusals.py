"""What `from_hf_config` refuses: missing, contradicting and unknown, each by name."""

import json
import re
from pathlib import Path

import pytest
from published import CONFIGS, example, flat, kinds, latent

import kvpool as kv
from kvpool import hf
from kvpool.hf.fields import MEANING

read = kv.CacheSpec.from_hf_config


def without(name, *fields):
    config = json.loads(json.dumps(CONFIGS[name]))
    for part in (config, config.get("text_config", {})):
        for field in fields:
            part.pop(field, None)
    return config


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("llama-3.1-8b", "num_hidden_layers"),
        ("llama-3.1-8b", "num_attention_heads"),
        ("llama-3.1-8b", "hidden_size"),
        ("gpt-oss-120b", "num_key_value_heads"),
        ("gemma3-27b", "num_hidden_layers"),
        ("gemma4-31b", "num_key_value_heads"),
        ("mimo-v2-flash", "hybrid_layer_pattern"),
        ("mimo-v2-flash", "num_key_value_heads"),
        ("step-3.5-flash", "layer_types"),
        ("step-3.5-flash", "sliding_window"),
        ("llama4-scout", "attention_chunk_size"),
        ("deepseek-v3", "kv_lora_rank"),
        ("deepseek-v3.2", "qk_rope_head_dim"),
        ("deepseek-v4-flash", "compress_ratios"),
        ("deepseek-v4-flash", "head_dim"),
        ("qwen3.5-27b", "linear_num_value_heads"),
        ("kimi-linear-48b-a3b", "linear_attn_config"),
        ("jamba-1.5-mini", "hidden_size"),
        ("nemotron-h-8b", "hybrid_override_pattern"),
        ("nemotron-h-8b", "ssm_state_size"),
        ("falcon-h1-34b", "mamba_n_heads"),
        ("granite-4.0-h-small", "layer_types"),
        ("granite-4.0-h-small", "mamba_d_state"),
        ("minimax-text-01", "attn_type_list"),
        ("lfm2-1.2b", "full_attn_idxs"),
    ],
)
def test_a_missing_field_is_asked_for_by_name(name, field):
    if field == "attention_chunk_size":  # null there means no chunks, so only the types miss it
        config = without(name, field)
        config["text_config"]["layer_types"] = ["chunked_attention"] * 48
    else:
        config = without(name, field)
    with pytest.raises(
        kv.SpecError, match=rf"does not say .*{field} \({re.escape(MEANING[field])}"
    ):
        read(config)


def test_all_fields_that_a_layer_lacks_are_named_at_once():
    config = without("qwen3.5-27b", "linear_num_key_heads", "linear_num_value_heads")
    with pytest.raises(kv.SpecError, match=r"linear_num_key_heads .*; linear_num_value_heads "):
        read(config)


def test_every_field_that_may_be_asked_for_has_its_meaning():
    source = "".join(path.read_text() for path in Path(hf.__file__).parent.glob("*.py"))
    calls = re.findall(r"\.(?:need|ask|listed)\(([^()]*)\)", source)
    names = {name for call in calls for name in re.findall(r'"(\w+)"', call)}
    assert len(names) > 25
    assert names <= set(MEANING)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            example("gpt-oss-120b") | {"num_hidden_layers": 35},
            "layer_types has 36 items, but num_hidden_layers is 35",
        ),
        (flat("llama", 2, 64, 4, layer_types=kinds("F")), "layer_types has 1 items"),
        (
            flat("gpt_oss", 2, 64, 4, 2, layer_types=["full_attention", "spiral_attention"]),
            "layer 1 of 'gpt_oss' is 'spiral_attention'; known kinds are .*'sliding_attention'",
        ),
        (CONFIGS["nemotron-h-8b"] | {"num_hidden_layers": 50}, "hybrid_override_pattern has 52"),
        (
            CONFIGS["nemotron-h-8b"] | {"hybrid_override_pattern": "MX*", "num_hidden_layers": 3},
            "layer 1 of 'nemotron_h' is 'X'",
        ),
        (example("mimo-v2-flash") | {"num_hidden_layers": 47}, "hybrid_layer_pattern has 48"),
        (example("deepseek-v4-flash") | {"num_hidden_layers": 41}, "compress_ratios has 44"),
        (
            example("deepseek-v4-flash") | {"compress_ratios": [0, 8], "num_hidden_layers": 2},
            "layer 1 of 'deepseek_v4' is 'compress ratio 8'",
        ),
        (flat("llama", 2, 64, 6), "hidden_size 64 is no multiple of num_attention_heads 6"),
        (flat("llama", 2, 64, 4, 3), "num_attention_heads 4 is no multiple of num_key_value_heads"),
        (flat("llama", 2, 64, "4"), "num_attention_heads: wanted an integer of at least 1"),
        (flat("qwen3", 2, 64, "4", 2), "num_attention_heads: wanted an integer of at least 1"),
        (
            example("gpt-oss-120b") | {"sliding_window": None},
            "sliding_window is null, but a layer has a window; they contradict",
        ),
        (
            example("mimo-v2-flash") | {"sliding_window_size": 256},
            "sliding_window 128 and sliding_window_size 256; they contradict",
        ),
        (
            CONFIGS["jamba-1.5-mini"] | {"attn_layer_offset": 8},
            "attn_layer_offset 8 is not below attn_layer_period 8",
        ),
        (flat("cohere2", 2, 64, 4, sliding_window_pattern=-1), "sliding_window_pattern: wanted an"),
        (flat("llama", 0, 64, 4), "num_hidden_layers: wanted an integer of at least 1, got 0"),
        (flat("llama", 2, 64, 4, layer_types=7), "layer_types: wanted a list"),
        (
            CONFIGS["falcon-h1-34b"] | {"mamba_n_heads": 31},
            "mamba_n_heads 31 times mamba_d_head 128 is not the inner width 4096",
        ),
        (
            CONFIGS["kimi-linear-48b-a3b"] | {"num_hidden_layers": 28},
            "full_attn_layers and kda_layers must name each of the layers 1 to 28 once",
        ),
        (CONFIGS["lfm2-1.2b"] | {"full_attn_idxs": [2, 16]}, r"full_attn_idxs is \[2, 16\]"),
        (
            flat("gemma3n_text", 4, 64, 4, 2, layer_types=kinds("SSFF"), num_kv_shared_layers=2),
            "num_kv_shared_layers 2 leaves layer 2 no earlier full_attention layer",
        ),
        (
            latent("glm_moe_dsa", 2, indexer_types=["shared", "full"]),
            "layer 0 shares an indexer, but no layer before has one",
        ),
        (
            flat("llama4_text", 4, 64, 4, 2, attention_chunk_size=8, no_rope_layers=[1]),
            "no_rope_layers has 1 items",
        ),
        (
            flat("nemotron-nas", 1, 64, 8, block_configs=[{"attention": {"n_heads_in_group": 3}}]),
            r"block_configs\[0\]: wanted n_heads_in_group, a divisor of .* 8, got 3",
        ),
    ],
)
def test_contradicting_fields_are_refused(config, message):
    with pytest.raises(kv.SpecError, match=message):
        read(config)


def test_an_unknown_model_hears_what_is_known_and_how_to_go_on():
    with pytest.raises(kv.SpecError, match=r"model_type 'rnn' .*gemma2, .*qwen3, .*from_layers\("):
        read(flat("rnn", 2, 64, 4))
    with pytest.raises(kv.SpecError, match="model_type '' is not known"):
        read({})


def test_what_is_no_configuration_is_refused(tmp_path):
    with pytest.raises(kv.SpecError, match=r"wanted a config\.json or its folder.*nowhere"):
        read(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(kv.SpecError, match=r"config\.json: Expecting"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(kv.SpecError, match=r"wanted an object in .*, got list"):
        read(tmp_path)
    with pytest.raises(kv.SpecError, match="wanted a dict, a path or a config object, got 7"):
        read(7)


def test_a_wrong_dtype_or_block_size_is_refused():
    with pytest.raises(kv.SpecError, match="no dtype 'fp4'"):
        read(example("llama-3.1-8b"), dtype="fp4")
    with pytest.raises(kv.SpecError, match="block_size: wanted"):
        read(example("llama-3.1-8b"), block_size=0)
