"""Additive encodings: a bias on every logit, from the positions of its query and its key.

A bias is a function of positions evaluated tile by tile, so that memory stays linear; what it
learns lives in each layer. i is the query's position, j the key's, d = |i - j|.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels import LinearBias, ScoreMod
from tape_jax.positions.protocol import Encoding, Parameter

if TYPE_CHECKING:
    from tape_jax.config import ModelConfig

Bias = Callable[[Int[Array, "B n"], Int[Array, "B m"]], Float[Array, "B H n m"]]
"""From the positions of some queries and some keys to what is added to their logits."""


def distances(q_positions, k_positions) -> Int[Array, "B n m"]:
    """|i - j|."""
    return jnp.abs(q_positions[:, :, None] - k_positions[:, None, :])


@dataclasses.dataclass(frozen=True)
class Additive(Encoding, abc.ABC):
    """What every additive encoding shares; subclasses say what the bias is."""

    @abc.abstractmethod
    def bias(self, config: ModelConfig) -> Bias:
        """The bias, its parameters made in the scope that calls."""

    def score_mod(self, q, q_positions, k_positions, config) -> ScoreMod | LinearBias:
        """Scores plus the bias of their tile."""
        bias = self.bias(config)

        def add(scores, q_index, k_index):
            return scores + bias(q_positions[:, q_index], k_positions[:, k_index])

        return ScoreMod(add)


# --- ALiBi ----------------------------------------------------------------------------------------


def alibi_slopes(heads: int) -> np.ndarray:
    """2^(-8 h / H) for h = 1 .. H when H is a power of two.

    Otherwise those of the power of two below, then every other one of twice that (the published
    code; arXiv 2108.12409).
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = 2.0 ** (-8 * np.arange(1, below + 1) / below)
    between = 2.0 ** (-8 * np.arange(1, 2 * below + 1, 2) / (2 * below))
    return np.concatenate([slopes, between[: heads - below]]).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class ALiBi(Additive):
    """Attention with linear biases (arXiv 2108.12409): -slope_h d, nothing learned."""

    name: str = "alibi"

    def bias(self, config):
        """-slope_h d."""
        slopes = jnp.asarray(alibi_slopes(config.num_heads))

        def bias(q_positions, k_positions):
            distance = distances(q_positions, k_positions)[:, None].astype(jnp.float32)
            return -slopes[:, None, None] * distance

        return bias

    def score_mod(self, q, q_positions, k_positions, config):
        """The bias as what it is, so that kernels can compute it."""
        return LinearBias(jnp.asarray(alibi_slopes(config.num_heads)), q_positions, k_positions)


# --- T5 -------------------------------------------------------------------------------------------


def t5_buckets(buckets: int, max_distance: int) -> np.ndarray:
    """The bucket of each distance 0 .. max_distance, further ones being in the last.

    The first half of the buckets holds a distance each, the others grow logarithmically; float32
    like the published code, whose rounding decides some borders.
    """
    exact = buckets // 2
    distance = np.arange(max_distance + 1)
    ratio = np.log(np.maximum(distance, 1).astype(np.float32) / np.float32(exact))
    growth = ratio / np.float32(np.log(max_distance / exact)) * np.float32(buckets - exact)
    # Below `exact` the logarithm is negative and unused.
    large = exact + np.maximum(growth, 0).astype(np.int32)
    return np.where(distance < exact, distance, np.minimum(large, buckets - 1))


@dataclasses.dataclass(frozen=True)
class T5(Additive):
    """T5's relative bias (arXiv 1910.10683): one learned number per bucket of distances and head.

    As in the TAPE repository, every layer has a table of its own and logits keep their 1 / sqrt(D).

    Attributes:
      buckets: T5 has 32, the official config 64.
      max_distance: distances from here on share the last bucket.
    """

    name: str = "t5"
    buckets: int = 32
    max_distance: int = 128

    def validate(self, config):
        """Raises ValueError for buckets that cannot be told apart."""
        if self.buckets < 2 or self.buckets % 2:
            raise ValueError(f"position.buckets={self.buckets} must be even and >= 2")
        if self.max_distance <= self.buckets // 2:
            raise ValueError(
                f"position.max_distance={self.max_distance} must exceed position.buckets / 2"
                f" = {self.buckets // 2}, the distances with a bucket of their own"
            )

    def bias(self, config):
        """table[bucket(d), h]."""
        shape = (self.buckets, config.num_heads)
        normal = nn.initializers.normal(config.initializer_range)
        table = Parameter("table", normal, shape, name="position")()
        by_distance = table[t5_buckets(self.buckets, self.max_distance)]

        def bias(q_positions, k_positions):
            distance = jnp.minimum(distances(q_positions, k_positions), self.max_distance)
            return jnp.moveaxis(by_distance[distance], -1, 1)

        return bias


