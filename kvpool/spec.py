"""CacheSpec: which region each layer keeps, and the groups of layers that share a block table."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np

from kvpool import regions, schema
from kvpool.regions import Region, SharedWith, token_count
from kvpool.status import SpecError

POOLINGS = ("independent",)


@dataclasses.dataclass(frozen=True)
class Group:
    """The layers that share a region and therefore one block table.

    A block holds `block_size` tokens of every layer of the group as one contiguous run of bytes:
    layers in order, each layer's buffers in order, each buffer [entries_per_block, *entry shape],
    or [*entry shape] where it is per block, and padded to a multiple of 16 bytes.
    """

    name: str
    region: Region
    layers: tuple[int, ...]
    block_size: int  # tokens

    @property
    def entries_per_block(self) -> int:
        """Entries of each buffer in a block; the one state of a state group."""
        return 1 if self.is_state else self.block_size // self.region.tokens_per_entry

    @property
    def is_state(self) -> bool:
        """Whether a row has one block, the recurrent state, instead of blocks of tokens."""
        return self.region.kind == regions.STATE

    @functools.cached_property
    def buffer_offsets(self) -> tuple[int, ...]:
        """Bytes from a layer's start to each of its buffers, and at the end the layer's bytes."""
        offsets = [0]
        for buffer in self.region.buffers:
            size = buffer.bytes_in_block(self.entries_per_block)
            offsets.append(offsets[-1] + -(-size // regions.ALIGNMENT) * regions.ALIGNMENT)
        return tuple(offsets)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of a block with all its layers."""
        return len(self.layers) * self.buffer_offsets[-1]

    def dead_columns(self, n):
        """Table columns that a row of n settled tokens has given back, or never needed."""
        return regions.quotient(self.region.first_read(n), self.block_size)

    def columns(self, seq_len: int) -> int:
        """Columns of the block table for rows of up to seq_len tokens."""
        return 1 if self.is_state else -(-seq_len // self.block_size)


@dataclasses.dataclass(frozen=True, eq=False)
class CacheSpec:
    """What every layer of a model keeps of the past.  Build with `from_layers`.

    Two specs are equal when their dictionaries are; hash and comparison use a digest made once,
    since jax compares static fields at every dispatch.
    """

    layers: tuple
    block_size: int
    pooling: str

    @classmethod
    def from_layers(cls, layers: Sequence, block_size: int = 16, pooling: str = "independent"):
        """Builds a spec.

        Args:
          layers: one item a layer: a Region, {tag: Region | SharedWith}, a SharedWith (the earlier
            layer's cache, whole or one tag of it) or None (no cache).
          block_size: tokens of a block; a group rounds it up to a multiple of its region's
            tokens per entry.
          pooling: "independent": every group has a pool of its own.

        Raises:
          SpecError: naming the layer, what was given and what is wanted.
        """
        if isinstance(layers, (str, Mapping)) or not isinstance(layers, Sequence):
            raise SpecError(f"layers: wanted a sequence of layers, got {type(layers).__name__}")
        if pooling not in POOLINGS:
            raise SpecError(f"pooling: wanted one of {', '.join(POOLINGS)}, got {pooling!r}")
        layers = tuple(_layer(number, layer) for number, layer in enumerate(layers))
        spec = cls(layers, token_count("block_size", block_size), pooling)
        if not spec.groups:
            raise SpecError(f"layers: wanted a layer with a cache, got none in {len(layers)}")
        return spec

    @functools.cached_property
    def _regions(self) -> tuple[dict[str | None, tuple[int, str | None]], ...]:
        """For each layer {tag: (layer, tag) that owns the region}."""
        owners: list[dict] = []
        for number, layer in enumerate(self.layers):
            if isinstance(layer, SharedWith):
                owners.append(_shared_layer(owners, number, layer))
                continue
            pairs = layer.items() if isinstance(layer, dict) else [(None, layer)]
            owners.append(
                {
                    tag: _shared_tag(owners, number, tag, region)
                    if isinstance(region, SharedWith)
                    else (number, tag)
                    for tag, region in pairs
                    if region is not None
                }
            )
        return tuple(owners)

    @functools.cached_property
    def _table(self) -> tuple[tuple[Group, ...], dict[tuple, tuple[str, int]]]:
        """The groups, and {(layer, tag): (group name, index in group)} of all pairs that exist."""
        members: dict[Region, list] = {}
        for number, owned in enumerate(self._regions):
            for tag, owner in owned.items():
                if owner == (number, tag):
                    layer = self.layers[number]
                    region = layer[tag] if isinstance(layer, dict) else layer
                    members.setdefault(region, []).append(owner)
        groups: list[Group] = []
        table: dict[tuple, tuple[str, int]] = {}
        for region, owners in members.items():
            name = _group_name(region, [group.name for group in groups])
            size = region.block_tokens(self.block_size)
            groups.append(Group(name, region, tuple(layer for layer, _ in owners), size))
            table.update({owner: (name, index) for index, owner in enumerate(owners)})
        for number, owned in enumerate(self._regions):
            table.update({(number, tag): table[owner] for tag, owner in owned.items()})
        return tuple(groups), table

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
            "layers": [schema.layer_to_json(layer) for layer in self.layers],
        }

    @classmethod
    def from_dict(cls, data: Mapping) -> "CacheSpec":
        """The spec that `to_dict` wrote; fields that an older version lacks take their defaults.

        Raises:
          SpecError: for a newer version or an unknown key, by name.
        """
        schema.check_version(data)
        known = {"block_size": 16, "pooling": "independent", "layers": ()}
        schema.refuse_unknown("spec", data, {"schema_version", *known})
        values = {key: data.get(key, default) for key, default in known.items()}
        if not isinstance(values["layers"], (list, tuple)):
            raise SpecError(f"layers: wanted a list, got {values['layers']!r}")
        values["layers"] = [
            schema.layer_from_json(number, layer) for number, layer in enumerate(values["layers"])
        ]
        return cls.from_layers(**values)

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


