"""TAPE: the position state as a value that every block updates from content (arXiv 2501.00712).

The state e of a token is, per head, either one complex number per frequency (the fast form, real
width S = D) or M blocks of L x R reals (the general form, D = M L, S = M L R). Attention sees it
only through e_i^T e_j per block, and updates mix heads and nothing else, so

    attention is invariant and the update equivariant under e -> e Q,

with Q orthogonal on the R axis of the general form and a rotation per frequency in the complex one.
For L = R = 2 and blocks e = [[a, b], [-b, a]], whose transpose multiplies by z = a + i b, the two
forms are the same numbers.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tape_jax.errors import check_choices
from tape_jax.positions.rotary import Rotary, frequencies, phases, rotate_heads

if TYPE_CHECKING:
    from tape_jax.config import ModelConfig


def rotary_blocks(z: Float[Array, "B N K D"]) -> Float[Array, "B N K S"]:
    """The complex state z = [a | b] as blocks [[a, b], [-b, a]] (L = R = 2), flattened."""
    a, b = jnp.split(z, 2, axis=-1)
    blocks = jnp.stack([jnp.stack([a, b], -1), jnp.stack([-b, a], -1)], -2)
    return blocks.reshape(*z.shape[:-1], -1)


def project_blocks(
    x: Float[Array, "B N H D"], e: Float[Array, "B N K S"], block: tuple[int, int]
) -> Float[Array, "B N H MR"]:
    """x'_m = e_m^T x_m for each block m of L channels: what the logits see (paper Eq. 6).

    Block m holds channels m, m + M, m + 2M, ...: for L = 2 the half-split pairing of rotary.py.
    Query head h uses the state of its group, h // G.
    """
    rows, columns = block
    *lead, heads, width = x.shape
    state_heads, size = e.shape[-2], width // rows
    grouped = x.reshape(*lead, state_heads, heads // state_heads, rows, size)
    blocks = e.reshape(*e.shape[:-1], size, rows, columns)
    # Full precision: the default would round to bfloat16 on TPU, and angles with it.
    out = jnp.einsum(
        "...kglm,...kmlr->...kgrm",
        grouped.astype(jnp.float32),
        blocks.astype(jnp.float32),
        precision=jax.lax.Precision.HIGHEST,
    )
    return out.reshape(*lead, heads, size * columns).astype(x.dtype)


def post_mix(
    mixed: Float[Array, "B N H S"], weights: Float[Array, "K H"] | Float[Array, " H"], kv_heads: int
) -> Float[Array, "B N K S"]:
    """The linear layer after the position attention, H query heads to K state heads.

    A (K, H) matrix mixes heads (the paper); an (H,) vector scales each query head before its group
    is summed (the official einsum, which sums its weight's rows).
    """
    if weights.ndim == 1:
        scaled = mixed * weights[:, None]
        return scaled.reshape(*mixed.shape[:-2], kv_heads, -1, mixed.shape[-1]).sum(-2)
    return jnp.einsum("kh,...hs->...ks", weights, mixed)


def gated_mix(
    e: Float[Array, "B N K S"],
    gate: Float[Array, "B N P"],
    w1: Float[Array, "P K"],
    w2: Float[Array, "K P"],
) -> Float[Array, "B N K S"]:
    """W2 diag(gate) W1 e for every token: the position MLP (paper Eq. 8), heads mixed only.

    Through the hidden P axis it costs 2 P K S products a token; building the K x K matrix
    W2 diag(gate) W1 first costs P K^2 + K^2 S and no (P, S) intermediate. Same values; the
    cheaper order is taken.
    """
    (width, heads), size = w1.shape, e.shape[-1]
    if heads * (width + size) < 2 * width * size:
        products = jnp.einsum("kp,pj->pkj", w2, w1).reshape(width, heads * heads)
        per_token = (gate @ products).reshape(*gate.shape[:-1], heads, heads)
        return jnp.einsum("...kj,...js->...ks", per_token, e)
    hidden = gate[..., None] * jnp.einsum("pk,...ks->...ps", w1, e)
    return jnp.einsum("kp,...ps->...ks", w2, hidden)


class TapeUpdate(nn.Module):
    """The parameters of one block's state update, and the update itself."""

    encoding: Tape
    config: ModelConfig

    @nn.compact
    def __call__(self, state, mixed, gate_input):
        """e + post(mixed), then e + W2 diag(silu(Wx u)) W1 e."""
        encoding, config = self.encoding, self.config
        heads, kv_heads, width = config.num_heads, config.kv_heads, encoding.mlp_width(config)
        normal, zeros = nn.initializers.normal(config.initializer_range), nn.initializers.zeros
        dtype = jnp.dtype(config.dtype)
        shape = (kv_heads, heads) if encoding.post == "full" else (heads,)
        post = self.param("post", zeros, shape)
        w1 = self.param("w1", zeros if encoding.zero == "w1" else normal, (width, kv_heads))
        w2 = self.param("w2", zeros if encoding.zero == "w2" else normal, (kv_heads, width))
        gate = nn.Dense(width, use_bias=False, kernel_init=normal, dtype=dtype, name="gate")

        state = state + post_mix(mixed, post.astype(mixed.dtype), kv_heads).astype(state.dtype)
        g = jax.nn.silu(gate(gate_input))
        step = gated_mix(state.astype(dtype), g, w1.astype(dtype), w2.astype(dtype))
        return state + step.astype(state.dtype)


@dataclasses.dataclass(frozen=True)
class Tape(Rotary):
    """Contextualized equivariant positional encoding.

    The defaults are the paper's flavour; what the gate reads the paper leaves open, and there the
    default is the official code's.

    Attributes:
      post: "full" mixes heads (paper); "scalar" is one factor a head (official code, D2).
      zero: which factor of the position MLP starts at zero: "w2" (paper) or "w1" (official, D1).
        With `post`, also zero at the start, either makes a new model exactly RoPE.
      gate: what the gate reads: "mlp", the MLP's output before its residual (official code), or
        "hidden", the normed hidden state that the MLP reads.
      width: P, the hidden width of the position MLP; 4 H when None (the paper's choice).
      block: None for the complex form; (L, R) for the general form of M = D / L blocks.
      state_dtype: the dtype the state is carried in; angles are float32 whatever it is.
    """

    name: str = "tape"
    post: Literal["full", "scalar"] = "full"
    zero: Literal["w2", "w1"] = "w2"
    gate: Literal["mlp", "hidden"] = "mlp"
    width: int | None = None
    block: tuple[int, int] | None = None
    state_dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    def mlp_width(self, config: ModelConfig) -> int:
        """P."""
        return 4 * config.num_heads if self.width is None else self.width

    def validate(self, config: ModelConfig) -> None:
        """Raises ValueError for a width below 1 or a block that does not divide the head."""
        super().validate(config)
        check_choices(self, "position")
        if self.mlp_width(config) < 1:
            raise ValueError(f"position.width={self.width} must be >= 1")
        if self.block is None:
            return
        rows, columns = self.block
        if rows < 1 or config.head_width % rows:
            raise ValueError(
                f"position.block={self.block}: L={rows} must divide model.head_dim"
                f"={config.head_width}"
            )
        if columns < 2 or columns % 2:
            raise ValueError(
                f"position.block={self.block}: R={columns} must be even, a rotary start has R / 2"
                " planes"
            )

    def initial_state(self, positions, config):
        """z = exp(i t w), or its rotations as blocks; (B, N, 1, S), the same for all heads."""
        if self.block is None:
            state = self.start(positions, config.head_width)
        else:
            state = self.start_blocks(positions, config.head_width, self.block)
        return state[:, :, None].astype(self.state_dtype)

    def start_blocks(self, positions, width: int, block: tuple[int, int]) -> Float[Array, "B N S"]:
        """Row l of a block is [cos | sin] of t w + l pi / L over R / 2 frequencies, of norm 1.

        A shift of all positions multiplies every block from the right by a rotation, so logits
        stay relative. For L = R = 2 they are RoPE's blocks.
        """
        rows, columns = block
        size, planes = width // rows, columns // 2
        freqs = frequencies(2 * size * planes, self.base) / self.scaling.factor
        z = phases(positions, freqs)
        cos, sin = (x.reshape(*x.shape[:-1], size, 1, planes) for x in jnp.split(z, 2, axis=-1))
        offset = np.arange(rows)[:, None] * np.pi / rows
        c, s = np.cos(offset).astype(np.float32), np.sin(offset).astype(np.float32)
        blocks = jnp.stack([cos * c - sin * s, sin * c + cos * s], axis=-1) * planes**-0.5
        return blocks.reshape(*z.shape[:-1], -1)

    def rotate(self, q, k, state, positions, config):
        """The state applied to queries and keys, in float32 whatever it is carried in."""
        state = state.astype(jnp.float32)
        if self.block is None:
            return rotate_heads(q, state), rotate_heads(k, state)
        return project_blocks(q, state, self.block), project_blocks(k, state, self.block)

    def values(self, state):
        """The state itself: Eq. 7 reuses the attention's probabilities for it."""
        return state

    def update(self, state, mixed, mlp_out, hidden, config):
        """Eqs. 7 and 8 with their residuals."""
        gate_input = mlp_out if self.gate == "mlp" else hidden
        return TapeUpdate(self, config, name="position")(state, mixed, gate_input)
