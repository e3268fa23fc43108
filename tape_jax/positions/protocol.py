"""The protocol every positional encoding implements: a frozen dataclass with a few hooks.

The decoder calls the hooks and knows nothing else about positions. A hook that learns calls a thin
Linen module inside: hooks run within the compact scope of the block (or the attention, or the
model) that calls them, so its parameters land there, under the name "position".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

if TYPE_CHECKING:
    from pallas_kernels import LinearBias, ScoreMod
    from tape_jax.config import ModelConfig

State = Any
"""An encoding's per-layer state: an array (B or 1, N, K or 1, S), or None."""


@dataclasses.dataclass(frozen=True)
class Encoding:
    """No positions at all, and the base of every encoding: each hook does nothing.

    Subclasses set `name` to their registry name; their other fields are hyper-parameters.
    """

    name: str

    def validate(self, config: ModelConfig) -> None:
        """Raises ValueError, naming field, value and fix, when `config` cannot carry this."""

    def default_positions(self, length: int) -> Int[Array, "1 N"]:
        """Positions used when the caller gives none: 0 .. N-1."""
        return jnp.arange(length, dtype=jnp.int32)[None]

    def uncacheable(self) -> str | None:
        """Why tokens decoded from a cache would differ from a full pass; None when they do not."""

    def training_positions(self, key: Array, batch: int, length: int) -> Int[Array, "B N"] | None:
        """Positions drawn for one training step; None: those of `default_positions`."""

    def embed(self, x: Float[Array, "B N C"], positions: Int[Array, "B N"]) -> Array:
        """The token embedding with positions added (absolute encodings)."""
        return x

    def initial_state(self, positions: Int[Array, "B N"], config: ModelConfig) -> State:
        """The state before the first block, in float32 arithmetic."""

    def rotate(
        self,
        q: Float[Array, "B N H D"],
        k: Float[Array, "B N K D"],
        state: State,
        positions: Int[Array, "B N"],
        config: ModelConfig,
    ) -> tuple[Array, Array]:
        """Queries and keys as attention sees them; widths may change, equally for both.

        A key depends on its own position only, so that a cache can hold what this returns.
        """
        return q, k

    def score_mod(
        self,
        q: Float[Array, "B Nq H D"],
        q_positions: Int[Array, "B Nq"],
        k_positions: Int[Array, "B Nk"],
        config: ModelConfig,
    ) -> ScoreMod | LinearBias | None:
        """A change of the scaled scores; q is what `rotate` returned."""

    def values(self, state: State) -> Float[Array, "B N K De"] | None:
        """A second value stream for the attention to mix with its own probabilities."""

    def update(
        self,
        state: State,
        mixed: Float[Array, "B N H De"] | None,
        mlp_out: Float[Array, "B N C"],
        hidden: Float[Array, "B N C"],
        config: ModelConfig,
    ) -> State:
        """The next block's state, from the mixed values, the MLP's output and its input."""
        return state


class Parameter(nn.Module):
    """One learned array, for encodings that learn no more than that.

    Attributes:
      array: its name.
      start: (key, shape) -> where it starts.
      shape: of the array.
    """

    array: str
    start: Callable[..., Array]
    shape: tuple[int, ...]

    @nn.compact
    def __call__(self) -> Array:
        """The array, float32."""
        return self.param(self.array, self.start, self.shape)


@dataclasses.dataclass(frozen=True)
class NoPE(Encoding):
    """No positional encoding (arXiv 2305.19466): only the causal mask tells order."""

    name: str = "nope"
