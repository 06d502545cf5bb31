"""Which kind each layer is: functions from (fields, number of layers) to a list of kinds.

A pattern reads what its family's configurations say, and derives the rest as the family's class in
transformers does. `layer_types` goes first wherever the family knows it.
"""

from collections.abc import Callable, Mapping

from kvpool.buffers import count
from kvpool.hf.fields import Fields
from kvpool.regions import positive
from kvpool.status import SpecError

FULL, SLIDING, CHUNKED, LINEAR = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "linear_attention",
)
NONE = "none"  # a layer without a cache
Pattern = Callable[[Fields, int], list[str]]

# Words of older configurations for the kinds of today.
_OLDER = {"attention": FULL, "mamba": LINEAR, "moe": NONE, "mlp": NONE, "indexed_attention": FULL}


def listed(derive: Pattern) -> Pattern:
    """`layer_types` where the configuration has it, else what `derive` gives."""

    def pattern(f: Fields, length: int) -> list[str]:
        name = next((n for n in ("layer_types", "layers_block_type") if f.get(n)), None)
        if name is None:
            return derive(f, length)
        drafts = f.count("num_nextn_predict_layers")
        return [_OLDER.get(kind, kind) for kind in f.listed(name, length, drafts)]

    return pattern


def uniform(kind: str) -> Pattern:
    """Every layer alike."""
    return lambda f, length: [kind] * length


full = listed(uniform(FULL))  # also where `layer_types` is stated, which may then say otherwise


def asked(f: Fields, length: int) -> list[str]:
    """No rule: `layer_types` must be there."""
    f.ask("layer_types")
    return []


def every(period: int, *fields: str, others: str = SLIDING) -> Pattern:
    """The last of every `period` layers is full; one of `fields` may give another period."""

    def derive(f: Fields, length: int) -> list[str]:
        if others == SLIDING and no_window(f):
            return [FULL] * length
        name = next((name for name in fields if f.get(name) is not None), None)
        step = period if name is None else f.get(name)
        if isinstance(step, str):  # a letter for each layer of the period, L for a window
            if others != SLIDING or not step or set(step) - {"L", "G"}:
                raise SpecError(f"{name}: wanted a number, or letters L and G, got {step!r}")
            return [SLIDING if step[i % len(step)] == "L" else FULL for i in range(length)]
        step = positive(str(name), step)
        return [others if (i + 1) % step else FULL for i in range(length)]

    return listed(derive)


def no_window(f: Fields) -> bool:
    """Whether `sliding_window` is null: there is none.  Left out, the class's default holds."""
    return "sliding_window" in f.values and f.values["sliding_window"] is None


def windowed(f: Fields, length: int) -> list[str]:
    """All layers have the window, if there is one and `use_sliding_window` does not forbid it."""
    off = f.get("use_sliding_window") is False or f.get("sliding_window") is None
    return [FULL if off or no_window(f) else SLIDING] * length


def unused_window(f: Fields, length: int) -> list[str]:
    """Full; which layers have a window, where `use_sliding_window` is on, has to be said."""
    f.ask(*(["layer_types"] if f.get("use_sliding_window") else []))
    return [FULL] * length


def last_is_full(pattern: Pattern) -> Pattern:
    """Gemma 4: whatever the pattern says, the last layer is full."""
    return lambda f, length: [*pattern(f, length)[:-1], FULL]


def after_max_window_layers(f: Fields, length: int) -> list[str]:
    """A window from layer `max_window_layers` on, where `use_sliding_window` asks for it."""
    if not f.get("use_sliding_window") or no_window(f):
        return [FULL] * length
    f.ask("max_window_layers")
    first = f.count("max_window_layers")
    return [SLIDING if i >= first else FULL for i in range(length)]


def rope_layers(f: Fields, length: int) -> list[str]:
    """Llama 4: layers with rotary positions are chunked, the others full."""
    if "attention_chunk_size" not in f.values:
        f.ask("attention_chunk_size")  # null says that there are no chunks, leaving it out does not
    if f.get("attention_chunk_size") is None:
        return [FULL] * length
    flags = f.get("no_rope_layers")  # 1 where there are rotary positions, in spite of the name
    if not flags:
        step = f.need("no_rope_layer_interval")
        flags = [(i + 1) % step for i in range(length)]
    elif not isinstance(flags, (list, tuple)):
        raise SpecError(f"no_rope_layers: wanted a list with an item a layer, got {flags!r}")
    elif len(flags) != length:
        raise SpecError(
            f"no_rope_layers has {len(flags)} items, but num_hidden_layers is {length}; "
            "they contradict"
        )
    return [CHUNKED if flag else FULL for flag in flags]


