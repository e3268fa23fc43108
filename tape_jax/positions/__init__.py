"""Positional encodings by name. Adding one: a file here, a line in `ENCODINGS`, a test."""

import dataclasses

from tape_jax.errors import unknown
from tape_jax.positions.absolute import Sinusoidal
from tape_jax.positions.additive import T5, ALiBi, Fire, Kerple
from tape_jax.positions.contextual import CoPE, Dape
from tape_jax.positions.pope import PoPE
from tape_jax.positions.protocol import Encoding, NoPE
from tape_jax.positions.randomized import Randomized
from tape_jax.positions.rotary import RoPE, XPos, frequencies
from tape_jax.positions.scaling import (
    SCALINGS,
    DynamicNTKScaling,
    DynamicYarnScaling,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    Scaling,
    YarnScaling,
)
from tape_jax.positions.starts import STARTS, Fourier, Learned, Start
from tape_jax.positions.tapa import TAPA
from tape_jax.positions.tape import Tape

ENCODINGS: dict[str, type[Encoding]] = {
    "nope": NoPE,
    "sinusoidal": Sinusoidal,
    "rope": RoPE,
    "xpos": XPos,
    "randomized": Randomized,
    "alibi": ALiBi,
    "t5": T5,
    "kerple": Kerple,
    "fire": Fire,
    "cope": CoPE,
    "dape": Dape,
    "tapa": TAPA,
    "pope": PoPE,
    "tape": Tape,
}
"""Every encoding by its `name`."""

VARIANTS: dict[str, Encoding] = {
    "dape-alibi": Dape(inner=ALiBi()),
    "dape-kerple": Dape(inner=Kerple()),
    "tapa-linear": TAPA(phase="linear"),
    "tape-unit": Tape(unit=True),
    "tape-official": Tape(post="scalar", zero="w1"),
    "tape-attention": Tape(contextualize="attention"),
    "tape-mlp": Tape(contextualize="mlp"),
    "tape-separate": Tape(mixing="separate"),
    "tape-vectorial": Tape(mixing="channels"),
    "tape-nonequivariant": Tape(mixing="all"),
    "tape-fourier": Tape(start=Fourier()),
    "tape-learned": Tape(start=Learned()),
}
"""Settings of them that comparisons ask for by a name of their own."""


def names() -> list[str]:
    """The registered names; `VARIANTS` has more."""
    return sorted(ENCODINGS)


def get(name: str, **fields) -> Encoding:
    """The encoding (or variant) of this name, with its hyper-parameters set.

    Raises:
      ValueError: an unknown name or field; the message gives the nearest known ones.
    """
    if name not in ENCODINGS and name not in VARIANTS:
        raise ValueError(unknown("positional encoding", name, [*ENCODINGS, *VARIANTS]))
    encoding = VARIANTS[name] if name in VARIANTS else ENCODINGS[name](name=name)
    known = type(encoding).__dataclass_fields__
    for field in fields:
        if field not in known:
            raise ValueError(unknown(f"field of position {name!r}", field, known))
    return dataclasses.replace(encoding, **fields)


__all__ = [
    "ENCODINGS",
    "SCALINGS",
    "STARTS",
    "T5",
    "TAPA",
    "VARIANTS",
    "ALiBi",
    "CoPE",
    "Dape",
    "DynamicNTKScaling",
    "DynamicYarnScaling",
    "Encoding",
    "Fire",
    "Fourier",
    "Kerple",
    "Learned",
    "LinearScaling",
    "Llama3Scaling",
    "NTKScaling",
    "NoPE",
    "PoPE",
    "Randomized",
    "RoPE",
    "Scaling",
    "Sinusoidal",
    "Start",
    "Tape",
    "XPos",
    "YarnScaling",
    "frequencies",
    "get",
    "names",
]