def _layer(number, layer):
    if layer is None or isinstance(layer, (Region, SharedWith)):
        return layer
    wanted = "wanted Region, {tag: Region | SharedWith}, SharedWith or None"
    if not isinstance(layer, Mapping):
        raise SpecError(f"layer {number}: {wanted}, got {layer!r}")
    for tag, region in layer.items():
        if not isinstance(tag, str) or not tag:
            raise SpecError(f"layer {number}: wanted non-empty strings as tags, got {tag!r}")
        if not isinstance(region, (Region, SharedWith)):
            raise SpecError(f"layer {number}, tag {tag!r}: {wanted}, got {region!r}")
    return dict(layer)


def _earlier(owners, number, shared):
    """{tag: owner} of the layer that layer `number` shares."""
    source = shared.layer
    is_number = isinstance(source, (int, np.integer)) and not isinstance(source, bool)
    if not is_number or not 0 <= source < number:
        raise SpecError(
            f"layer {number}: SharedWith wants an earlier layer, 0 to {number - 1}, got {source!r}"
            if number
            else f"layer 0: there is no earlier layer to share, got {source!r}"
        )
    if not owners[source]:
        raise SpecError(f"layer {number}: SharedWith layer {source}, which has no cache")
    return owners[source]


def _shared_layer(owners, number, shared):
    tags = _earlier(owners, number, shared)
    if shared.tag is None:
        return dict(tags)
    return {shared.tag: _pick(tags, number, shared, shared.tag)}


def _shared_tag(owners, number, tag, shared):
    tags = _earlier(owners, number, shared)
    if shared.tag is None and len(tags) == 1:
        return next(iter(tags.values()))
    return _pick(tags, number, shared, tag if shared.tag is None else shared.tag)


def _pick(tags, number, shared, tag):
    if tag not in tags:
        raise SpecError(
            f"layer {number}: layer {shared.layer} has no tag {tag!r}; it has "
            + ", ".join(map(repr, tags))
        )
    return tags[tag]


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
