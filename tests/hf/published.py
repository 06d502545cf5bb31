"""Configurations of the presets' models as their files state them, the fields that concern a cache.

What a file leaves out is left out here too: those of the smaller Gemma 3 have no heads, say.
"""

import json
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples" / "configs"
FP8 = "float8_e4m3fn"


def example(name):
    return json.loads((EXAMPLES / f"{name}.json").read_text())


def flat(model_type, layers, hidden, heads, kv=None, **fields):
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    config = {"model_type": model_type, **sizes, **fields}
    return config if kv is None else {**config, "num_key_value_heads": kv}


def nested(outer, text):
    return {"model_type": outer, "torch_dtype": "bfloat16", "text_config": text}


def kinds(pattern):
    """layer_types of letters, S sliding, F full, L linear."""
    words = {"S": "sliding_attention", "F": "full_attention", "L": "linear_attention"}
    return [words[letter] for letter in pattern]


def gemma2(layers, hidden, heads, kv, head_dim):
    window = {"head_dim": head_dim, "sliding_window": 4096, "torch_dtype": "float32"}
    return flat("gemma2", layers, hidden, heads, kv, **window)


def gemma3(layers, hidden, **heads):
    text = {"model_type": "gemma3_text", "num_hidden_layers": layers, "hidden_size": hidden}
    return nested("gemma3", {**text, "sliding_window": 1024, **heads})


