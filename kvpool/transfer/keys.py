"""Keys: the name of every piece that is sent, the same on both sides."""

import urllib.parse
from typing import NamedTuple

from kvpool.status import SpecError


class Key(NamedTuple):
    """One piece of one block of one layer of a request.

    The text form has the five fields between slashes. A number is its digits, a text begins with
    "=" and is percent-encoded, a missing tag is "-": no two keys have the same text.
    """

    request: int | str
    layer: int
    tag: str | None
    block: int  # column of the block table; of a recurrent state the tokens that it is the state of
    piece: int  # the pair of ranks: sender * number of receivers + receiver

    def __str__(self) -> str:
        return "/".join(map(_text, self))

    @classmethod
    def parse(cls, text: str) -> "Key":
        """The key whose text this is.

        Raises:
          SpecError: for text that no key has, naming the part that is wrong.
        """
        parts = text.split("/") if isinstance(text, str) else []
        if len(parts) != len(cls._fields):
            raise SpecError(f"key: wanted {'/'.join(cls._fields)}, got {text!r}")
        values = dict(zip(cls._fields, map(_value, parts), strict=True))
        wanted: dict[str, tuple] = {"request": (int, str), "tag": (str, type(None))}
        for name, value in values.items():
            if not isinstance(value, wanted.get(name, (int,))):
                raise SpecError(f"key: wanted another {name}, got {text!r}")
        key = cls(**values)
        if str(key) != text:
            raise SpecError(f"key: wanted {str(key)!r}, got {text!r}")
        return key


def _text(value: int | str | None) -> str:
    if value is None:
        return "-"
    return "=" + urllib.parse.quote(value, safe="") if isinstance(value, str) else str(int(value))


def _value(part: str):
    if part == "-":
        return None
    if part.startswith("="):
        return urllib.parse.unquote(part[1:])
    if part.isascii() and part.isdigit() and len(part) < 20:
        return int(part)
    raise SpecError(f"key: wanted a number, =text or -, got {part!r}")
