"""LoRA (arXiv 2106.09685): a low-rank update beside chosen projections, x W + (alpha / r) x A B.

B starts at zero, so a new adapter changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from tape_jax.errors import unknown

PROJECTIONS: Mapping[str, str] = {
    "q_proj": "attention/query",
    "k_proj": "attention/key",
    "v_proj": "attention/value",
    "o_proj": "attention/out",
    "gate_proj": "mlp/gate",
    "up_proj": "mlp/up",
    "down_proj": "mlp/down",
}
"""Hugging Face's name of a projection, as PEFT's target_modules have it -> ours."""


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Which projections are adapted, and how.

    Attributes:
      rank: r, the inner width.
      alpha: the update is scaled by alpha / rank.
      targets: projections by their names in Hugging Face's Llama.

    Raises:
      ValueError: no rank, no alpha, or a target that is not a projection.
    """

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")

    def __post_init__(self):
        """Checks the fields."""
        if self.rank < 1:
            raise ValueError(f"lora.rank={self.rank} must be >= 1")
        if not self.alpha > 0.0:
            raise ValueError(f"lora.alpha={self.alpha} must be > 0, or nothing is learned")
        if not self.targets:
            raise ValueError(f"lora.targets is empty: name some of {', '.join(PROJECTIONS)}")
        for target in self.targets:
            if target not in PROJECTIONS:
                raise ValueError(unknown("lora.targets", target, PROJECTIONS))

    @property
    def scale(self) -> float:
        """alpha / r."""
        return self.alpha / self.rank

    def adapts(self, layer: str) -> bool:
        """Whether the projection with this name within attention or MLP has an update."""
        return any(PROJECTIONS[target].endswith(f"/{layer}") for target in self.targets)


class AdaptedDense(nn.Dense):
    """A projection with its low-rank update: `lora_a` (in, r) and `lora_b` (r, out)."""

    lora: LoRA = LoRA()

    @nn.compact
    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        """X W + b + (alpha / r) x A B."""
        out = super().__call__(x)
        # PEFT's start: Kaiming's uniform distribution with a = sqrt 5, so within 1 / sqrt(in).
        start = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        a = self.param("lora_a", start, (x.shape[-1], self.lora.rank))
        b = self.param("lora_b", nn.initializers.zeros, (self.lora.rank, self.features))
        inner = jnp.dot(x.astype(out.dtype), a.astype(out.dtype))
        return out + self.lora.scale * jnp.dot(inner, b.astype(out.dtype))


def merge(params: dict, lora: LoRA) -> dict:
    """The parameters of the same model without adapters: W + (alpha / r) A B where they were."""

    def visit(tree):
        if not isinstance(tree, Mapping):
            return tree
        if "lora_a" not in tree:
            return {name: visit(branch) for name, branch in tree.items()}
        # Once, and for good: not in an accelerator's default precision.
        update = lora.scale * jnp.matmul(tree["lora_a"], tree["lora_b"], precision="highest")
        rest = {name: x for name, x in tree.items() if not name.startswith("lora_")}
        return rest | {"kernel": tree["kernel"] + update}

    return visit(params)
