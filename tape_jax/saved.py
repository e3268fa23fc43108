"""Configs as plain JSON values, and back."""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tape_jax import positions
from tape_jax.errors import unknown

Kinds = Mapping[type, Mapping[str, type]]

KINDS: Kinds = {
    positions.Encoding: positions.ENCODINGS,
    positions.Scaling: positions.SCALINGS,
    positions.Start: positions.STARTS,
}
"""Base class -> its kinds, by the `name` field of their instances."""


def to_dict(config: Any) -> dict[str, Any]:
    """Plain JSON values of a (nested) config dataclass; `from_dict` gives it back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def read_object(file: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
      ValueError: it holds something else; the message gives the file.
    """
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{file} is no JSON object: it holds a {type(found).__name__}")
    return found


def from_dict(cls: type, values: Mapping[str, Any], kinds: Kinds = KINDS) -> Any:
    """Rebuilds a (nested) config dataclass from what `to_dict` gave.

    Raises:
      ValueError: unknown fields or names, with the nearest known ones.
    """
    if cls in kinds:
        if values["name"] not in kinds[cls]:
            raise ValueError(unknown(cls.__name__, values["name"], kinds[cls]))
        cls = kinds[cls][values["name"]]
    hints = typing.get_type_hints(cls)
    for field in values:
        if field not in cls.__dataclass_fields__:
            raise ValueError(unknown(f"field of {cls.__name__}", field, cls.__dataclass_fields__))
    return cls(**{field: _restore(hints[field], x, kinds) for field, x in values.items()})


def _restore(hint, value, kinds):
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, Mapping):
        return from_dict(next(o for o in options if dataclasses.is_dataclass(o)), value, kinds)
    if isinstance(value, list) and any(typing.get_origin(o) is tuple for o in options):
        return tuple(value)
    return value
