"""Keys: the name of every piece that is sent, the same on both sides."""

import urllib.parse
from typing import NamedTuple

import numpy as np

from kvpool.status import SpecError

_MOST_TEXT = 1025  # bytes of a request in a key, where it begins with "="


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


def checked_request(request) -> int | str:
    """A request's name as an int or a str.

    Raises:
      SpecError: for what is neither, an int below 0 or of 2^128 or more (a UUID's fit), or a text
        that UTF-8 has not or that is longer than 1024 bytes percent-encoded.
    """
    if isinstance(request, (int, np.integer)) and not isinstance(request, (bool, np.bool_)):
        if 0 <= request < 1 << 128:
            return int(request)
    elif isinstance(request, str):
        try:
            if len(_text(request)) <= _MOST_TEXT:
                return request
        except UnicodeEncodeError:
            pass
    raise SpecError(
        f"request: wanted an integer from 0 to 2^128 - 1 or a text of at most {_MOST_TEXT - 1} "
        f"bytes, got {request!r:.80}"
    )


def _text(value: int | str | None) -> str:
    if value is None:
        return "-"
    return "=" + urllib.parse.quote(value, safe="") if isinstance(value, str) else str(int(value))


def _value(part: str):
    if part == "-":
        return None
    if part.startswith("="):
        return urllib.parse.unquote(part[1:])
    if part.isascii() and part.isdigit() and len(part) < 40:  # what 2^128 has at most
        return int(part)
    raise SpecError(f"key: wanted a number, =text or -, got {part!r}")
