"""Absolute positions, added to the token embedding."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from tape_jax.positions.protocol import Encoding
from tape_jax.positions.rotary import frequencies, phases


@dataclasses.dataclass(frozen=True)
class Sinusoidal(Encoding):
    """x_t += [sin t w_0, cos t w_0, sin t w_1, ...] (arXiv 1706.03762), w_f = base^(-2f/C).

    Attributes:
      base: of the frequencies.
    """

    name: str = "sinusoidal"
    base: float = 10_000.0

    def validate(self, config):
        """Raises ValueError for an odd number of channels or a base that is no base."""
        if config.hidden_size % 2:
            raise ValueError(
                f"model.hidden_size={config.hidden_size} must be even for position.name="
                f"{self.name!r}: waves come in pairs of channels"
            )
        if not self.base > 1.0:
            raise ValueError(f"position.base={self.base} must be > 1")

    def embed(self, x, positions):
        """x plus the waves, sines on even channels and cosines on odd ones."""
        cos, sin = jnp.split(phases(positions, frequencies(x.shape[-1], self.base)), 2, axis=-1)
        waves = jnp.stack([sin, cos], axis=-1).reshape(*sin.shape[:-1], -1)
        return x + waves.astype(x.dtype)
