"""TAPE: the position state as a value that every block updates from content (arXiv 2501.00712).

The state e of a token is, per head, either one complex number per frequency (the fast form, real
width S = D) or M blocks of L x R reals (the general form, D = M L, S = M L R); see forms.py.
Attention sees it only through e_i^T e_j per block, and updates mix heads and nothing else, so

    attention is invariant and the update equivariant under e -> e Q,

with Q orthogonal on the R axis of the general form and a rotation per frequency in the complex one.
Starts are in starts.py; what the paper's ablations mix instead of heads is in mixing.py.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tape_jax.errors import check_choices
from tape_jax.positions.forms import Blocks, Complex, Form, Pair
from tape_jax.positions.mixing import PAIRED, VIEWS, sum_groups
from tape_jax.positions.rotary import Rotary
from tape_jax.positions.starts import Start

if TYPE_CHECKING:
    from tape_jax.config import ModelConfig


def post_mix(
    mixed: Float[Array, "B N H S"], weights: Float[Array, "K H"] | Float[Array, " H"], into: int
) -> Float[Array, "B N K S"]:
    """The linear layer after the position attention, H query heads to K state heads.

    A (K, H) matrix mixes heads (the paper); an (H,) vector scales each query head before its group
    is summed to K = `into` (the official einsum, which sums its weight's rows).
    """
    if weights.ndim == 1:
        return sum_groups(mixed * weights[:, None], into)
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
        encoding = self.encoding
        after_attention, after_mlp = VIEWS[encoding.mixing]
        if encoding.contextualize in ("both", "attention"):
            state = state + self._post(after_attention, mixed).astype(state.dtype)
        if encoding.contextualize in ("both", "mlp"):
            state = state + self._mlp(after_mlp, state, gate_input).astype(state.dtype)
        if encoding.unit:
            modulus = encoding.scaling.magnitude(state.shape[1])
            state = encoding.form.normalise(state, modulus)
        return state

    def _post(self, view, mixed):
        """The linear map after the position attention (Eq. 7)."""
        kv_heads, (into, out_of) = self.config.kv_heads, view.axes(self.config)
        shape = (into, out_of) if self.encoding.post == "full" else (out_of,)
        shape = (*view.lead, *shape)
        weights = self.param("post", nn.initializers.zeros, shape).astype(mixed.dtype)
        mix = view.by_copy(functools.partial(post_mix, into=into))
        return view.unfold(mix(view.fold(mixed, kv_heads), weights), kv_heads)

    def _mlp(self, view, state, gate_input):
        """The position MLP (Eq. 8)."""
        encoding, config = self.encoding, self.config
        (axis, _), width = view.axes(config), encoding.mlp_width(config)
        normal, zeros = nn.initializers.normal(config.initializer_range), nn.initializers.zeros
        dtype = jnp.dtype(config.dtype)
        w1, w2 = (
            self.param(name, zeros if encoding.zero == name else normal, (*view.lead, *shape))
            for name, shape in (("w1", (width, axis)), ("w2", (axis, width)))
        )
        gate = nn.Dense(width, use_bias=False, kernel_init=normal, dtype=dtype, name="gate")
        g = jax.nn.silu(gate(gate_input))
        mix = view.by_copy(gated_mix, in_axes=(0, None, 0, 0))
        folded = view.fold(state.astype(dtype), config.kv_heads)
        return view.unfold(mix(folded, g, w1.astype(dtype), w2.astype(dtype)), config.kv_heads)


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
      start: where the state starts, a `Start`: rotations, random Fourier features, a learned table.
      contextualize: which updates act: "both", "attention" (Eq. 7) or "mlp" (Eq. 8); the last two
        are rows of the paper's Table 6.
      mixing: along which axis they mix: "heads", or an ablation of `tape_jax.positions.mixing`.
      unit: our own extension: after every update z becomes z / |z|, times the magnitude that its
        scaling started with. The modulus is invariant, so the update stays equivariant, and logits
        cannot drift with depth by the size of the state.
      state_dtype: the dtype the state is carried in; angles are float32 whatever it is.
    """

    name: str = "tape"
    post: Literal["full", "scalar"] = "full"
    zero: Literal["w2", "w1"] = "w2"
    gate: Literal["mlp", "hidden"] = "mlp"
    width: int | None = None
    block: tuple[int, int] | None = None
    start: Start = Start()
    contextualize: Literal["both", "attention", "mlp"] = "both"
    mixing: Literal["heads", "separate", "channels", "all"] = "heads"
    unit: bool = False
    state_dtype: Literal["float32", "bfloat16", "float16"] = "float32"

    @property
    def form(self) -> Form:
        """How the state is written as reals."""
        if self.block is not None:
            return Blocks(*self.block)
        return Pair() if self.mixing in PAIRED else Complex()

    def mlp_width(self, config: ModelConfig) -> int:
        """P."""
        return 4 * config.num_heads if self.width is None else self.width

    def validate(self, config: ModelConfig) -> None:
        """Raises ValueError for a width below 1, or a block that does not fit head or mixing."""
        super().validate(config)
        check_choices(self, "position")
        self.start.validate(self)
        if self.mlp_width(config) < 1:
            raise ValueError(f"position.width={self.width} must be >= 1")
        if self.block is None:
            return
        rows, columns = self.block
        if self.mixing != "heads":
            raise ValueError(
                f"position.block={self.block} mixes heads only: leave it out, or"
                f" position.mixing={self.mixing!r}"
            )
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

    def default_positions(self, length):
        """shift .. shift + N - 1.

        Raises:
          ValueError: a sequence that the start does not reach.
        """
        self.start.check_length(self.shift + length)
        return super().default_positions(length)

    def initial_state(self, positions, config):
        """The start in the form's reals; (B, N, 1, S), the same for all heads."""
        state = self.form.start(self, positions, config.head_width)
        return state[:, :, None].astype(self.state_dtype)

    def rotate(self, q, k, state, positions, config):
        """The state applied to queries and keys, in float32 whatever it is carried in."""
        state = state.astype(jnp.float32)
        return self.form.apply(q, state), self.form.apply(k, state)

    def values(self, state):
        """The state itself: Eq. 7 reuses the attention's probabilities for it."""
        return None if self.contextualize == "mlp" else state

    def update(self, state, mixed, mlp_out, hidden, config):
        """Eqs. 7 and 8 with their residuals."""
        gate_input = mlp_out if self.gate == "mlp" else hidden
        return TapeUpdate(self, config, name="position")(state, mixed, gate_input)
