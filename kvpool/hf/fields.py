"""Fields: one language model's configuration, read a field at a time; what lacks is named."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from kvpool.buffers import count
from kvpool.regions import positive
from kvpool.status import SpecError

# Where a multimodal configuration keeps the language model.
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")

MEANING = {
    "attention_chunk_size": "tokens of a chunk of chunked-local attention",
    "attn_layer_indices": "the layers with attention; a list",
    "attn_layer_period": "one layer of so many has attention",
    "attn_type_list": "for each layer 1 with softmax attention, 0 with linear; a list",
    "block_configs": "for each layer its attention; a list",
    "cla_share_factor": "so many layers in a row share one cache",
    "compress_ratios": "for each layer the tokens of a compressed entry, 0 for none; a list",
    "conv_L_cache": "width of the short convolution",
    "conv_kernel": "width of the convolution before the recurrence",
    "full_attn_idxs": "the layers with attention; a list",
    "global_head_dim": "size of a key and a value of full attention",
    "head_dim": "size of a key, and of a value where v_head_dim does not say otherwise",
    "hidden_size": "width of the model, from which other sizes follow",
    "hybrid_layer_pattern": "for each layer 1 with a window, 0 without; a list",
    "hybrid_override_pattern": "a letter a layer: M mamba, * attention, - and E without a cache",
    "index_head_dim": "size of the key of the indexer",
    "indexer_types": "for each layer full or shared; a list",
    "index_topk_pattern": "for each layer F or S, full or shared; a list",
    "kv_lora_rank": "size of the latent of multi-head latent attention",
    "layer_types": "for each layer its kind; a list",
    "linear_attn_config": "the layers with linear attention and those without, and their sizes",
    "linear_conv_kernel_dim": "width of the convolution before linear attention",
    "linear_head_dim": "size of a key and a value of linear attention",
    "linear_key_head_dim": "size of a key of linear attention",
    "linear_num_heads": "heads of linear attention",
    "linear_num_key_heads": "key heads of linear attention",
    "linear_num_value_heads": "value heads of linear attention",
    "linear_value_head_dim": "size of a value of linear attention",
    "mamba_d_conv": "width of the convolution before the recurrence",
    "mamba_d_head": "channels of a mamba head",
    "mamba_d_ssm": "channels of the recurrence in all; null for mamba_expand times hidden_size",
    "mamba_d_state": "size of the recurrent state of a channel",
    "mamba_expand": "channels of the recurrence, in widths of the model",
    "mamba_head_dim": "channels of a mamba head",
    "mamba_n_groups": "groups of heads with one B and C",
    "mamba_n_heads": "heads of a mamba layer",
    "mamba_num_heads": "heads of a mamba layer",
    "max_window_layers": "the first layer with a window",
    "n_groups": "groups of heads with one B and C",
    "no_rope_layer_interval": "one layer of so many has no rotary positions, and is full",
    "num_attention_heads": "query heads",
    "num_hidden_layers": "layers",
    "num_key_value_heads": "heads of keys and values",
    "num_layers": "layers, of two attentions each",
    "num_nextn_predict_layers": "draft layers",
    "qk_rope_head_dim": "size of the rotary part of a key of latent attention",
    "sliding_window": "tokens of a sliding window, the query counted",
    "ssm_state_size": "size of the recurrent state of a channel",
}


class Fields:
    """The fields of one language model, with the defaults that its family gives to absent ones.

    Attributes:
      dtype: of the attention caches.
      model_dtype: of the activations, which convolution states are made of.
    """

    def __init__(self, values: Mapping[str, Any], dtype=None):
        self.values = values
        self.defaults: Mapping[str, Any] = {}
        self.model_type = str(values.get("model_type", ""))
        self.model_dtype = _model_dtype(values)
        self.dtype = self.model_dtype if dtype is None else _name(dtype)

    def get(self, name: str):
        """The value of a field, or its default; None where there is neither.

        null and "auto" are how a configuration says that the default holds.
        """
        value = self.values.get(name)
        if value is None or value == "auto":
            value = self.defaults.get(name)
        return value(self) if callable(value) else value

    def need(self, *names: str) -> Any:
        """The integers of these fields, one alone or a tuple; SpecError naming all that lack."""
        self.ask(*names)
        found = tuple(positive(name, self.get(name)) for name in names)
        return found[0] if len(found) == 1 else found

    def ask(self, *names: str) -> None:
        """SpecError naming those of the fields that the configuration does not state."""
        missing = [name for name in names if self.get(name) is None]
        if missing:
            raise SpecError(
                f"config of {self.model_type!r} does not say "
                + "; ".join(f"{name} ({MEANING[name]})" for name in missing)
            )

    def count(self, name: str) -> int:
        """The integer of at least 0 of a field, 0 where there is none."""
        value = self.get(name)
        return 0 if value is None else count(name, value)

    def listed(self, name: str, length: int, more: int = 0) -> list:
        """A list with one item a layer; `more` draft layers at its end are dropped."""
        self.ask(name)
        items = self.get(name)
        if not isinstance(items, (list, tuple, str)):
            raise SpecError(f"{name}: wanted a list with an item a layer, got {items!r}")
        if len(items) not in (length, length + more):
            raise SpecError(
                f"{name} has {len(items)} items, but num_hidden_layers is {length}; they contradict"
            )
        return list(items[:length])

    def of_layer(self, layer: int) -> "Fields":
        """The fields as layer number `layer` sees them: `per_layer_config` goes before the rest."""
        overrides = self.values.get("per_layer_config") or {}
        own = {k: v for key in overrides if int(key) == layer for k, v in overrides[key].items()}
        return self.replaced(**own) if own else self

    def replaced(self, **values) -> "Fields":
        """The fields with other values for some."""
        fields = Fields({**self.values, **values}, self.dtype)
        fields.defaults = self.defaults
        return fields


def fields_of(config, dtype=None) -> Fields:
    """The fields of a dictionary, a path or an object with `to_dict`.

    Raises:
      SpecError: for a path without a readable config.json, or another type.
    """
    values = _dictionary(config)
    while "num_hidden_layers" not in values:  # else a flat one beside an unused nested part
        inner = next((values[key] for key in _NESTED if values.get(key)), None)
        if not isinstance(inner, Mapping):
            break
        outer = {
            key: values[key]
            for key in ("model_type", "dtype", "torch_dtype")
            if values.get(key) is not None and inner.get(key) is None
        }
        values = {**inner, **outer}
    return Fields(values, dtype)


def _dictionary(config) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    if hasattr(config, "to_dict"):
        return config.to_dict()
    if not isinstance(config, (str, os.PathLike)):
        raise SpecError(f"config: wanted a dict, a path or a config object, got {config!r}")
    path = Path(config)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(
            f"config: wanted a config.json or its folder, got {path}: {error}"
        ) from None
    if not isinstance(values, Mapping):
        raise SpecError(f"config: wanted an object in {path}, got {type(values).__name__}")
    return values


def _model_dtype(values: Mapping[str, Any]) -> str:
    """The 16-bit dtype of the activations.

    A checkpoint stored as float32 is served in bfloat16, as engines do; so is one that does not
    say. What is quantised are its weights, so `quantization_config` has no part in it.
    """
    stated = values.get("dtype") or values.get("torch_dtype") or "bfloat16"
    name = str(stated).removeprefix("torch.")
    return name if name in ("bfloat16", "float16") else "bfloat16"


def _name(dtype) -> str:
    return dtype if isinstance(dtype, str) else np.dtype(dtype).name
