"""Owners: what a layer may be, and which layer's region each of its tags stands for."""

from collections.abc import Mapping

import numpy as np

from kvpool.regions import Region, SharedWith
from kvpool.status import SpecError


def layer_of(number: int, layer):
    """What was given for a layer, checked; SpecError naming the layer."""
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


def owners_of(layers: tuple) -> tuple[dict[str | None, tuple[int, str | None]], ...]:
    """For each layer {tag: (layer, tag) that owns the region}; SpecError for a share of nothing."""
    owners: list[dict] = []
    for number, layer in enumerate(layers):
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
