"""The cache of a model from its own `config.json`.

`attention.py`, `latent.py` and `hybrid.py` list the families of models. A family (`family.py`) is a
pattern, which kind each layer is (`patterns.py`), what a layer of a kind keeps (`payloads.py`,
`deepseek_v4.py`), and which layers use another's cache (`sharing.py`). `fields.py` reads a
configuration and asks for what it does not say. transformers is not needed: its config classes were
read, not imported.
"""

from kvpool.hf.attention import PLAIN, WINDOWED
from kvpool.hf.blocks import short_windows
from kvpool.hf.family import ATTENTION, Family
from kvpool.hf.fields import Fields, fields_of
from kvpool.hf.hybrid import HYBRID
from kvpool.hf.latent import LATENT
from kvpool.hf.patterns import Pattern
from kvpool.spec import CacheSpec
from kvpool.status import SpecError

FAMILIES = {**PLAIN, **WINDOWED, **LATENT, **HYBRID}


def from_hf_config(config, *, block_size=None, dtype=None, pooling="independent") -> CacheSpec:
    """The spec of a model; see `CacheSpec.from_hf_config`."""
    f, family = _read(config, dtype)
    layers = _layers(f, family, family.pattern, f.need("num_hidden_layers"))
    return short_windows(layers, family.block_size if block_size is None else block_size, pooling)


def draft_from_hf_config(config, *, block_size=None, dtype=None, pooling="independent"):
    """The spec of a model's own draft layers, those of its multi-token prediction.

    Args:
      config, block_size, dtype, pooling: as `CacheSpec.from_hf_config`, which leaves them out.

    Returns:
      A CacheSpec of the draft layers alone.

    Raises:
      SpecError: where the configuration names none, or the family is not known to have any.
    """
    f, family = _read(config, dtype)
    if family.draft is None:
        raise SpecError(f"{f.model_type!r}: what its draft layers keep is not known here")
    name = "mtp_num_hidden_layers" if f.get("mtp_num_hidden_layers") else "num_nextn_predict_layers"
    layers = _layers(f, family, family.draft, f.need(name))
    return short_windows(layers, family.block_size if block_size is None else block_size, pooling)


def _read(config, dtype) -> tuple[Fields, Family]:
    f = fields_of(config, dtype)
    if f.model_type not in FAMILIES:
        raise SpecError(
            f"model_type {f.model_type!r} is not known; known are {', '.join(sorted(FAMILIES))}. "
            "Write the spec by hand, a region for each layer: kvpool.CacheSpec.from_layers("
            "[kvpool.SlidingWindow(1024, num_kv_heads=8, head_dim=128), "
            "kvpool.FullAttention(num_kv_heads=8, head_dim=128), ...])"
        )
    family = FAMILIES[f.model_type]
    f.defaults = family.defaults
    return f, family


def _layers(f: Fields, family: Family, pattern: Pattern, length: int) -> list:
    kinds = pattern(f, length)
    keeps = {**ATTENTION, **family.kinds}
    for layer, kind in enumerate(kinds):
        if kind not in keeps:
            raise SpecError(
                f"layer {layer} of {f.model_type!r} is {kind!r}; known kinds are {sorted(keeps)}"
            )
    layers = [keeps[kind](f.of_layer(layer)) for layer, kind in enumerate(kinds)]
    return family.finish(f, kinds, layers) if family.finish else layers


__all__ = ["FAMILIES", "draft_from_hf_config", "from_hf_config"]
