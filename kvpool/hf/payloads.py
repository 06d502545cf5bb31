"""What one layer of a kind keeps, from the fields of its model.

Each function takes the `Fields` and gives a layer as `CacheSpec.from_layers` takes it. Shapes are
those of the modeling code in transformers; a causal convolution of width K keeps K - 1 columns.
"""

from collections.abc import Mapping

from kvpool.hf.fields import Fields
from kvpool.regions import (
    ChunkedLocal,
    FullAttention,
    LatentAttention,
    RecurrentState,
    Region,
    SlidingWindow,
)
from kvpool.status import SpecError


def same_as(name: str):
    """A default that is the value of another field."""
    return lambda f: f.get(name)


def head_size(f: Fields) -> int:
    """The default of `head_dim` where the width is dealt evenly to the query heads."""
    width, heads = f.need("hidden_size", "num_attention_heads")
    if width % heads:
        raise SpecError(
            f"hidden_size {width} is no multiple of num_attention_heads {heads}: say head_dim"
        )
    return width // heads


def three_quarters(f: Fields) -> int:
    """The default of Olmo Hybrid's key size: the heads share three quarters of the width."""
    width, heads = f.need("hidden_size", "linear_num_key_heads")
    return int(0.75 * width / heads)


def _heads(f: Fields) -> dict:
    heads, size = f.need("num_key_value_heads", "head_dim")
    queries = heads if f.get("num_attention_heads") is None else f.need("num_attention_heads")
    if queries % heads:
        raise SpecError(
            f"num_attention_heads {queries} is no multiple of num_key_value_heads {heads}; "
            "they contradict"
        )
    return {
        "num_kv_heads": heads,
        "head_dim": size,
        "v_head_dim": f.get("v_head_dim"),
        "dtype": f.dtype,
    }


def full(f: Fields) -> Region:
    """Attention to the whole past."""
    return FullAttention(**_heads(f))


def sliding(f: Fields) -> Region:
    """Attention to a window.  transformers masks keys up to q - W, so W counts the query."""
    if "sliding_window" in f.values and f.values["sliding_window"] is None:
        raise SpecError("sliding_window is null, but a layer has a window; they contradict")
    return SlidingWindow(f.need("sliding_window"), **_heads(f))


def chunked(f: Fields) -> Region:
    """Attention within the query's chunk."""
    return ChunkedLocal(f.need("attention_chunk_size"), **_heads(f))


def latent(f: Fields) -> Region:
    """Multi-head latent attention."""
    size, rope = f.need("kv_lora_rank", "qk_rope_head_dim")
    return LatentAttention(size, rope, f.dtype)


def is_fp8(f: Fields) -> bool:
    """Whether the attention caches are 8-bit floats, which latents keep with scales."""
    return f.dtype.startswith("float8")


