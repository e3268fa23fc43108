"""TAPA: token-aware phase attention (arXiv 2509.12635)."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax.numpy as jnp

from pallas_kernels import ScoreMod
from tape_jax.errors import check_choices
from tape_jax.positions.additive import distances
from tape_jax.positions.protocol import Encoding


@dataclasses.dataclass(frozen=True)
class TAPA(Encoding):
    """Logits are an amplitude times the cosine of a phase, both products of query and key.

    With the head cut into the first a = theta D channels and the other p = D - a:

        score = q_a . k_a / sqrt(a) * cos(2 pi |i - j|^alpha phi)
        quadratic   phi = q_p . k_p / sqrt(p)                          (paper Eq. 12)
        linear      phi = (sum of q_p + sum of k_p) / sqrt(p)          (paper Eq. 16)

    Nothing is learned beyond the projections, and there is no rotation. Phases are float32.

    Attributes:
      alpha: how fast phases turn with distance.
      theta: share of the channels that make the amplitude.
      phase: which phi.
    """

    name: str = "tapa"
    alpha: float = 0.1
    theta: float = 0.5
    phase: Literal["quadratic", "linear"] = "quadratic"

    def _amplitude(self, width: int) -> int:
        """a."""
        return round(self.theta * width)

    def validate(self, config):
        """Raises ValueError for an exponent that does not grow, or a head with one part only."""
        check_choices(self, "position")
        if not self.alpha > 0:
            raise ValueError(f"position.alpha={self.alpha} must be > 0")
        if not 0 < self._amplitude(config.head_width) < config.head_width:
            raise ValueError(
                f"position.theta={self.theta} must leave channels of model.head_dim="
                f"{config.head_width} to amplitude and phase both: use 0.5"
            )

    def rotate(self, q, k, state, positions, config):
        """The linear phase as a product: [sum q, 1] . [1, sum k]."""
        if self.phase == "quadratic":
            return q, k
        a = self._amplitude(config.head_width)

        def shorten(x, total_first):
            total = x[..., a:].astype(jnp.float32).sum(axis=-1, keepdims=True).astype(x.dtype)
            one = jnp.ones_like(total)
            pair = (total, one) if total_first else (one, total)
            return jnp.concatenate([x[..., :a], *pair], axis=-1)

        return shorten(q, True), shorten(k, False)

    def score_mod(self, q, q_positions, k_positions, config):
        """Amplitude times cosine, from the two products of a tile."""
        width = config.head_width
        a = self._amplitude(width)
        p = width - a

        def turn(products, q_index, k_index):
            # Products come divided by sqrt(D).
            amplitude, phi = products[0] * (width / a) ** 0.5, products[1] * (width / p) ** 0.5
            distance = distances(q_positions[:, q_index], k_positions[:, k_index])
            turns = distance[:, None].astype(jnp.float32) ** self.alpha
            return amplitude * jnp.cos(2 * jnp.pi * turns * phi)

        return ScoreMod(turn, parts=(a, q.shape[-1] - a))
