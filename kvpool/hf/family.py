"""Family: how the configurations of a family of models are read.

The families are tables in `attention.py`, `latent.py` and `hybrid.py`; to add one, add a line. A
default belongs there only where the family's class in transformers gives an absent field that
value: then it is what a configuration means by leaving the field out. Sizes that every published
file states have none, so that a truncated file is refused.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from kvpool.hf import patterns as at
from kvpool.hf import payloads as p
from kvpool.hf.fields import Fields
from kvpool.hf.patterns import FULL, NONE, SLIDING, Pattern

Layers = list[Any]

# What a layer keeps of these kinds where its family does not say otherwise.
ATTENTION = {FULL: p.full, SLIDING: p.sliding, at.CHUNKED: p.chunked, NONE: p.nothing}


@dataclasses.dataclass(frozen=True)
class Family:
    """How the configurations of a family are read.

    Attributes:
      pattern: the kind of each layer.
      kinds: {kind: what such a layer keeps}, beside attention, full, in windows and in chunks.
      finish: (fields, kinds of the layers, layers) -> layers, where layers share.
      draft: the kind of each draft (multi-token prediction) layer, where the family has them.
      defaults: {field: value, or a function of the fields}.
    """

    pattern: Pattern
    kinds: Mapping[str, Callable[[Fields], Any]] = dataclasses.field(default_factory=dict)
    finish: Callable[[Fields, list[str], Layers], Layers] | None = None
    draft: Pattern | None = None
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    block_size: int = 16  # tokens, where the caller names none


def same(types: str, family: Family) -> dict[str, Family]:
    """The model types that are read alike, names separated by spaces."""
    return dict.fromkeys(types.split(), family)


def sub(field: str, key: str):
    """A default that is an item of another field."""
    return lambda f: (f.get(field) or {}).get(key)


# As many heads of keys as of queries, and the width dealt evenly to them.
EVEN = {"num_key_value_heads": p.same_as("num_attention_heads"), "head_dim": p.head_size}
EVEN_SIZE = {"head_dim": p.head_size}
