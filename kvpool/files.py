"""Files: specs and plans stored as JSON or TOML, in the form that `to_dict` gives."""

import json
import os
import tomllib
from pathlib import Path

from kvpool.plan import Plan
from kvpool.spec import CacheSpec
from kvpool.status import SpecError


def load_spec(path: str | os.PathLike) -> CacheSpec:
    """The spec stored in a .json or .toml file.

    TOML has no null: a layer without a cache is "none" there, and an absent tag is left out.

    Raises:
      SpecError: naming the file, for another suffix, text that does not parse, or what `from_dict`
        does not understand.
      OSError: when the file cannot be read.
    """
    return _load(path, CacheSpec.from_dict)


def load_plan(path: str | os.PathLike) -> Plan:
    """The plan stored in a .json or .toml file; raises as `load_spec`."""
    return _load(path, Plan.from_dict)


def read_object(path: str | os.PathLike) -> dict:
    """What a .json or .toml file holds; raises as `load_spec`."""
    path = Path(path)
    parse = {".json": json.loads, ".toml": tomllib.loads}.get(path.suffix.lower())
    if parse is None:
        raise SpecError(f"{path}: wanted a file named .json or .toml")
    try:
        data = parse(path.read_text(encoding="utf-8"))
    except ValueError as error:  # both parsers' errors, and text that is no UTF-8
        raise SpecError(f"{path}: not {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(data, dict):
        raise SpecError(f"{path}: wanted an object, got {type(data).__name__}")
    return data


def _load(path, from_dict):
    data = read_object(path)
    try:
        return from_dict(data)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from error