def sparse_latent(f: Fields) -> Region:
    """Latent attention to the tokens that an indexer picks.

    In fp8 the entry is that of FlashMLA's sparse kernels: the latent in fp8, a float32 scale for
    every 128 of it, and the rotary part in 16 bits; 512 + 16 + 128 = 656 bytes.
    """
    if not is_fp8(f):
        return latent(f)
    size, rope = f.need("kv_lora_rank", "qk_rope_head_dim")
    return Region(
        "all",
        {
            "latent": ((size,), f.dtype),
            "scale": ((-(-size // 128),), "float32"),
            "rope": ((rope,), f.model_dtype),
        },
    )


def indexer(f: Fields, ratio: int = 1) -> Region:
    """The keys of an indexer, one for `ratio` tokens; in fp8 with a float32 scale, 132 bytes."""
    size = f.need("index_head_dim")
    scale = {"scale": ((1,), "float32")} if is_fp8(f) else {}
    return Region("all", {"entry": ((size,), f.dtype), **scale}, ratio)


def _state(f: Fields, ssm: tuple[int, ...] | None, width: int = 1, *parts: tuple) -> Region:
    """A recurrent state, and of its convolution of that width the parts, (heads, channels) each.

    The recurrence accumulates in float32 in every model here; two keys say otherwise.
    """
    dtype = f.get("mamba_ssm_cache_dtype") or f.get("mamba_ssm_dtype") or "float32"
    buffers: dict[str, tuple] = {}
    if parts:
        channels = sum(heads * each for heads, each in parts)
        buffers["conv"] = ((channels, width - 1), f.model_dtype, parts if len(parts) > 1 else ())
    if ssm:
        buffers["ssm"] = (ssm, dtype)
    return RecurrentState(buffers)


def gated_delta(f: Fields) -> Region:
    """Gated DeltaNet: one convolution over queries, keys and values, a matrix a value head."""
    key_heads, value_heads, key, value, width = f.need(
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
        "linear_conv_kernel_dim",
    )
    keys = key_heads, key
    return _state(f, (value_heads, key, value), width, keys, keys, (value_heads, value))


def kimi_delta(f: Fields) -> Region:
    """Kimi Delta Attention: as Gated DeltaNet, heads and sizes alike for keys and values."""
    heads, size, width = f.need("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    return _state(f, (heads, size, size), width, *((heads, size),) * 3)


def lightning(f: Fields) -> Region:
    """Lightning attention: a matrix a query head, no convolution."""
    heads, size = f.need("num_attention_heads", "head_dim")
    return _state(f, (heads, size, size))


def short_conv(f: Fields) -> Region:
    """A gated short convolution over the width of the model, and nothing else."""
    channels, width = f.need("hidden_size", "conv_L_cache")
    return _state(f, None, width, (channels, 1))


def mamba1(f: Fields) -> Region:
    """Mamba: a convolution and a state for each channel of the inner width."""
    expand, width, conv, state = f.need(
        "mamba_expand", "hidden_size", "mamba_d_conv", "mamba_d_state"
    )
    channels = expand * width
    return _state(f, (channels, state), conv, (channels, 1))


def mamba2(heads: str, size: str, groups: str, state: str, conv: str):
    """Mamba-2, whose fields have other names in each family.

    `heads` heads of `size` channels; the convolution also runs over the B and C of every group.
    """

    def layer(f: Fields) -> Region:
        num, channels, parts, depth, width = f.need(heads, size, groups, state, conv)
        inner = f.get("mamba_d_ssm")
        if inner is not None and inner != num * channels:
            raise SpecError(
                f"{heads} {num} times {size} {channels} is not the inner width {inner} "
                "(mamba_d_ssm, or mamba_expand times hidden_size); they contradict"
            )
        of_groups = parts, depth
        return _state(f, (num, channels, depth), width, (num, channels), of_groups, of_groups)

    return layer


def inner_head_size(heads: str):
    """The default of a Mamba-2 head's size: the inner width dealt evenly to the heads."""
    return lambda f: f.need("mamba_d_ssm") // f.need(heads)


def stated_or_expanded(f: Fields) -> int | None:
    """The default of `mamba_d_ssm` where null means the expanded width; left out, it is asked."""
    return expanded(f) if "mamba_d_ssm" in f.values else None


def expanded(f: Fields) -> int:
    """The default of `mamba_d_ssm`, the inner width."""
    expand, width = f.need("mamba_expand", "hidden_size")
    return expand * width


def nothing(f: Fields) -> None:
    """A layer without a cache."""
    return None


def parallel(state):
    """Attention and a recurrent state side by side in one layer."""
    return lambda f: {"full": full(f), "state": state(f)}


def gemma4_full(f: Fields) -> Region:
    """Gemma 4: full attention has heads of its own size, and of its own number where K is V."""
    if f.get("per_layer_config") is not None:  # a config object has worked it out for each layer
        return full(f)
    heads = f.get("num_global_key_value_heads") if f.get("attention_k_eq_v") else None
    own = {"num_key_value_heads": heads} if heads else {}
    return full(f.replaced(head_dim=f.need("global_head_dim"), **own))


def mimo_sliding(f: Fields) -> Region:
    """MiMo-V2: windows have heads of their own.

    Its files state the window twice, alike, and it counts the query. The class of transformers
    takes `sliding_window_size` for the tokens before the query: an object's other is one more.
    """
    window, size = f.get("sliding_window"), f.count("sliding_window_size")
    if size and window not in (None, size, size + 1):
        raise SpecError(f"sliding_window {window} and sliding_window_size {size}; they contradict")
    own = {
        "num_attention_heads": f.get("swa_num_attention_heads"),
        "num_key_value_heads": f.get("swa_num_key_value_heads"),
        "head_dim": f.get("swa_head_dim"),
        "v_head_dim": f.get("swa_v_head_dim"),
        "sliding_window": size or window,
    }
    return sliding(f.replaced(**own))


def step_sliding(f: Fields) -> Region:
    """Step: `attention_other_setting` may give windows heads of their own."""
    own = f.get("attention_other_setting") or {}
    if not isinstance(own, Mapping):
        raise SpecError(f"attention_other_setting: wanted an object, got {own!r}")
    own = dict(own)
    own["num_key_value_heads"] = own.get("num_attention_groups")
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    return sliding(f.replaced(**{name: own[name] for name in names if own.get(name)}))
