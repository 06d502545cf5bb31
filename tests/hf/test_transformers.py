"""Against transformers' own configuration classes (extra `hf`): what an absent field means."""

import copy

import pytest
from published import CONFIGS

import kvpool as kv
from kvpool.hf import FAMILIES

auto = pytest.importorskip("transformers.models.auto.configuration_auto")

# Fields whose class default describes no checkpoint, so that kvpool asks for them instead.
ASKED = {
    "bamba": "attn_layer_indices",
    "falcon_h1": "mamba_d_ssm",
    "glm4_moe": "head_dim",
    "kimi_linear": "linear_num_heads",
    "lfm2_moe": "full_attn_idxs",
    "step3p5": "num_key_value_heads",
    "step3p7": "num_key_value_heads",
}
TYPES = [name for name in FAMILIES if name in auto.CONFIG_MAPPING]


def text_of(config):
    values = config.to_dict()
    return values if "num_hidden_layers" in values else values.get("text_config", values)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_object_reads_as_its_file(name):
    config = CONFIGS[name]
    if config["model_type"] not in auto.CONFIG_MAPPING:
        pytest.skip(f"no class for {config['model_type']}")
    built = auto.CONFIG_MAPPING[config["model_type"]](**copy.deepcopy(config))
    assert kv.CacheSpec.from_hf_config(built) == kv.CacheSpec.from_hf_config(config)


@pytest.mark.parametrize("name", TYPES)
def test_defaults_are_those_of_the_class(name):
    built = auto.CONFIG_MAPPING[name]()
    values = text_of(built)
    stripped = {k: v for k, v in values.items() if k not in FAMILIES[name].defaults}
    if name in ASKED:
        with pytest.raises(kv.SpecError, match=ASKED[name]):
            kv.CacheSpec.from_hf_config(stripped)
    else:
        assert kv.CacheSpec.from_hf_config(stripped) == kv.CacheSpec.from_hf_config(built)


# The rule of these families is not their class's: a field that published files state decides.
STATED = (
    *ASKED,
    *("deepseek_v4", "granitemoehybrid", "mimo_v2_flash", "minimax"),
)


@pytest.mark.parametrize("name", [name for name in TYPES if name not in STATED])
def test_patterns_are_those_of_the_class(name):
    built = auto.CONFIG_MAPPING[name]()
    values = {k: v for k, v in text_of(built).items() if k != "layer_types"}
    assert kv.CacheSpec.from_hf_config(values) == kv.CacheSpec.from_hf_config(built)


@pytest.mark.parametrize("name", [name for name in TYPES if name not in ASKED])
def test_layers_and_windows_are_those_of_the_class(name):
    built = auto.CONFIG_MAPPING[name]()
    text = built if hasattr(built, "num_hidden_layers") else built.text_config
    spec = kv.CacheSpec.from_hf_config(built)
    assert len(spec.layers) == text.num_hidden_layers
    kinds = getattr(text, "layer_types", None)
    if kinds is None or name == "deepseek_v4":
        return
    for layer, kind in enumerate(kinds):
        if kind in ("sliding_attention", "chunked_attention"):
            group = spec.group(spec.resolve(layer)[0])
            field = "sliding_window" if kind[0] == "s" else "attention_chunk_size"
            assert group.region.span == getattr(text, field)
