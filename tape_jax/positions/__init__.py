"""Positional encodings by name. Adding one: a file here, a line in `ENCODINGS`, a test."""

from tape_jax.errors import unknown
from tape_jax.positions.protocol import Encoding, NoPE
from tape_jax.positions.rotary import LinearScaling, RoPE, frequencies
from tape_jax.positions.tape import Tape

ENCODINGS: dict[str, type[Encoding]] = {"nope": NoPE, "rope": RoPE, "tape": Tape}


def names() -> list[str]:
    """The registered names."""
    return sorted(ENCODINGS)


def get(name: str, **fields) -> Encoding:
    """The encoding registered as `name`, with its hyper-parameters set.

    Raises:
      ValueError: an unknown name or field; the message gives the nearest known ones.
    """
    if name not in ENCODINGS:
        raise ValueError(unknown("positional encoding", name, ENCODINGS))
    cls = ENCODINGS[name]
    for field in fields:
        if field not in cls.__dataclass_fields__:
            raise ValueError(
                unknown(f"field of position {name!r}", field, cls.__dataclass_fields__)
            )
    return cls(**fields)


__all__ = [
    "ENCODINGS",
    "Encoding",
    "LinearScaling",
    "NoPE",
    "RoPE",
    "Tape",
    "frequencies",
    "get",
    "names",
]
