"""Rotary positions: unit complex numbers, one per frequency, and RoPE (arXiv 2104.09864).

A complex vector z = a + i b of F = D / 2 frequencies is kept real as [a | b], (..., D): the
half-split ("rotate-half") pairing of channel f with channel f + F.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tape_jax.positions.protocol import Encoding

if TYPE_CHECKING:
    from tape_jax.config import ModelConfig


def frequencies(width: int, base: float) -> np.ndarray:
    """w_f = base ** (-2 f / D) in radians per position, for the D / 2 pairs of a head; float64."""
    return base ** (-np.arange(0, width, 2, dtype=np.float64) / width)


def phases(positions: Int[Array, "B N"], freqs: np.ndarray) -> Float[Array, "B N D"]:
    """exp(i t w) as [cos | sin], in float32, exact in what attention sees at any position.

    t * w in float32 is off by 0.004 rad at position 131,071, in bfloat16 by whole turns. A turn is
    counted in units of 2**-32 instead: the product is then an exact integer and its overflow the
    reduction modulo 2 pi. That is a frequency at most 7.4e-10 rad per position off, and nothing
    else: two positions d apart differ by d times it wherever they stand.
    """
    turns = np.round(freqs / (2 * np.pi) % 1.0 * 2.0**32).astype(np.uint64).astype(np.uint32)
    wrapped = positions.astype(jnp.uint32)[..., None] * jnp.asarray(turns)
    angles = wrapped.astype(jnp.int32).astype(jnp.float32) * np.float32(2 * np.pi / 2.0**32)
    return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=-1)


def complex_multiply(z: Float[Array, "... D"], x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    """The complex product z * x of two half-split vectors, computed in their common dtype."""
    a, b = jnp.split(z, 2, axis=-1)
    real, imag = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * real - b * imag, a * imag + b * real], axis=-1)


def rotate_heads(x: Float[Array, "B N H D"], state: Float[Array, "B N K D"]):
    """z * x with query head h using the state of its group, h // G; returns x's dtype."""
    *lead, heads, width = x.shape
    state_heads = state.shape[-2]
    grouped = x.reshape(*lead, state_heads, heads // state_heads, width)
    return complex_multiply(state[..., None, :], grouped).reshape(x.shape).astype(x.dtype)


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (arXiv 2306.15595): positions are divided by `factor` >= 1."""

    factor: float = 1.0

    def __post_init__(self):
        """Raises ValueError for a factor below 1."""
        if not self.factor >= 1.0:
            raise ValueError(f"scaling.factor={self.factor} must be >= 1 (1 turns scaling off)")


@dataclasses.dataclass(frozen=True)
class Rotary(Encoding):
    """What every encoding that starts from rotations shares.

    Attributes:
      base: frequencies are base ** (-2 f / D); raising it is "theta scaling".
      scaling: how positions are stretched; the factor 1 leaves them alone.
      shift: where positions start when the caller gives none (official `config.shift`).
    """

    base: float = 10_000.0
    scaling: LinearScaling = LinearScaling()
    shift: int = 0

    def validate(self, config: ModelConfig) -> None:
        """Raises ValueError for an odd head width or a base that is no base."""
        if config.head_width % 2:
            raise ValueError(
                f"model.head_dim={config.head_width} must be even for position.name={self.name!r}:"
                " rotations act on pairs of channels"
            )
        if not self.base > 1.0:
            raise ValueError(f"position.base={self.base} must be > 1")

    def default_positions(self, length: int) -> Int[Array, "1 N"]:
        """shift .. shift + N - 1."""
        return super().default_positions(length) + self.shift

    def start(self, positions: Int[Array, "B N"], width: int) -> Float[Array, "B N D"]:
        """z = exp(i t w) for heads of this width, after scaling."""
        return phases(positions, frequencies(width, self.base) / self.scaling.factor)


@dataclasses.dataclass(frozen=True)
class RoPE(Rotary):
    """Rotary position embedding: the state is exp(i t w), and no block changes it."""

    name: str = "rope"

    def initial_state(self, positions, config):
        """exp(i t w), (B, N, 1, D): one for all heads."""
        return self.start(positions, config.head_width)[:, :, None]

    def rotate(self, q, k, state, positions, config):
        """z * q and z * k."""
        return rotate_heads(q, state), rotate_heads(k, state)
