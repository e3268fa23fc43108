"""Encodings whose bias depends on content: CoPE, and DAPE on top of an additive encoding."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels import ScoreMod
from tape_jax.positions.additive import Additive, Fire
from tape_jax.positions.protocol import Encoding, Parameter

if TYPE_CHECKING:
    from tape_jax.config import ModelConfig


# --- CoPE -----------------------------------------------------------------------------------------


def contextual_positions(scores: Float[Array, "B H N M"], count: int) -> Float[Array, "B H N M"]:
    """p_ij = sum over the keys t from j on of sigmoid(score_it), at most count - 1.

    A key that may not be read has the lowest score and counts nothing, so the sum ends at i.
    """
    gates = jax.nn.sigmoid(scores)
    counted = jnp.cumsum(gates[..., ::-1], axis=-1)[..., ::-1]
    return jnp.minimum(counted, count - 1)


def interpolate(z: Float[Array, "B H N P"], p: Float[Array, "B H N M"]) -> Float[Array, "B H N M"]:
    """z at the fractional places p of its last axis."""
    low = jnp.floor(p)
    below = jnp.take_along_axis(z, low.astype(jnp.int32), axis=-1)
    above = jnp.take_along_axis(z, jnp.ceil(p).astype(jnp.int32), axis=-1)
    return above * (p - low) + below * (1 - (p - low))


@dataclasses.dataclass(frozen=True)
class CoPE(Encoding):
    """Contextual position encoding (arXiv 2405.18719): positions count keys by what they say.

    The position of a key is how many gates opened between it and the query; the bias is the query's
    product with the embedding of that (fractional) position. As in the paper's listing, gates are
    sigmoids of the scaled and masked logits, and the bias is of the unscaled query. Token positions
    are not used. Sums run along rows, so the scores are written out: memory is O(N^2).

    Attributes:
      count: embedded positions; further ones share the last.
    """

    name: str = "cope"
    count: int = 64

    def validate(self, config):
        """Raises ValueError for no positions, or an attention that tiles its scores."""
        if self.count < 1:
            raise ValueError(f"position.count={self.count} must be >= 1")
        if config.attention not in (None, "reference"):
            raise ValueError(
                f"model.attention={config.attention!r} cannot sum along rows of scores, as"
                " position.name='cope' needs: use 'reference', or leave it None"
            )

    def score_mod(self, q, q_positions, k_positions, config):
        """score_ij + q_i . e[p_ij]."""
        shape = (config.head_width, self.count)
        embedding = Parameter("embedding", nn.initializers.zeros, shape, name="position")()
        z = jnp.einsum("bnhd,dp->bhnp", q.astype(jnp.float32), embedding)

        def add(scores, q_index, k_index):
            p = contextual_positions(scores, self.count)
            return scores + interpolate(z[:, :, q_index], p)

        return ScoreMod(add, whole_rows=True)


# --- DAPE -----------------------------------------------------------------------------------------


class _Dape(nn.Module):
    """The parameters of the inner bias and of the MLP over heads."""

    encoding: Dape
    config: ModelConfig

    @nn.compact
    def __call__(self):
        config, width = self.config, self.encoding.width
        normal, zeros = nn.initializers.normal(config.initializer_range), nn.initializers.zeros
        learned = {
            "w1": self.param("w1", normal, (2 * config.num_heads, width)),
            "bias1": self.param("bias1", zeros, (width,)),
            "w2": self.param("w2", normal, (width, config.num_heads)),
            "bias2": self.param("bias2", zeros, (config.num_heads,)),
        }
        inner = cast(Additive, self.encoding.inner)  # `validate` has seen to it
        return inner.bias(config), learned


def dape_correction(
    learned: dict[str, Array], scores: Float[Array, "B H n m"], bias: Float[Array, "B H n m"]
) -> Float[Array, "B H n m"]:
    """MLP([scores; bias]) over the heads, at every pair of tokens."""
    both = jnp.concatenate([scores, jnp.broadcast_to(bias, scores.shape)], axis=1)
    hidden = jnp.einsum("bhnm,hp->bnmp", both, learned["w1"]) + learned["bias1"]
    out = jax.nn.leaky_relu(hidden) @ learned["w2"] + learned["bias2"]
    return jnp.moveaxis(out, -1, 1)


@dataclasses.dataclass(frozen=True)
class Dape(Encoding):
    """DAPE (arXiv 2405.14722): an additive bias that an MLP over heads adapts to the logits.

    score + bias + MLP([score; bias]): 2 H -> width -> H, LeakyReLU.

    Attributes:
      inner: the additive encoding it adapts.
      width: hidden units of the MLP.
    """

    name: str = "dape"
    inner: Encoding = Fire()
    width: int = 32

    def validate(self, config):
        """Raises ValueError for an inner encoding without a bias."""
        if not isinstance(self.inner, Additive):
            raise ValueError(
                f"position.inner.name={self.inner.name!r} has no bias to adapt: use an additive"
                " encoding (alibi, kerple, fire, t5)"
            )
        if self.width < 1:
            raise ValueError(f"position.width={self.width} must be >= 1")
        self.inner.validate(config)

    def score_mod(self, q, q_positions, k_positions, config):
        """score + bias + MLP([score; bias])."""
        inner, learned = _Dape(self, config, name="position")()

        def adapt(scores, q_index, k_index):
            bias = inner(q_positions[:, q_index], k_positions[:, k_index])
            return scores + bias + dape_correction(learned, scores, bias)

        return ScoreMod(adapt)
