"""Presets: the caches of known models, by name, without a configuration at hand.

`models.json` has an object a model:

    "hf"          where its checkpoint lies
    "from"        "config": its published configuration says so; "class default": the defaults of
                  its class in transformers do; "unverified": neither was at hand
    "block_size"  tokens of a block, where it is not 16
    "layers"      a letter a layer, 3(ab) for ababab, - for a layer without a cache
    "regions"     {letter: what such a layer keeps}: a constructor ("kind") with its arguments,
                  {"tags": {tag: ...}}, or {"shared": letter}, the cache of the last layer before
                  that has that letter
"""

import difflib
import functools
import importlib.resources
import json
import re
from typing import Any

from kvpool import regions
from kvpool.hf.blocks import short_windows
from kvpool.regions import SharedWith
from kvpool.spec import CacheSpec
from kvpool.status import SpecError

_KINDS: dict[str, Any] = {
    "full": regions.FullAttention,
    "window": regions.SlidingWindow,
    "chunk": regions.ChunkedLocal,
    "latent": regions.LatentAttention,
    "state": regions.RecurrentState,
    "region": regions.Region,
}


def preset_names() -> tuple[str, ...]:
    """The names that `preset` knows."""
    return tuple(_models())


def preset(name: str, block_size: int | None = None) -> CacheSpec:
    """The spec of a known model, as `CacheSpec.from_hf_config` makes it of its configuration.

    Args:
      name: one of `preset_names()`.
      block_size: tokens of a block; default 16, 256 for DeepSeek-V4. A group with a window has
        blocks of at most half the window.

    Raises:
      SpecError: for an unknown name, with those that come near.
    """
    if name not in _models():
        near = difflib.get_close_matches(str(name), _models(), n=5, cutoff=0.4)
        raise SpecError(f"no preset {name!r}; there are {', '.join(near or _models())}")
    model = _models()[name]
    size = model.get("block_size", 16) if block_size is None else block_size
    letters = re.sub(r"(\d+)\(([^()]+)\)", lambda m: m[2] * int(m[1]), model["layers"])
    layers: list = []
    for layer, letter in enumerate(letters):
        item = None if letter == "-" else model["regions"][letter]
        layers.append(_layer(item, letters[:layer]))
    return short_windows(layers, size, "independent")


@functools.cache
def _models() -> dict[str, Any]:
    return json.loads(importlib.resources.files(__package__).joinpath("models.json").read_text())


def _layer(item, before: str, tag: str | None = None):
    """What a layer keeps, or one tag of it; `before` are the letters of the layers before it."""
    if item is None:
        return None
    if "tags" in item:
        return {tag: _layer(region, before, tag) for tag, region in item["tags"].items()}
    if "shared" in item:
        return SharedWith(before.rindex(item["shared"]), tag)
    arguments = {key: value for key, value in item.items() if key != "kind"}
    return _KINDS[item["kind"]](**arguments)
