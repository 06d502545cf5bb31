"""Text: numbers as people write them, and tables."""

import re
from collections.abc import Sequence
from fractions import Fraction

from kvpool.status import SpecError

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


def parse_bytes(name: str, text: str) -> int:
    """ "64GiB", "1.5 GB", "4096" in bytes; SpecError naming the argument and what was given."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B?", text.strip(), re.IGNORECASE)
    if match is None:
        raise SpecError(f"{name}: wanted bytes like 64GiB, 500MB or 4096, got {text!r}")
    unit = (match[2] or "").capitalize()
    size = int(Fraction(match[1]) * {**_UNITS, **_BINARY}[unit])
    if size < 1:
        raise SpecError(f"{name}: wanted at least 1 byte, got {text!r}")
    return size


def parse_tokens(name: str, text: str) -> int:
    """ "32k" (32,768), "1M" (1,048,576), "500" in tokens; SpecError as `parse_bytes`."""
    match = re.fullmatch(r"([0-9]+)([km]?)", text.strip(), re.IGNORECASE)
    tokens = int(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()] if match else 0
    if not 1 <= tokens <= 1 << 30:
        raise SpecError(f"{name}: wanted tokens like 8192 or 8k, 1 to 1024M, got {text!r}")
    return tokens


def parse_ratio(text, names: Sequence[str]) -> list[Fraction]:
    """ "4:1" as weights above 0, one for each of the groups `names`.

    Raises:
      SpecError: naming the groups, and the token that is no number above 0 or the counts got and
        wanted.
    """
    groups = f"one for each of the {len(names)} groups {', '.join(names)}"
    wanted = f"wanted numbers above 0 like {':'.join('41' * len(names))[: 2 * len(names) - 1]!r}"
    if not isinstance(text, str):
        raise SpecError(f"ratio: {wanted}, {groups}, got {text!r}")
    weights = []
    for token in map(str.strip, text.split(":")):
        is_number = re.fullmatch(r"[0-9]{1,18}(\.[0-9]{1,18})?", token)
        if not is_number or not Fraction(token):
            raise SpecError(f"ratio {text!r}: {wanted}, {groups}, got {token!r}")
        weights.append(Fraction(token))
    if len(weights) != len(names):
        got = f"got {len(weights)} ({', '.join(text.split(':'))})"
        raise SpecError(f"ratio {text!r}: wanted {len(names)} numbers, {groups}; {got}")
    return weights


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as aligned lines, the first column to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if i else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def tokens_text(tokens: int) -> str:
    """8192 as "8k", 1000 as "1,000"."""
    return f"{tokens >> 10:,}k" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:,}"
