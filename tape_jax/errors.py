"""Error messages that name the nearest thing the user may have meant."""

import difflib
import typing
from collections.abc import Iterable
from typing import Any


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """One line: what is unknown, the nearest known names (all of them when none is near)."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
    return f"unknown {kind} {name!r}; {hint}"


def check_choices(instance: Any, owner: str) -> None:
    """Raises ValueError when a dataclass field annotated `Literal[...]` holds something else."""
    for field, hint in typing.get_type_hints(type(instance)).items():
        value = getattr(instance, field, None)
        if typing.get_origin(hint) is typing.Literal and value not in typing.get_args(hint):
            raise ValueError(unknown(f"{owner}.{field}", str(value), typing.get_args(hint)))
