"""The stored form of a spec: JSON values, with a version.

Raise `VERSION` when the form changes, keep reading the older ones, and keep a fixture of each.
"""

from collections.abc import Mapping

from kvpool.regions import Region, SharedWith
from kvpool.status import SpecError

VERSION = 2  # 2: scales and compute_dtype of a region


def check_version(data: Mapping) -> None:
    """SpecError unless this version of kvpool reads the dictionary's `schema_version`."""
    version = data.get("schema_version")
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= VERSION:
        raise SpecError(f"schema_version: got {version!r}, the newest known here is {VERSION}")


def refuse_unknown(where: str, data: Mapping, known) -> None:
    """SpecError naming the keys of `data` that are not `known`."""
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise SpecError(f"{where}: unknown key {', '.join(unknown)}; known are {sorted(known)}")


def layer_to_json(layer):
    """A layer as `CacheSpec` holds it, as JSON values."""
    if isinstance(layer, Region):
        retention = layer.retention
        return {
            "retention": retention if isinstance(retention, str) else list(retention),
            # A list, since the order of the buffers is their order in memory.
            "buffers": [
                {"name": b.name, "shape": list(b.shape), "dtype": b.dtype} for b in layer.payload
            ],
            "tokens_per_entry": layer.tokens_per_entry,
            "scales": layer.scales,
            "compute_dtype": layer.compute_dtype,
        }
    if isinstance(layer, SharedWith):
        return {"shared_with": int(layer.layer), "tag": layer.tag}
    if isinstance(layer, dict):
        return {"tags": [{"tag": tag, "region": layer_to_json(r)} for tag, r in layer.items()]}
    return None


def layer_from_json(number: int, data):
    """The layer that `layer_to_json` wrote; SpecError naming what is not understood."""
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise SpecError(f"layer {number}: wanted an object or null, got {data!r}")
    where = f"layer {number}"
    if "shared_with" in data:
        refuse_unknown(where, data, {"shared_with", "tag"})
        return SharedWith(data["shared_with"], data.get("tag"))
    if "tags" in data:
        refuse_unknown(where, data, {"tags"})
        return _tags_from_json(number, data["tags"])
    defaults = {"tokens_per_entry": 1, "scales": None, "compute_dtype": None}
    refuse_unknown(where, data, {"retention", "buffers", *defaults})
    buffers: dict[str, tuple] = {}
    for item in _items(f"{where}, buffers", data.get("buffers", ()), {"name", "shape", "dtype"}):
        if item["name"] in buffers:
            raise SpecError(f"{where}: two buffers of the name {item['name']!r}")
        buffers[item["name"]] = (item["shape"], item["dtype"])
    options = {key: data.get(key, default) for key, default in defaults.items()}
    return Region(data.get("retention", ""), buffers, **options)


def _tags_from_json(number: int, tags) -> dict:
    regions: dict = {}
    for item in _items(f"layer {number}, tags", tags, {"tag", "region"}):
        if item["tag"] in regions:
            raise SpecError(f"layer {number}: two regions of the tag {item['tag']!r}")
        regions[item["tag"]] = layer_from_json(number, item["region"])
    return regions


def _items(where: str, items, keys: set[str]):
    """The objects of a list, each with exactly these keys; SpecError naming what is not so."""
    if not isinstance(items, (list, tuple)) or not all(isinstance(x, Mapping) for x in items):
        raise SpecError(f"{where}: wanted a list of objects, got {items!r}")
    for item in items:
        refuse_unknown(where, item, keys)
        if keys - set(item):
            raise SpecError(f"{where}: no {', '.join(sorted(keys - set(item)))} in {dict(item)!r}")
    return items
