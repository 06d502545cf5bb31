"""Agreement: what both sides of a transfer must have alike, said before a byte moves."""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping

from kvpool.group import Group
from kvpool.spec import CacheSpec
from kvpool.status import SpecError
from kvpool.transfer.shards import Shards, rank_groups

VERSIONS = (1, 1)  # the oldest and the newest form of plans and messages that are spoken here


class Disagreement(SpecError):
    """Two sides that cannot transfer; the message names what differs, and both values."""


@dataclasses.dataclass(frozen=True)
class Agreement:
    """A range of versions, and {what: value} of all that decides which bytes mean what."""

    versions: tuple[int, int]
    facts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """SHA-256 of the facts."""
        return hashlib.sha256(json.dumps(sorted(self.facts.items())).encode()).hexdigest()

    def to_dict(self) -> dict:
        """As JSON values."""
        return {"versions": list(self.versions), "facts": dict(self.facts)}

    @classmethod
    def from_dict(cls, data) -> "Agreement":
        """What `to_dict` wrote; SpecError for anything else."""
        known = data if isinstance(data, Mapping) else {}
        versions, facts = known.get("versions", ()), known.get("facts")
        is_range = isinstance(versions, (list, tuple)) and len(versions) == 2
        if not is_range or not all(type(version) is int for version in versions):
            raise SpecError(f"agreement: wanted two versions, got {versions!r}")
        if not isinstance(facts, Mapping) or not all(
            isinstance(item, str) for pair in facts.items() for item in pair
        ):
            raise SpecError(f"agreement: wanted facts {{text: text}}, got {facts!r}")
        return cls((versions[0], versions[1]), dict(facts))

    def settle(self, other: "Agreement") -> int:
        """The newest version that both speak.

        Raises:
          Disagreement: naming everything that differs: this side's value, then the other's.
        """
        version = min(self.versions[1], other.versions[1])
        differ = []
        if version < max(self.versions[0], other.versions[0]):
            spoken = [f"{low} to {high}" for low, high in (self.versions, other.versions)]
            differ.append(f"versions: {spoken[0]} here, {spoken[1]} there")
        for what in sorted({*self.facts, *other.facts}):
            here, there = (side.facts.get(what, "nothing") for side in (self, other))
            if here != there:
                differ.append(f"{what}: {here} here, {there} there")
        if differ:
            raise Disagreement("no transfer: " + "; ".join(differ))
        return version


def agreement(spec: CacheSpec, sender: Shards, receiver: Shards) -> Agreement:
    """What one side states.

    How a cache pools its memory, and the form in which a release writes specs, may differ. What
    blocks the groups have is said of each, however the spec came to it.
    """
    apart = ("pooling", "schema_version", "block_size", "block_sizes")
    stated = {key: value for key, value in spec.to_dict().items() if key not in apart}
    facts = {
        "spec": hashlib.sha256(json.dumps(stated).encode()).hexdigest()[:16],
        "sender's shards": str(sender),
        "receiver's shards": str(receiver),
        "byte order": sys.byteorder,
    }
    sides = zip(
        spec.groups, rank_groups(spec, sender.heads), rank_groups(spec, receiver.heads),
        strict=True,
    )  # fmt: skip
    for group, source, target in sides:
        facts[f"group {group.name}"] = _stated(group)
        facts[f"tail of {group.name}"] = _tail(group)
        facts[f"offsets of {group.name}"] = f"{source.buffer_offsets}, {target.buffer_offsets}"
    return Agreement(VERSIONS, facts)


def _stated(group: Group) -> str:
    region = group.region
    kept = f"{region.kind} {region.span}" if region.span else region.kind
    buffers = ", ".join(
        f"{b.name} {list(b.shape)} {b.dtype}"
        + (f" of {'+'.join(map(str, b.segments))}" if b.segments else "")
        + (" a block" if b.per_block else "")
        for b in region.buffers
    )
    layers = ",".join(map(str, group.layers))
    return f"{kept}; {buffers}; {group.block_size} tokens a block; layers {layers}"


def _tail(group: Group) -> str:
    """The first live columns at lengths where a rule that is off by one would give others."""
    size, span = group.block_size, group.region.span
    lengths = sorted({max(0, n) for end in (size, span, span + size) for n in range(end, end + 3)})
    return ",".join(f"{n}:{int(group.dead_columns(n))}" for n in lengths)