def gemma3n(layers, shared):
    types = kinds("SSSSF" * (layers // 5))
    text = flat("gemma3n_text", layers, 2048, 8, 2, head_dim=256, sliding_window=512)
    return nested("gemma3n", {**text, "layer_types": types, "num_kv_shared_layers": shared})


def gated_delta(layers, hidden, heads, kv, value_heads):
    return {
        **flat("", layers, hidden, heads, kv, head_dim=256, full_attention_interval=4),
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
    }


def qwen3_5(outer, *sizes):
    types = {"model_type": f"{outer}_text", "layer_types": kinds("LLLF" * (sizes[0] // 4))}
    return nested(outer, {**gated_delta(*sizes), **types, "mamba_ssm_dtype": "float32"})


def mamba2(**fields):
    return {f"mamba_{name}": value for name, value in {"d_conv": 4, "expand": 2, **fields}.items()}


def granite(hidden, heads, kv, mamba_heads):
    types = (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4
    state = mamba2(n_heads=mamba_heads, d_head=64, n_groups=1, d_state=128)
    return flat("granitemoehybrid", 40, hidden, heads, kv, layer_types=types, **state)


def nemotron_h(pattern, hidden, heads, **fields):
    state = {"n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4, **fields}
    sizes = flat("nemotron_h", len(pattern), hidden, heads, 8, hybrid_override_pattern=pattern)
    return {**sizes, **state, "mamba_num_heads": 128}


def latent(model_type, layers, **fields):
    return {
        "model_type": model_type,
        "num_hidden_layers": layers,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        **fields,
    }


KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
STEP_WINDOWS = {
    "attention_type": "sliding_attention",
    "num_attention_heads": 96,
    "num_attention_groups": 8,
    "head_dim": 128,
}
V4_PRO = flat("deepseek_v4", 61, 7168, 128, 1, head_dim=512, qk_rope_head_dim=64) | {
    "compress_ratios": [128, *[128, 4] * 30, 0],
    "index_head_dim": 128,
    "num_nextn_predict_layers": 1,
    "sliding_window": 128,
}

CONFIGS = {
    "gemma2-2b": gemma2(26, 2304, 8, 4, 256),
    "gemma2-9b": gemma2(42, 3584, 16, 8, 256),
    "gemma2-27b": gemma2(46, 4608, 32, 16, 128),
    "gemma3-1b": flat("gemma3_text", 26, 1152, 4, 1, head_dim=256, sliding_window=512)
    | {"sliding_window_pattern": 6},
    "gemma3-4b": gemma3(34, 2560),
    "gemma3-12b": gemma3(48, 3840, num_attention_heads=16, num_key_value_heads=8),
    "gemma3-27b": gemma3(62, 5376, num_attention_heads=32, num_key_value_heads=16, head_dim=128),
    "gemma3n-e2b": gemma3n(30, 10),
    "gemma3n-e4b": gemma3n(35, 15),
    "gemma4-26b": example("gemma4-26b"),
    "gemma4-31b": nested(
        "gemma4",
        flat("gemma4_text", 60, 5376, 32, 16, head_dim=256, sliding_window=1024)
        | {"global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True},
    ),
    "gpt-oss-20b": flat("gpt_oss", 24, 2880, 64, 8, head_dim=64, sliding_window=128)
    | {"layer_types": kinds("SF" * 12), "quantization_config": {"quant_method": "mxfp4"}},
    "gpt-oss-120b": example("gpt-oss-120b"),
    "qwen3-next-80b-a3b": gated_delta(48, 2048, 16, 2, 32) | {"model_type": "qwen3_next"},
    "qwen3.5-9b": qwen3_5("qwen3_5", 32, 4096, 16, 4, 32),
    "qwen3.5-27b": example("qwen3.5-27b"),
    "qwen3.5-35b-a3b": qwen3_5("qwen3_5_moe", 40, 2048, 16, 2, 32),
    "qwen3.5-397b-a17b": qwen3_5("qwen3_5_moe", 60, 4096, 32, 2, 64),
    "kimi-linear-48b-a3b": latent("kimi_linear", 27, head_dim=72, num_attention_heads=32)
    | {
        "linear_attn_config": {
            "full_attn_layers": KIMI_FULL,
            "kda_layers": [layer for layer in range(1, 28) if layer not in KIMI_FULL],
            "head_dim": 128,
            "num_heads": 32,
            "short_conv_kernel_size": 4,
        }
    },
    "llama4-scout": example("llama4-scout"),
    "llama4-maverick": nested(
        "llama4",
        flat("llama4_text", 48, 5120, 40, 8, head_dim=128, attention_chunk_size=8192)
        | {"no_rope_layers": [1, 1, 1, 0] * 12},
    ),
    "mistral-7b-v0.1": flat("mistral", 32, 4096, 32, 8, sliding_window=4096),
    "ministral-8b-2410": flat("ministral", 36, 4096, 32, 8, head_dim=128, sliding_window=32768)
    | {"layer_types": kinds("FSSS" * 9)},
    "command-r7b": flat("cohere2", 32, 4096, 32, 8, sliding_window=4096, sliding_window_pattern=4),
    "command-a-111b": flat("cohere2", 64, 12288, 96, 8, sliding_window=4096)
    | {"sliding_window_pattern": 4},
    "olmo3-7b": flat("olmo3", 32, 4096, 32, 32, sliding_window=4096)
    | {"layer_types": kinds("SSSF" * 8)},
    "olmo3-32b": flat("olmo3", 64, 5120, 40, 8, sliding_window=4096)
    | {"layer_types": kinds("SSSF" * 16)},
    "exaone4-32b": flat("exaone4", 64, 5120, 40, 8, head_dim=128, sliding_window=4096)
    | {"layer_types": kinds("SSSF" * 16), "sliding_window_pattern": "LLLG"},
    "step-3.5-flash": flat("step3p5", 45, 4096, 64, num_attention_groups=8, head_dim=128)
    | {
        "attention_other_setting": STEP_WINDOWS,
        "layer_types": kinds("FSSS" * 12),
        "num_nextn_predict_layers": 3,
        "sliding_window": 512,
    },
    "mimo-v2-flash": example("mimo-v2-flash"),
    "jamba-1.5-mini": flat("jamba", 32, 4096, 32, 8, attn_layer_period=8, attn_layer_offset=4)
    | mamba2(d_state=16),
    "jamba-1.5-large": flat("jamba", 72, 8192, 64, 8, attn_layer_period=8, attn_layer_offset=4)
    | mamba2(d_state=16),
    "nemotron-h-8b": nemotron_h(
        "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", 4096, 32, mamba_head_dim=64
    )
    | {"attention_head_dim": 128},
    "nemotron-3-nano-30b-a3b": example("nemotron-3-nano-30b-a3b"),
    "nemotron-nano-9b-v2": nemotron_h(
        "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", 4480, 40, mamba_head_dim=80
    )
    | {"head_dim": 128},
    "falcon-h1-34b": flat("falcon_h1", 72, 5120, 20, 4, head_dim=128)
    | mamba2(d_ssm=4096, n_heads=32, d_head=128, n_groups=2, d_state=256),
    "granite-4.0-h-small": granite(4096, 32, 8, 128),
    "granite-4.0-h-tiny": granite(1536, 12, 4, 48),
    "minimax-text-01": flat("minimax_text_01", 80, 6144, 64, 8, head_dim=128)
    | {"attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1] * 10},
    "lfm2-1.2b": flat("lfm2", 16, 2048, 32, 8, conv_L_cache=3)
    | {"full_attn_idxs": [2, 5, 8, 10, 12, 14]},
    "olmo-hybrid-7b": flat("olmo_hybrid", 32, 3840, 30),
    "deepseek-v3": latent("deepseek_v3", 61),
    "deepseek-v3.2": example("deepseek-v3.2"),
    "deepseek-v3.2-fp8": example("deepseek-v3.2"),
    "deepseek-v4-pro": V4_PRO,
    "deepseek-v4-pro-fp8": V4_PRO,
    "deepseek-v4-flash": example("deepseek-v4-flash"),
    "deepseek-v4-flash-fp8": example("deepseek-v4-flash"),
    "hy4-preview": latent("hy_v4", 34, index_head_dim=128),
    "hunyuan-a13b": flat("hunyuan_v1_moe", 32, 4096, 32, 8, attention_head_dim=128)
    | {"use_cla": False, "cla_share_factor": 2},
    "llama-3.1-8b": example("llama-3.1-8b"),
}
