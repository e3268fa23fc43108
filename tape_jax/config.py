"""ModelConfig: everything that shapes a model, checked when it is made."""

import dataclasses
from typing import Literal

import jax

from pallas_kernels import IMPLEMENTATIONS
from tape_jax import positions
from tape_jax.errors import check_choices, unknown
from tape_jax.lora import LoRA
from tape_jax.positions.protocol import Encoding

Precision = Literal["float32", "bfloat16", "float16"]

REMAT_POLICIES = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "attention": jax.checkpoint_policies.save_only_these_names(
        "attention_out", "attention_mixed", "attention_lse"
    ),
}
"""`ModelConfig.remat` by name."""


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A Llama-style decoder with a pluggable positional encoding. Hashable, so static under jit.

    The defaults are the 155M model of the TAPE paper.

    Attributes:
      intermediate_size: channels inside the MLP.
      num_kv_heads: key/value heads, and heads of the position state; one per query head when None.
      head_dim: channels of a head; hidden_size / num_heads when None.
      position: an `Encoding`, or a name in `tape_jax.positions`.
      initializer_range: standard deviation of new weights.
      dtype: of the computation; parameters, angles, softmax and logits are float32.
      attention: an implementation's name; the best that fits when None.
      scan_layers: one compiled block in a loop (compiles fast) or all of them unrolled (runs
        fastest); the parameters are the same.
      remat: what a block keeps for the backward pass: "none" recomputes nothing and keeps all,
        "full" keeps nothing, "dots" its matrix products, "attention" the attention's outputs.
      lora: low-rank updates beside projections; None: none.
      shifted_groups: LongLoRA's sparse attention, for training only: tokens read within this many
        groups of the sequence, half of the heads within groups shifted by half a group. None: all
        read all before them.

    Raises:
      ValueError: values that cannot make a model; names the fields and what would do.
    """

    vocab_size: int = 32_000
    hidden_size: int = 768
    intermediate_size: int = 3_072
    num_layers: int = 12
    num_heads: int = 12
    num_kv_heads: int | None = None
    head_dim: int | None = None
    position: Encoding = positions.Tape()
    norm_eps: float = 1e-5
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    initializer_range: float = 0.02
    dtype: Precision = "float32"
    attention: str | None = None
    scan_layers: bool = True
    remat: Literal["none", "full", "dots", "attention"] = "none"
    lora: LoRA | None = None
    shifted_groups: int | None = None

    @property
    def kv_heads(self) -> int:
        """K: key/value heads, and heads of the position state."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        """D: channels of one head."""
        return self.hidden_size // self.num_heads if self.head_dim is None else self.head_dim

    def __post_init__(self):
        """Checks every field against the others."""
        if isinstance(self.position, str):
            object.__setattr__(self, "position", positions.get(self.position))
        sizes = "vocab_size hidden_size intermediate_size num_layers num_heads"
        for field in (*sizes.split(), "kv_heads", "head_width"):
            if getattr(self, field) < 1:
                raise ValueError(f"model.{field}={getattr(self, field)} must be >= 1")
        if self.head_dim is None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"model.hidden_size={self.hidden_size} is not a multiple of model.num_heads"
                f"={self.num_heads}: use {_divisors(self.hidden_size)} heads, or set model.head_dim"
            )
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"model.num_kv_heads={self.kv_heads} must divide model.num_heads={self.num_heads}:"
                f" use {_divisors(self.num_heads)}"
            )
        if self.shifted_groups is not None and (self.shifted_groups < 1 or self.kv_heads < 2):
            raise ValueError(
                f"model.shifted_groups={self.shifted_groups} must be >= 1, and it needs at least 2"
                f" key/value heads to shift some of; model.num_kv_heads={self.kv_heads}"
            )
        check_choices(self, "model")
        if self.attention is not None and self.attention not in IMPLEMENTATIONS:
            raise ValueError(unknown("model.attention", self.attention, IMPLEMENTATIONS))
        self.position.validate(self)


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, min(n, 128) + 1) if n % d == 0)
