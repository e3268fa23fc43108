"""Where TAPE's state starts: rotations, random Fourier features, or a learned table."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tape_jax.positions.protocol import Parameter
from tape_jax.positions.rotary import Rotary, phases

if TYPE_CHECKING:
    from tape_jax.positions.tape import Tape


@dataclasses.dataclass(frozen=True)
class Start:
    """Rotations by the encoding's base and scaling: a new model is RoPE. The base of all starts."""

    name: str = dataclasses.field(default="rotary", kw_only=True)

    def validate(self, encoding: Tape) -> None:
        """Raises ValueError, naming field, value and fix."""

    def __call__(
        self, encoding: Tape, positions: Int[Array, "B N"], width: int
    ) -> Float[Array, "B N D"]:
        """The first state of one head as width / 2 complex numbers [a | b], float32."""
        return encoding.start_rotations(positions, width)

    def check_length(self, length: int) -> None:
        """Raises ValueError for a sequence that this start does not reach."""


def _refuse_rotary_fields(start: Start, encoding: Tape) -> None:
    plain = Rotary(name=encoding.name)
    for field in ("base", "scaling"):
        if getattr(encoding, field) != getattr(plain, field):
            raise ValueError(
                f"position.{field}={getattr(encoding, field)} shapes the start 'rotary', not"
                f" position.start.name={start.name!r}: leave one of them out"
            )


@dataclasses.dataclass(frozen=True)
class Fourier(Start):
    """Random Fourier features: exp(i t w) with w drawn from a normal distribution, then fixed.

    The inner products of a new state estimate a Gaussian kernel exp(-d^2 / 2 l^2) of the distance
    (Rahimi and Recht, 2007). A shift is a rotation per frequency, as with any fixed frequencies.

    Attributes:
      length_scale: l, in positions.
      seed: of the draw.
    """

    name: str = dataclasses.field(default="fourier", kw_only=True)
    length_scale: float = 16.0
    seed: int = 0

    def validate(self, encoding):
        """Raises ValueError for a length that is not positive, or fields it does not read."""
        if not self.length_scale > 0:
            raise ValueError(f"position.start.length_scale={self.length_scale} must be > 0")
        _refuse_rotary_fields(self, encoding)

    def __call__(self, encoding, positions, width):
        """exp(i t w)."""
        draw = np.random.default_rng(self.seed).normal(size=width // 2)
        return phases(positions, draw / self.length_scale)


@dataclasses.dataclass(frozen=True)
class Learned(Start):
    """A learned state for every position, shared by all heads; it starts as the rotary one.

    Absolute: a shift is no rotation any more once the table has moved, so logits are not relative.
    A position outside the table gives NaN.

    Attributes:
      max_position: rows of the table.
    """

    name: str = dataclasses.field(default="learned", kw_only=True)
    max_position: int = 2048

    def validate(self, encoding):
        """Raises ValueError for a table without rows."""
        if self.max_position < 1:
            raise ValueError(f"position.start.max_position={self.max_position} must be >= 1")

    def __call__(self, encoding, positions, width):
        """The table's rows."""

        def rotary(key, shape):
            return encoding.start_rotations(jnp.arange(shape[0])[None], shape[1])[0]

        table = Parameter("table", rotary, (self.max_position, width), name="position")()
        inside = jnp.where(positions < 0, self.max_position, positions)  # negative ones wrap around
        return jnp.take(table, inside, axis=0, mode="fill")

    def check_length(self, length):
        """Raises ValueError for a sequence longer than the table."""
        if length > self.max_position:
            raise ValueError(
                f"a sequence of {length} needs position.start.max_position >= {length}, not"
                f" {self.max_position}"
            )


STARTS: dict[str, type[Start]] = {"rotary": Start, "fourier": Fourier, "learned": Learned}
"""Starts of TAPE's state by name."""