def periodic(f: Fields, length: int) -> list[str]:
    """Jamba: attention at `attn_layer_offset` of every `attn_layer_period` layers."""
    period, offset = f.need("attn_layer_period"), f.count("attn_layer_offset")
    if offset >= period:
        raise SpecError(
            f"attn_layer_offset {offset} is not below attn_layer_period {period}; they contradict"
        )
    return [FULL if i % period == offset else LINEAR for i in range(length)]


def at_indices(name: str, others: str) -> Pattern:
    """Attention at the layers that the field lists."""

    def pattern(f: Fields, length: int) -> list[str]:
        f.ask(name)
        if not isinstance(f.get(name), (list, tuple)):
            raise SpecError(f"{name}: wanted a list of layers, got {f.get(name)!r}")
        layers = {count(name, layer) for layer in f.get(name)}
        if not layers <= set(range(length)):
            raise SpecError(
                f"{name} is {sorted(layers)}, but num_hidden_layers is {length}; they contradict"
            )
        return [FULL if i in layers else others for i in range(length)]

    return pattern


def one_based(f: Fields, length: int) -> list[str]:
    """Kimi Linear: two lists of layers in `linear_attn_config`, counted from 1."""
    f.ask("linear_attn_config")
    lists = f.get("linear_attn_config")
    if not isinstance(lists, Mapping):
        raise SpecError(f"linear_attn_config: wanted an object, got {lists!r}")
    full, linear = lists.get("full_attn_layers", ()), lists.get("kda_layers", ())
    if sorted([*full, *linear]) != list(range(1, length + 1)):
        raise SpecError(
            "linear_attn_config: full_attn_layers and kda_layers must name each of the layers "
            f"1 to {length} once, got {full} and {linear}"
        )
    return [FULL if i + 1 in full else LINEAR for i in range(length)]


def letters(f: Fields, length: int) -> list[str]:
    """Nemotron-H: a letter a layer."""
    kinds = {"M": LINEAR, "*": FULL, "-": NONE, "E": NONE}
    pattern = f.listed("hybrid_override_pattern", length)
    return [kinds.get(letter, letter) for letter in pattern]


def flags(name: str, one: str, zero: str) -> Pattern:
    """A list of 1 and 0."""

    def pattern(f: Fields, length: int) -> list[str]:
        return [{1: one, 0: zero}.get(flag, str(flag)) for flag in f.listed(name, length)]

    return pattern


def indexers(f: Fields, length: int) -> list[str]:
    """Which layers run an indexer of their own ("full") and which use the one before ("shared")."""
    if f.get("indexer_types"):
        return f.listed("indexer_types", length)
    if f.get("index_topk_pattern"):
        pattern = f.listed("index_topk_pattern", length)
        return [{"F": "full", "S": "shared"}.get(letter, letter) for letter in pattern]
    step, offset = f.get("index_topk_freq") or 1, f.get("index_skip_topk_offset")
    offset = 2 if offset is None else offset
    return ["shared" if max(i - offset + 1, 0) % step else "full" for i in range(length)]


def first_of_four_indexers(f: Fields, length: int) -> list[str]:
    """Hunyuan 4: layer 0 and then the first of every four run an indexer."""
    if f.get("indexer_types"):
        return f.listed("indexer_types", length)
    return ["shared" if i and (i - 1) % 4 else "full" for i in range(length)]


def compress_ratios(f: Fields, length: int) -> list[str]:
    """DeepSeek-V4: tokens of a compressed entry, a layer; 0 for a window only."""
    kinds = {0: SLIDING, 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    drafts = f.count("num_nextn_predict_layers")
    ratios = f.listed("compress_ratios", length, drafts)
    return [kinds.get(ratio, f"compress ratio {ratio}") for ratio in ratios]


def draft_ratios(f: Fields, count: int) -> list[str]:
    """DeepSeek-V4's draft layers: the ratios after those of the layers; a window only without."""
    ratios = (f.get("compress_ratios") or [])[f.need("num_hidden_layers") :]
    if any(ratios):
        raise SpecError(f"compress_ratios of the draft layers: wanted 0, got {ratios}")
    return [SLIDING] * count
