"""Families in which a layer uses the cache of an earlier one, or has a cache of its own design."""

from kvpool.hf.fields import Fields
from kvpool.hf.payloads import full
from kvpool.regions import SharedWith
from kvpool.status import SpecError


def share_tail(f: Fields, kinds: list[str], layers: list) -> list:
    """Gemma: the last `num_kv_shared_layers` layers use the last earlier layer of their kind."""
    first = len(layers) - f.count("num_kv_shared_layers")
    for layer, kind in enumerate(kinds):
        if layer >= first:
            owners = [i for i in range(max(first, 0)) if kinds[i] == kind]
            if not owners:
                raise SpecError(
                    f"num_kv_shared_layers {len(layers) - first} leaves layer {layer} no earlier "
                    f"{kind} layer to share, of {len(layers)}; they contradict"
                )
            layers[layer] = SharedWith(owners[-1])
    return layers


def share_indexers(f: Fields, kinds: list[str], layers: list) -> list:
    """A "shared" layer uses what the indexer of the "full" layer before it picked."""
    for layer, kind in enumerate(kinds):
        if kind == "shared":
            if "full" not in kinds[:layer]:
                raise SpecError(f"layer {layer} shares an indexer, but no layer before has one")
            last = max(i for i in range(layer) if kinds[i] == "full")
            layers[layer] = {**layers[layer], "indexer": SharedWith(last, "indexer")}
    return layers


def share_in_pairs(f: Fields, kinds: list[str], layers: list) -> list:
    """Hunyuan: with `use_cla`, `cla_share_factor` layers in a row use the first one's cache."""
    factor = f.need("cla_share_factor") if f.get("use_cla") else 1
    return [SharedWith(i - i % factor) if i % factor else layer for i, layer in enumerate(layers)]


def from_block_configs(f: Fields, kinds: list[str], layers: list) -> list:
    """Nemotron-NAS: a search chose each layer's query heads per key, or took its attention out."""
    queries = f.need("num_attention_heads")
    found: list = []
    for block in f.listed("block_configs", len(kinds)):
        attention = block.get("attention") or {}
        if attention.get("no_op") or attention.get("replace_with_linear"):
            found.append(None)
            continue
        group = attention.get("n_heads_in_group")
        if not group or queries % group:
            raise SpecError(
                f"block_configs[{len(found)}]: wanted n_heads_in_group, a divisor of "
                f"num_attention_heads {queries}, got {group!r}"
            )
        found.append(full(f.replaced(num_key_value_heads=queries // group)))
    return found
