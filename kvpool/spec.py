"""CacheSpec: which region each layer keeps, and the groups of layers that share a block table."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvpool import pooling as poolings
from kvpool import regions, schema
from kvpool.group import Group
from kvpool.owners import layer_of, owners_of
from kvpool.regions import Region, positive, token_count
from kvpool.status import SpecError


class Draft(NamedTuple):
    """A draft module: the number of its layers, and whether they ride in the main model's blocks.

    Packed layers join the main model's group of their region; others have groups of their own.
    """

    layers: int
    packed: bool


@dataclasses.dataclass(frozen=True, eq=False)
class CacheSpec:
    """What every layer of a model keeps of the past.  Build with `from_layers`.

    `layers` are the main model's and after them those of the `drafts`, which `with_draft` appends.
    Two specs are equal when their dictionaries are; hash and comparison use a digest made once,
    since jax compares static fields at every dispatch.
    """

    layers: tuple
    block_size: int
    pooling: str
    block_sizes: tuple[tuple[str, int], ...] = ()  # of the groups that differ from `block_size`
    drafts: tuple[Draft, ...] = ()

    @classmethod
    def from_layers(
        cls,
        layers: Sequence,
        block_size: int = 16,
        pooling: str = "independent",
        *,
        block_sizes: Mapping[str, int] | None = None,
        drafts: Sequence["Draft"] = (),
    ) -> "CacheSpec":
        """Builds a spec.

        Args:
          layers: one item a layer: a Region, {tag: Region | SharedWith}, a SharedWith (the earlier
            layer's cache, whole or one tag of it) or None (no cache).
          block_size: tokens of a block; a group rounds it up to a multiple of its region's
            tokens per entry.
          pooling: "independent": every group has a pool of its own. "shared": groups whose blocks
            have nearly the same bytes draw from one pool, and blocks of tokens are made longer
            where that brings them there. "elastic": all groups draw from one array, cut into slabs.
          block_sizes: {group name: tokens} of groups whose blocks are to have another size, e.g. a
            ring of 8 tokens, of which a block of 16 wastes half.
          drafts: which of the last layers are draft modules; `with_draft` writes it.

        Raises:
          SpecError: naming the layer, what was given and what is wanted.
        """
        if isinstance(layers, (str, Mapping)) or not isinstance(layers, Sequence):
            raise SpecError(f"layers: wanted a sequence of layers, got {type(layers).__name__}")
        if pooling not in poolings.POOLINGS:
            wanted = ", ".join(poolings.POOLINGS)
            raise SpecError(f"pooling: wanted one of {wanted}, got {pooling!r}")
        layers = tuple(layer_of(number, layer) for number, layer in enumerate(layers))
        size, drafts = token_count("block_size", block_size), _drafts(drafts, len(layers))
        spec = cls(layers, size, pooling, (), drafts)
        if not spec.groups:
            raise SpecError(f"layers: wanted a layer with a cache, got none in {len(layers)}")
        if not block_sizes and pooling != poolings.SHARED:
            return spec
        return cls(layers, size, pooling, _block_sizes(spec, block_sizes or {}), drafts)

    @classmethod
    def from_hf_config(cls, config, *, block_size=None, dtype=None, pooling="independent"):
        """The spec of a model as its own configuration describes it.

        Args:
          config: a dict, the path of a `config.json` or its folder, or a transformers config.
          block_size: as in `from_layers`; default 16, 256 for DeepSeek-V4. A group with a window
            has blocks of at most half the window.
          dtype: of the attention caches; default the model's 16-bit one. Recurrent states keep
            theirs.
          pooling: as in `from_layers`.

        Raises:
          SpecError: naming the fields that lack or contradict; for an unknown model the models
            that are known.
        """
        from kvpool import hf  # above this module: it builds specs

        return hf.from_hf_config(config, block_size=block_size, dtype=dtype, pooling=pooling)

    @functools.cached_property
    def _regions(self) -> tuple[dict[str | None, tuple[int, str | None]], ...]:
        """For each layer {tag: (layer, tag) that owns the region}."""
        return owners_of(self.layers)

    @functools.cached_property
    def _table(self) -> tuple[tuple[Group, ...], dict[tuple, tuple[str, int]]]:
        """The groups, and {(layer, tag): (group name, index in group)} of all pairs that exist."""
        members: dict[tuple[int, Region], list] = {}
        for number, owned in enumerate(self._regions):
            for tag, owner in owned.items():
                if owner == (number, tag):
                    layer = self.layers[number]
                    region = layer[tag] if isinstance(layer, dict) else layer
                    members.setdefault((self._apart[number], region), []).append(owner)
        groups: list[Group] = []
        table: dict[tuple, tuple[str, int]] = {}
        for (_, region), owners in members.items():
            name = _group_name(region, [group.name for group in groups])
            size = region.block_tokens(dict(self.block_sizes).get(name, self.block_size))
            groups.append(Group(name, region, tuple(layer for layer, _ in owners), size))
            table.update({owner: (name, index) for index, owner in enumerate(owners)})
        for number, owned in enumerate(self._regions):
            table.update({(number, tag): table[owner] for tag, owner in owned.items()})
        return tuple(groups), table

    @functools.cached_property
    def _apart(self) -> tuple[int, ...]:
        """For each layer 0, or the number from 1 of the draft that has groups of its own."""
        apart = [0] * (len(self.layers) - sum(draft.layers for draft in self.drafts))
        for module, draft in enumerate(self.drafts, 1):
            apart += [0 if draft.packed else module] * draft.layers
        return tuple(apart)

    @property
    def groups(self) -> tuple[Group, ...]:
        """The groups in layer order of their first member."""
        return self._table[0]

    def group(self, name: str) -> Group:
        """The group of that name; SpecError naming the groups when there is none."""
        return self.groups[self.group_index(name)]

    def group_index(self, name: str) -> int:
        """Place of the group of that name in `groups`; SpecError as `group`."""
        names = [group.name for group in self.groups]
        if name not in names:
            raise SpecError(f"no group {name!r}; the groups are {', '.join(names)}")
        return names.index(name)

    def resolve(self, layer: int, tag: str | None = None) -> tuple[str, int]:
        """Where a layer's region lives.

        Returns:
          (group name, index of the layer in the group). The tag may be left out only where the
          layer has exactly one region.

        Raises:
          SpecError: for a pair that does not exist; the message lists those that do.
        """
        pair: tuple = (layer, tag)
        is_number = isinstance(layer, (int, np.integer)) and not isinstance(layer, bool)
        in_range = is_number and 0 <= layer < len(self.layers)
        if in_range and tag is None and len(self._regions[layer]) == 1:
            pair = (layer, *self._regions[layer])
        if not in_range or pair not in self._table[1]:
            raise SpecError(f"no region (layer {layer}, tag {tag!r}); there are {self._pairs()}")
        return self._table[1][pair]

    def tags(self, layer: int) -> tuple[str | None, ...]:
        """The tags of a layer's regions; (None,) for one without tag, () for no cache."""
        return tuple(self._regions[layer])

    def _pairs(self) -> str:
        layers_of: dict[tuple, list[str]] = {}
        for number, owned in enumerate(self._regions):
            layers_of.setdefault(tuple(owned), []).append(str(number))
        return "; ".join(
            f"layer {', '.join(numbers)}: " + (", ".join(map(repr, tags)) if tags else "no cache")
            for tags, numbers in layers_of.items()
        )

    def to_dict(self) -> dict:
        """The spec as JSON values, with its `schema_version`."""
        return {
            "schema_version": schema.VERSION,
            "block_size": self.block_size,
            "pooling": self.pooling,
            "block_sizes": dict(self.block_sizes),
            "layers": [schema.layer_to_json(layer) for layer in self.layers],
            "drafts": [draft._asdict() for draft in self.drafts],
        }

    @classmethod
    def from_dict(cls, data: Mapping) -> "CacheSpec":
        """The spec that `to_dict` wrote; fields that an older version lacks take their defaults.

        Raises:
          SpecError: for a newer version or an unknown key, by name.
        """
        schema.check_version("spec", data)
        known = {
            "block_size": 16,
            "pooling": "independent",
            "block_sizes": {},
            "layers": (),
            "drafts": (),
        }
        schema.refuse_unknown("spec", data, {"schema_version", *known})
        values = {key: data.get(key, default) for key, default in known.items()}
        values["layers"] = [
            schema.layer_from_json(number, layer)
            for number, layer in enumerate(schema.sequence("layers", values["layers"]))
        ]
        drafts = schema.objects("drafts", values["drafts"], Draft._fields)
        values["drafts"] = [Draft(**draft) for draft in drafts]
        if data["schema_version"] < 3 and values["pooling"] != "independent":
            # Only since then does a shared pool make blocks longer.
            alone = cls.from_layers(**{**values, "pooling": "independent"})
            values["block_sizes"] = {g.name: g.block_size for g in alone.groups if not g.is_state}
        return cls.from_layers(**values)

    def __reduce__(self):
        return CacheSpec.from_dict, (self.to_dict(),)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the dictionary: equal in every process for equal specs."""
        return hashlib.sha256(json.dumps(self.to_dict()).encode()).hexdigest()

    def __eq__(self, other):
        if self is other:
            return True
        return isinstance(other, CacheSpec) and self.digest == other.digest

    def __hash__(self):
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return int(self.digest[:15], 16)


def _drafts(drafts, num_layers: int) -> tuple[Draft, ...]:
    checked = tuple(
        Draft(positive(f"drafts[{module}].layers", draft.layers), draft.packed)
        for module, draft in enumerate(drafts)
    )
    for module, draft in enumerate(checked):
        if not isinstance(draft.packed, bool):
            raise SpecError(f"drafts[{module}].packed: wanted a bool, got {draft.packed!r}")
    total = sum(draft.layers for draft in checked)
    if total >= num_layers > 0:
        raise SpecError(f"drafts: {total} layers of drafts, but only {num_layers} layers in all")
    return checked


def _block_sizes(spec: CacheSpec, sizes) -> tuple[tuple[str, int], ...]:
    """The sizes that differ from the spec's, in the order of the groups; of a shared cache all.

    There a group that is not named gets the size that suits the others, so a spec names them all.
    """
    if not isinstance(sizes, Mapping):
        raise SpecError(f"block_sizes: wanted {{group name: tokens}}, got {sizes!r}")
    tokens = {name: token_count(f"block_sizes[{name!r}]", size) for name, size in sizes.items()}
    for name in tokens:
        if spec.group(name).is_state:
            raise SpecError(f"block_sizes: {name!r} has one state a row, not blocks of tokens")
    whole = {g.name: g.region.block_tokens(tokens.get(g.name, g.block_size)) for g in spec.groups}
    if spec.pooling == poolings.SHARED:
        groups = [dataclasses.replace(g, block_size=whole[g.name]) for g in spec.groups]
        whole = poolings.equal_sizes(tuple(groups), tokens)
        return tuple((g.name, whole[g.name]) for g in spec.groups if not g.is_state)
    return tuple((g.name, whole[g.name]) for g in spec.groups if whole[g.name] != g.block_size)


def _group_name(region, taken):
    name = {
        regions.ALL: "full",
        regions.STATE: "state",
        regions.WINDOW: f"window{region.span}",
        regions.CHUNK: f"chunk{region.span}",
    }[region.kind]
    if region.kind == regions.ALL and region.tokens_per_entry > 1:
        name = f"compressed{region.tokens_per_entry}"
    elif region.kind == regions.ALL and any(b.name == "latent" for b in region.buffers):
        name = "latent"
    candidates = [name, *(f"{name}_{number}" for number in range(2, len(taken) + 2))]
    return next(candidate for candidate in candidates if candidate not in taken)
