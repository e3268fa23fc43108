"""Randomized positions (arXiv 2305.16843): training sees the positions of longer sequences."""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from tape_jax.errors import check_choices
from tape_jax.positions.protocol import Encoding
from tape_jax.positions.rotary import RoPE


def ordered_draw(key: Array, batch: int, length: int, count: int) -> Int[Array, "B N"]:
    """For each row `length` of the numbers 0 .. count - 1, without repetition, in order."""
    noise = jax.random.uniform(key, (batch, count))
    _, chosen = jax.lax.top_k(noise, length)
    return jnp.sort(chosen, axis=-1).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Randomized(Encoding):
    """Another encoding, trained on ordered random positions below `max_position`.

    One draw for each step and sequence, from the step's key; the same for all layers. (The official
    TAPE code draws anew in every layer and at evaluation: docs/faithfulness.md.)

    Attributes:
      inner: the encoding that sees the positions.
      max_position: positions are drawn from 0 .. max_position - 1; sequences cannot be longer.
      evaluation: positions when the caller gives none: "plain", 0 .. N - 1, or "draw", one ordered
        draw from `seed`, the same for every call of a length.
      seed: of that draw.
    """

    name: str = "randomized"
    inner: Encoding = RoPE()
    max_position: int = 2048
    evaluation: Literal["plain", "draw"] = "plain"
    seed: int = 0

    def validate(self, config):
        """Raises ValueError for no positions to draw from, and whatever the inner encoding does."""
        check_choices(self, "position")
        if self.max_position < 1:
            raise ValueError(f"position.max_position={self.max_position} must be >= 1")
        self.inner.validate(config)

    def _check(self, length):
        if length > self.max_position:
            raise ValueError(
                f"a sequence of {length} needs position.max_position >= {length}, not"
                f" {self.max_position}: positions are drawn without repetition"
            )

    def default_positions(self, length):
        """0 .. N - 1, or the draw of `seed`.

        Raises:
          ValueError: a sequence longer than max_position.
        """
        self._check(length)
        if self.evaluation == "draw":
            return ordered_draw(jax.random.key(self.seed), 1, length, self.max_position)
        return self.inner.default_positions(length)

    def training_positions(self, key, batch, length):
        """An ordered draw for every sequence.

        Raises:
          ValueError: a sequence longer than max_position.
        """
        self._check(length)
        return ordered_draw(key, batch, length, self.max_position)

    def uncacheable(self):
        """A draw is one of a whole length."""
        if self.evaluation == "draw":
            return "evaluation='draw' draws for the whole length at once; use 'plain'"
        return self.inner.uncacheable()

    # The rest is the inner encoding's.

    def embed(self, x, positions):
        """The inner encoding's."""
        return self.inner.embed(x, positions)

    def initial_state(self, positions, config):
        """The inner encoding's."""
        return self.inner.initial_state(positions, config)

    def rotate(self, q, k, state, positions, config):
        """The inner encoding's."""
        return self.inner.rotate(q, k, state, positions, config)

    def score_mod(self, q, q_positions, k_positions, config):
        """The inner encoding's."""
        return self.inner.score_mod(q, q_positions, k_positions, config)

    def values(self, state):
        """The inner encoding's."""
        return self.inner.values(state)

    def update(self, state, mixed, mlp_out, hidden, config):
        """The inner encoding's."""
        return self.inner.update(state, mixed, mlp_out, hidden, config)
