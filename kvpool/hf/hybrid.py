"""Families with recurrent state, beside attention or in its place."""

from kvpool.hf import patterns as at
from kvpool.hf import payloads as p
from kvpool.hf.family import EVEN, EVEN_SIZE, Family, same, sub
from kvpool.hf.patterns import FULL, LINEAR

_GATED_DELTA = Family(
    at.every(4, "full_attention_interval", others=LINEAR),
    kinds={LINEAR: p.gated_delta},
    draft=at.uniform(FULL),
    defaults={
        "head_dim": 256,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
)
_LIGHTNING = Family(
    at.listed(at.flags("attn_type_list", FULL, LINEAR)),
    kinds={LINEAR: p.lightning},
    defaults=EVEN_SIZE,
)
_MAMBA2 = p.mamba2(
    "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"
)
_MAMBA2_SIZES = {
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_d_ssm": p.expanded,
    "mamba_n_groups": 1,
    "mamba_d_head": p.inner_head_size("mamba_n_heads"),
}

HYBRID = {
    **same("qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe qwen3_5_moe_text", _GATED_DELTA),
    "olmo_hybrid": Family(
        at.every(4, others=LINEAR),
        kinds={LINEAR: p.gated_delta},
        defaults={
            **EVEN,
            "linear_conv_kernel_dim": 4,
            "linear_num_key_heads": p.same_as("num_attention_heads"),
            "linear_num_value_heads": p.same_as("num_attention_heads"),
            "linear_key_head_dim": p.three_quarters,
            "linear_value_head_dim": lambda f: 2 * f.need("linear_key_head_dim"),
        },
    ),
    "kimi_linear": Family(
        at.listed(at.one_based),
        kinds={FULL: p.latent, LINEAR: p.kimi_delta},
        defaults={
            "linear_num_heads": sub("linear_attn_config", "num_heads"),
            "linear_head_dim": sub("linear_attn_config", "head_dim"),
            "linear_conv_kernel_dim": sub("linear_attn_config", "short_conv_kernel_size"),
        },
    ),
    **same("minimax minimax_m1 minimax_text_01", _LIGHTNING),
    **same(
        "lfm2 lfm2_moe",
        Family(
            at.listed(at.at_indices("full_attn_idxs", "conv")),
            kinds={"conv": p.short_conv},
            defaults={**EVEN_SIZE, "conv_L_cache": 3},
        ),
    ),
    "jamba": Family(
        at.listed(at.periodic),
        kinds={LINEAR: p.mamba1},
        defaults={
            **EVEN_SIZE,
            "attn_layer_period": 8,
            "attn_layer_offset": 4,
            "mamba_expand": 2,
            "mamba_d_conv": 4,
            "mamba_d_state": 16,
        },
    ),
    "nemotron_h": Family(
        at.listed(at.letters),
        kinds={
            LINEAR: p.mamba2(
                "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"
            )
        },
        defaults={
            "num_hidden_layers": lambda f: len(f.get("layers_block_type") or ()) or None,
            "head_dim": lambda f: f.get("attention_head_dim") or 128,
            "n_groups": 8,
            "conv_kernel": 4,
        },
    ),
    "falcon_h1": Family(
        at.uniform("hybrid"),
        kinds={"hybrid": p.parallel(_MAMBA2)},
        defaults={**EVEN_SIZE, **_MAMBA2_SIZES, "mamba_d_ssm": p.stated_or_expanded},
    ),
    "granitemoehybrid": Family(
        at.listed(at.asked), kinds={LINEAR: _MAMBA2}, defaults={**EVEN, **_MAMBA2_SIZES}
    ),
    "bamba": Family(
        at.listed(at.at_indices("attn_layer_indices", LINEAR)),
        kinds={LINEAR: _MAMBA2},
        defaults={**EVEN_SIZE, **_MAMBA2_SIZES},
    ),
}