# --- KERPLE ---------------------------------------------------------------------------------------


class _Kerple(nn.Module):
    heads: int

    @nn.compact
    def __call__(self):
        def positive(name, high):
            """softplus of what is learned, uniform in (0, high) at the start."""

            def init(key, shape):
                start = jax.random.uniform(key, shape, minval=1e-2, maxval=high)
                return jnp.log(jnp.expm1(start))

            return jax.nn.softplus(self.param(name, init, (self.heads,)))

        return positive("p", 2.0), positive("a", 1.0)


@dataclasses.dataclass(frozen=True)
class Kerple(Additive):
    """KERPLE, logarithmic kernel (arXiv 2205.09921): -p_h ln(1 + a_h d), p and a > 0 learned."""

    name: str = "kerple"

    def bias(self, config):
        """-p_h ln(1 + a_h d)."""
        p, a = _Kerple(config.num_heads, name="position")()

        def bias(q_positions, k_positions):
            distance = distances(q_positions, k_positions)[:, None].astype(jnp.float32)
            return -p[:, None, None] * jnp.log1p(a[:, None, None] * distance)

        return bias


# --- FIRE -----------------------------------------------------------------------------------------


class _Fire(nn.Module):
    encoding: Fire
    config: ModelConfig

    @nn.compact
    def __call__(self):
        encoding, heads = self.encoding, self.config.num_heads
        normal, zeros = nn.initializers.normal(self.config.initializer_range), nn.initializers.zeros
        constant = nn.initializers.constant
        return {
            "c": self.param("c", constant(encoding.initial_c), ()),
            "multiplier": self.param("multiplier", constant(1.0), ()),
            "w1": self.param("w1", normal, (encoding.width,)),
            "bias1": self.param("bias1", zeros, (encoding.width,)),
            "w2": self.param("w2", normal, (encoding.width, heads)),
            "bias2": self.param("bias2", zeros, (heads,)),
        }


def fire_bias(
    learned: dict[str, Array], q_positions, k_positions, threshold: float, epsilon: float
) -> Float[Array, "B H n m"]:
    """f(psi(i - j) / psi(max(i, L))) with psi(x) = ln(|c x| + 1), f one hidden layer of ReLUs.

    L = |multiplier| threshold. The hidden layer is the largest array of the whole encoding.
    """

    def psi(x):
        return jnp.log1p(jnp.abs(learned["c"] * x))

    distance = (q_positions[:, :, None] - k_positions[:, None, :]).astype(jnp.float32)
    longest = jnp.abs(learned["multiplier"] * threshold)
    scale = psi(jnp.maximum(q_positions.astype(jnp.float32), longest)) + epsilon
    x = psi(distance) / scale[:, :, None]
    hidden = jax.nn.relu(x[..., None] * learned["w1"] + learned["bias1"])
    return jnp.moveaxis(hidden @ learned["w2"] + learned["bias2"], -1, 1)


@dataclasses.dataclass(frozen=True)
class Fire(Additive):
    """FIRE (arXiv 2310.04418): a learned function of a learned, normalised logarithmic distance.

    The normaliser is by the position of the query: documents that are packed need positions that
    restart. The defaults are the published listing's, which the TAPE code follows.

    Attributes:
      width: hidden units of f.
      initial_c: where c starts.
      threshold: L at the start; queries before it are normalised by it.
      epsilon: added to the normaliser: 1e-6 in the listing, 0 in the paper's formula.
    """

    name: str = "fire"
    width: int = 32
    initial_c: float = 0.1
    threshold: float = 512.0
    epsilon: float = 1e-6

    def validate(self, config):
        """Raises ValueError for sizes that make no function."""
        if self.width < 1:
            raise ValueError(f"position.width={self.width} must be >= 1")
        if self.epsilon < 0:
            raise ValueError(f"position.epsilon={self.epsilon} must be >= 0")
        for field in ("initial_c", "threshold"):
            if not getattr(self, field) > 0:
                raise ValueError(f"position.{field}={getattr(self, field)} must be > 0")

    def bias(self, config):
        """`fire_bias` of what this layer has learned."""
        learned = _Fire(self, config, name="position")()
        return lambda i, j: fire_bias(learned, i, j, self.threshold, self.epsilon)
