"""Families with nothing but attention: all of it full, or some in windows or chunks."""

from kvpool.hf import patterns as at
from kvpool.hf import payloads as p
from kvpool.hf import sharing
from kvpool.hf.family import EVEN, EVEN_SIZE, Family, same
from kvpool.hf.patterns import FULL, NONE, SLIDING

PLAIN = {
    **same(
        "apertus arcee aria_text baichuan cohere deepseek flex_olmo gpt_neox granite granitemoe "
        "granitemoeshared hyperclovax internlm internlm2 jais2 llama minicpm nemotron olmo olmo2 "
        "olmoe phi",
        Family(at.full, defaults=EVEN),
    ),
    **same(
        "bitnet ernie4_5_moe exaone mimo qwen stablelm",
        Family(at.full, defaults=EVEN_SIZE),
    ),
    **same("glm4_moe", Family(at.full, draft=at.full, defaults=EVEN_SIZE)),
    **same(
        "ernie4_5 glm glm4 helium hy_v3 internlm3 iquestcoder minimax_m2 qwen3_vl_moe_text "
        "qwen3_vl_text seed_oss solar_open",
        Family(at.full, defaults={"head_dim": 128}),
    ),
    "gemma": Family(at.full, defaults={"head_dim": 256}),
    "nemotron-nas": Family(at.uniform(NONE), finish=sharing.from_block_configs, defaults=EVEN_SIZE),
    **same(
        "hunyuan hunyuan_v1_dense hunyuan_v1_moe",
        Family(
            at.full,
            finish=sharing.share_in_pairs,
            defaults={**EVEN, "head_dim": lambda f: f.get("attention_head_dim") or p.head_size(f)},
        ),
    ),
}

WINDOWED = {
    "mistral": Family(at.listed(at.windowed), defaults={**EVEN_SIZE, "sliding_window": 4096}),
    "ministral": Family(at.listed(at.windowed), defaults={**EVEN_SIZE, "sliding_window": 4096}),
    "ministral3": Family(at.listed(at.windowed), defaults={"head_dim": 128}),
    **same("mixtral phimoe starcoder2", Family(at.listed(at.windowed), defaults=EVEN_SIZE)),
    "phi3": Family(at.listed(at.windowed), defaults=EVEN),
    "qwen3_moe": Family(
        at.listed(at.windowed),
        defaults={**EVEN_SIZE, "use_sliding_window": False, "sliding_window": 4096},
    ),
    **same("qwen2_moe", Family(at.listed(at.unused_window), defaults=EVEN_SIZE)),
    "smollm3": Family(at.listed(at.unused_window), defaults=EVEN_SIZE),
    **same(
        "qwen2 qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text",
        Family(
            at.listed(at.after_max_window_layers),
            defaults={**EVEN_SIZE, "sliding_window": 4096, "max_window_layers": 28},
        ),
    ),
    "qwen3": Family(
        at.listed(at.after_max_window_layers),
        defaults={"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
    ),
    "dots1": Family(
        at.listed(at.after_max_window_layers),
        defaults={
            **EVEN_SIZE,
            "use_sliding_window": True,
            "sliding_window": 4096,
            "max_window_layers": 62,
        },
    ),
    "gpt_oss": Family(at.every(2), defaults={"head_dim": 64, "sliding_window": 128}),
    **same(
        "gemma2 vaultgemma",
        Family(at.every(2), defaults={"head_dim": 256, "sliding_window": 4096}),
    ),
    # Published files of the smaller models leave out the heads, which are the class's.
    **same(
        "gemma3 gemma3_text",
        Family(
            at.every(6, "sliding_window_pattern"),
            defaults={
                "num_attention_heads": 8,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "sliding_window": 4096,
            },
        ),
    ),
    **same(
        "gemma3n gemma3n_text",
        Family(
            at.every(5),
            finish=sharing.share_tail,
            defaults={"head_dim": 256, "sliding_window": 512, "num_kv_shared_layers": 15},
        ),
    ),
    **same(
        "gemma4 gemma4_text",
        Family(
            at.last_is_full(at.every(6)),
            kinds={FULL: p.gemma4_full},
            finish=sharing.share_tail,
            defaults={"head_dim": 256, "global_head_dim": 512, "sliding_window": 512},
        ),
    ),
    **same(
        "gemma4_unified gemma4_unified_text",
        Family(
            at.last_is_full(at.every(6)),
            kinds={FULL: p.gemma4_full},
            finish=sharing.share_tail,
            defaults={"head_dim": 256, "global_head_dim": 512, "sliding_window": 1024},
        ),
    ),
    "cohere2": Family(
        at.every(4, "sliding_window_pattern"), defaults={**EVEN, "sliding_window": 4096}
    ),
    "olmo3": Family(at.every(4), defaults={**EVEN, "sliding_window": 4096}),
    **same(
        "exaone4 exaone4_5_text exaone_moe",
        Family(
            at.every(4, "sliding_window_pattern"),
            defaults={**EVEN_SIZE, "sliding_window": 4096},
        ),
    ),
    **same(
        "llama4 llama4_text",
        Family(
            at.listed(at.rope_layers),
            defaults={"head_dim": 128, "no_rope_layer_interval": 4},
        ),
    ),
    **same(
        "step3p5 step3p7",
        Family(
            at.listed(at.asked),
            kinds={SLIDING: p.step_sliding},
            defaults={"num_key_value_heads": p.same_as("num_attention_groups"), "head_dim": 128},
        ),
    ),
    "mimo_v2_flash": Family(
        at.listed(at.flags("hybrid_layer_pattern", SLIDING, FULL)),
        kinds={SLIDING: p.mimo_sliding},
        defaults={
            "head_dim": 192,
            "v_head_dim": 128,
            "sliding_window": 128,
            "swa_num_attention_heads": p.same_as("num_attention_heads"),
            "swa_num_key_value_heads": lambda f: 2 * f.need("num_key_value_heads"),
            "swa_head_dim": p.same_as("head_dim"),
            "swa_v_head_dim": p.same_as("v_head_dim"),
        },
    ),
}
