"""Answers: what a sender says of its offer before the first parcel, and what is believed of it."""

from collections.abc import Mapping
from typing import Any

from kvpool.transfer import wire
from kvpool.transfer.plan import TransferPlan


def version_of(answer: Mapping[str, Any], plan: TransferPlan) -> int:
    """The version that the sender chose; ProtocolError for one that is not spoken here."""
    version, (oldest, newest) = answer.get("version"), plan.agreement.versions
    if type(version) is not int or not oldest <= version <= newest:
        raise wire.ProtocolError(f"wanted a version from {oldest} to {newest}, got {version!r:.80}")
    return version


def lacks_of(answer: Mapping[str, Any], plan: TransferPlan) -> dict[str, dict[int, int]]:
    """{group: {column: tokens}} of blocks that lack tokens at their start, as an answer has it.

    Raises:
      ProtocolError: for what is no such thing, or a block that lacks what its row reads.
    """
    found, lacks = {}, answer.get("lacks", {})
    try:
        for name, pairs in lacks.items():
            group = plan.spec.group(name)
            first = int(group.region.first_read(plan.num_tokens))
            found[name] = dict(pairs)
            for column, tokens in found[name].items():
                if type(column) is not int or type(tokens) is not int or column < 0 or tokens < 1:
                    raise ValueError("no column that lacks tokens")
                if not group.short_chunks or column * group.block_size + tokens > first:
                    raise ValueError("a block that lacks what is read")
    except (AttributeError, TypeError, ValueError) as error:  # a SpecError is a ValueError
        raise wire.ProtocolError(f"wanted what blocks lack, got {lacks!r:.80}") from error
    return found
