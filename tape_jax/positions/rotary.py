"""Rotary positions: unit complex numbers, one per frequency; RoPE (arXiv 2104.09864) and xPos.

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
from tape_jax.positions.scaling import Scaling

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
class Rotary(Encoding):
    """What every encoding that starts from rotations shares.

    Attributes:
      base: frequencies are base ** (-2 f / D); raising it is "theta scaling".
      scaling: how frequencies are stretched to longer contexts, a `Scaling`.
      shift: where positions start when the caller gives none (official `config.shift`).
    """

    base: float = 10_000.0
    scaling: Scaling = Scaling()
    shift: int = 0

    def validate(self, config: ModelConfig) -> None:
        """Raises ValueError for an odd head width, a base that is no base, or a bad scaling."""
        if config.head_width % 2:
            raise ValueError(
                f"model.head_dim={config.head_width} must be even for position.name={self.name!r}:"
                " rotations act on pairs of channels"
            )
        if not self.base > 1.0:
            raise ValueError(f"position.base={self.base} must be > 1")
        self.scaling.validate()

    def uncacheable(self) -> str | None:
        """A scaling by length turns the keys again with every token."""
        if self.scaling.by_length:
            return f"scaling {self.scaling.name!r} follows the length; use a fixed one"
        return None

    def default_positions(self, length: int) -> Int[Array, "1 N"]:
        """shift .. shift + N - 1."""
        return super().default_positions(length) + self.shift

    def start_rotations(self, positions: Int[Array, "B N"], width: int) -> Float[Array, "B N D"]:
        """z = m exp(i t w) for heads of this width, w and m after scaling."""
        length = positions.shape[-1]
        freqs = self.scaling.frequencies(frequencies(width, self.base), self.base, length)
        return self.scaling.magnitude(length) * phases(positions, freqs)

    def initial_state(self, positions, config):
        """z, (B, N, 1, D): one for all heads."""
        return self.start_rotations(positions, config.head_width)[:, :, None]

    def rotate(self, q, k, state, positions, config):
        """z * q and z * k."""
        return rotate_heads(q, state), rotate_heads(k, state)


@dataclasses.dataclass(frozen=True)
class RoPE(Rotary):
    """Rotary position embedding: the state is exp(i t w), and no block changes it.

    Attributes:
      log_length: L of "log n" scaling: queries are multiplied with ln(t + 1) / ln L (official
        `config.log_scale` and `train_scale`); None does nothing.
    """

    name: str = "rope"
    log_length: int | None = None

    def validate(self, config):
        """Raises ValueError for a log_length that has no logarithm to divide by."""
        super().validate(config)
        if self.log_length is not None and self.log_length < 2:
            raise ValueError(f"position.log_length={self.log_length} must be >= 2, or None")

    def rotate(self, q, k, state, positions, config):
        """z * q and z * k, and the queries' logarithm of their position."""
        q, k = super().rotate(q, k, state, positions, config)
        if self.log_length is not None:
            scale = jnp.log1p(positions.astype(jnp.float32)) / np.log(self.log_length)
            q = (q * scale[..., None, None]).astype(q.dtype)
        return q, k


@dataclasses.dataclass(frozen=True)
class XPos(Rotary):
    """xPos (arXiv 2212.10554): RoPE whose logits also decay, by zeta_f^((i - j) / S).

    zeta_f = (2 f + 0.4 D) / 1.4 D. Only the difference of positions reaches a logit, but each side
    carries its own power, so positions must stay within what float32 holds (`reach`).

    Attributes:
      scale: S, the distance over which a logit decays by zeta.
      center: the position whose power is 1; it changes rounding, not logits.
    """

    name: str = "xpos"
    scale: float = 512.0
    center: int = 0

    @property
    def reach(self) -> int:
        """How far from the center a position may be: powers stay above 2^-60."""
        return int(60 * np.log(2) / np.log(1.4 / 0.4) * self.scale)

    def validate(self, config):
        """Raises ValueError for a scale that is not positive."""
        super().validate(config)
        if not self.scale > 0:
            raise ValueError(f"position.scale={self.scale} must be > 0")

    def default_positions(self, length):
        """shift .. shift + N - 1.

        Raises:
          ValueError: positions whose powers float32 cannot hold.
        """
        if max(abs(self.shift - self.center), abs(self.shift + length - self.center)) > self.reach:
            raise ValueError(
                f"{length} positions from {self.shift} reach further than {self.reach} from"
                f" position.center={self.center}: raise position.scale={self.scale}"
            )
        return super().default_positions(length)

    def rotate(self, q, k, state, positions, config):
        """z zeta^(t / S) * q and z zeta^(-t / S) * k."""
        q, k = super().rotate(q, k, state, positions, config)
        half = config.head_width // 2
        zeta = (np.arange(half) + 0.2 * config.head_width) / (0.7 * config.head_width)
        power = (positions - self.center).astype(jnp.float32)[..., None, None] / self.scale
        decay = jnp.exp(power * np.tile(np.log(zeta), 2).astype(np.float32))
        return (q * decay).astype(q.dtype), (k / decay).astype(k.dtype)
