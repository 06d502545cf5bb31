"""The stored form of specs and plans: JSON values, with a version.

Raise `VERSION` when the form changes, keep reading the older ones, and keep a fixture of each.
Version 2 added `block_sizes` and `drafts` to specs, and the stored form of plans; version 3 the
slabs of plans.
"""

from collections.abc import Mapping

from kvpool.buffers import Buffer, count
from kvpool.regions import Region, SharedWith
from kvpool.status import SpecError

VERSION = 3  # since 1: scales, block sizes, drafts, plans; since 2: slabs, segments


def check_version(where: str, data) -> None:
    """SpecError unless this is an object with a `schema_version` that is read here."""
    if not isinstance(data, Mapping):
        raise SpecError(f"{where}: wanted an object, got {data!r}")
    version = data.get("schema_version")
    if isinstance(version, bool) or not isinstance(version, int) or not 1 <= version <= VERSION:
        raise SpecError(
            f"{where}: schema_version: got {version!r}, the newest known here is {VERSION}"
        )


def refuse_unknown(where: str, data: Mapping, known) -> None:
    """SpecError naming the keys of `data` that are not `known`."""
    unknown = sorted(str(key) for key in set(data) - set(known))
    if unknown:
        raise SpecError(f"{where}: unknown key {', '.join(unknown)}; known are {sorted(known)}")


def sequence(where: str, value) -> list | tuple:
    """`value` when it is a list; SpecError otherwise."""
    if not isinstance(value, (list, tuple)):
        raise SpecError(f"{where}: wanted a list, got {value!r}")
    return value


def counts(name: str, values) -> tuple[int, ...]:
    """A list of `count`s as a tuple."""
    return tuple(count(name, value) for value in sequence(name, values))


def exactly(where: str, data, keys) -> Mapping:
    """`data` when it is an object of exactly these keys; SpecError naming what is not so."""
    if not isinstance(data, Mapping):
        raise SpecError(f"{where}: wanted an object of {', '.join(keys)}, got {data!r}")
    refuse_unknown(where, data, keys)
    missing = [key for key in keys if key not in data]
    if missing:
        raise SpecError(f"{where}: no {', '.join(missing)} in {dict(data)!r}")
    return data


def layer_to_json(layer, segments: bool = True):
    """A layer as `CacheSpec` holds it, as JSON values, with the segments of its buffers or not."""
    if isinstance(layer, Region):
        retention = layer.retention
        return {
            "retention": retention if isinstance(retention, str) else list(retention),
            # A list, since the order of the buffers is their order in memory.
            "buffers": [
                {"name": b.name, "shape": list(b.shape), "dtype": b.dtype}
                | ({"segments": _segments_to_json(b)} if b.segments and segments else {})
                for b in layer.payload
            ],
            "tokens_per_entry": layer.tokens_per_entry,
            "scales": layer.scales,
            "compute_dtype": layer.compute_dtype,
        }
    if isinstance(layer, SharedWith):
        return {"shared_with": int(layer.layer), "tag": layer.tag}
    if isinstance(layer, dict):
        return {
            "tags": [{"tag": tag, "region": layer_to_json(r, segments)} for tag, r in layer.items()]
        }
    return None


def _segments_to_json(buffer: Buffer) -> list:
    return [list(part) if isinstance(part, tuple) else part for part in buffer.segments]


def layer_from_json(number: int, data):
    """The layer that `layer_to_json` wrote; SpecError naming what is not understood.

    A layer without a cache is null, or "none" where the format has no null (TOML).
    """
    if data is None or data == "none":
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
    items = sequence(f"{where}, buffers", data.get("buffers", ()))
    items = [{"segments": (), **item} if isinstance(item, Mapping) else item for item in items]
    for item in objects(f"{where}, buffers", items, {"name", "shape", "dtype", "segments"}):
        if not isinstance(item["name"], str):
            raise SpecError(f"{where}: wanted a buffer's name as text, got {item['name']!r}")
        if item["name"] in buffers:
            raise SpecError(f"{where}: two buffers of the name {item['name']!r}")
        buffers[item["name"]] = (item["shape"], item["dtype"], item["segments"])
    options = {key: data.get(key, default) for key, default in defaults.items()}
    return Region(data.get("retention", ""), buffers, **options)


def _tags_from_json(number: int, tags) -> dict:
    regions: dict = {}
    for item in objects(f"layer {number}, tags", tags, {"tag", "region"}):
        if not isinstance(item["tag"], str):
            raise SpecError(f"layer {number}: wanted a tag as text, got {item['tag']!r}")
        if item["tag"] in regions:
            raise SpecError(f"layer {number}: two regions of the tag {item['tag']!r}")
        regions[item["tag"]] = layer_from_json(number, item["region"])
    return regions


def objects(where: str, items, keys):
    """The objects of a list, each with exactly these keys; SpecError naming what is not so."""
    if not isinstance(items, (list, tuple)) or not all(isinstance(x, Mapping) for x in items):
        raise SpecError(f"{where}: wanted a list of objects, got {items!r}")
    for item in items:
        exactly(where, item, sorted(keys))
    return items
