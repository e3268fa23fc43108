"""PoPE: polar positions (arXiv 2509.10534): content is the magnitude, position the phase."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp

from tape_jax.positions.protocol import Encoding, Parameter
from tape_jax.positions.rotary import complex_multiply, frequencies, phases


@dataclasses.dataclass(frozen=True)
class PoPE(Encoding):
    """score = sum over channels of mu_c nu_c cos((j - i) w_c + delta_c).

    mu = softplus(q), nu = softplus(k): D magnitudes with D frequencies w_c = base^(-c / D), so
    queries and keys become 2 D wide.

    Attributes:
      base: of the frequencies.
      offsets: learn delta, one per query head and channel, from 0 (its range in the paper's code we
        could not confirm).
    """

    name: str = "pope"
    base: float = 10_000.0
    offsets: bool = True

    def validate(self, config):
        """Raises ValueError for a base that is no base."""
        if not self.base > 1.0:
            raise ValueError(f"position.base={self.base} must be > 1")

    def initial_state(self, positions, config):
        """exp(i t w), (B, N, 1, 2 D)."""
        return phases(positions, frequencies(2 * config.head_width, self.base))[:, :, None]

    def rotate(self, q, k, state, positions, config):
        """mu exp(i (t w - delta)) and nu exp(i t w), as 2 D reals."""
        of_q = state
        if self.offsets:
            shape = (config.num_heads, config.head_width)
            offset = Parameter("offset", nn.initializers.zeros, shape, name="position")()
            of_q = complex_multiply(jnp.concatenate([jnp.cos(offset), -jnp.sin(offset)], -1), state)

        def polar(x, state):
            magnitude = jax.nn.softplus(x.astype(jnp.float32))
            return (jnp.concatenate([magnitude, magnitude], -1) * state).astype(x.dtype)

        return polar(q, of_q), polar(k, state)
