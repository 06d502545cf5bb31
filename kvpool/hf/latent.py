"""Families with latent attention, some with an indexer, and DeepSeek-V4."""

from kvpool.hf import deepseek_v4 as v4
from kvpool.hf import patterns as at
from kvpool.hf import payloads as p
from kvpool.hf import sharing
from kvpool.hf.family import Family, same
from kvpool.hf.patterns import FULL, SLIDING

_LATENT = {FULL: p.latent}
_SPARSE = {
    "full": lambda f: {"latent": p.sparse_latent(f), "indexer": p.indexer(f)},
    "shared": lambda f: {"latent": p.sparse_latent(f)},
}

LATENT = {
    **same(
        "axk1 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 kimi_k25 minicpm3 mistral4 "
        "sarvam_mla youtu",
        Family(at.full, kinds=_LATENT, draft=at.uniform(FULL)),
    ),
    # Two attentions a layer.
    "longcat_flash": Family(
        at.full,
        kinds=_LATENT,
        defaults={"num_hidden_layers": lambda f: 2 * f.need("num_layers")},
    ),
    "deepseek_v32": Family(
        at.uniform("full"),
        kinds=_SPARSE,
        draft=at.uniform("full"),
        defaults={"index_head_dim": 128},
    ),
    "glm_moe_dsa": Family(
        at.indexers,
        kinds=_SPARSE,
        finish=sharing.share_indexers,
        draft=at.uniform("full"),
        defaults={"index_head_dim": 128},
    ),
    "hy_v4": Family(
        at.first_of_four_indexers,
        kinds=_SPARSE,
        finish=sharing.share_indexers,
        defaults={"index_head_dim": 128},
    ),
    "deepseek_v4": Family(
        at.listed(at.compress_ratios),
        kinds={
            SLIDING: v4.swa,
            "compressed_sparse_attention": v4.csa,
            "heavily_compressed_attention": v4.hca,
        },
        draft=at.draft_ratios,
        defaults={"qk_rope_head_dim": 64, "index_head_dim": 128},
        block_size=256,  # 64 entries of 4 tokens, 2 of 128
    ),
}
