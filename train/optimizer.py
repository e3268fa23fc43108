"""AdamW with warm-up, a schedule and clipping; norms and biases do not decay."""

import dataclasses
from typing import Literal

import jax
import optax


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW.

    Attributes:
      learning_rate: the peak.
      schedule: after `warmup_steps` of linear growth from 0: "cosine" or "linear" decay to
        `final_fraction` of the peak at the last step, or "constant".
      clip_norm: global gradient norm above which gradients are scaled down.
    """

    learning_rate: float = 1e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 200
    final_fraction: float = 0.0
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip_norm: float = 1.0

    def validate(self, steps: int) -> None:
        """Raises ValueError, naming field, value and fix."""
        if not self.learning_rate > 0:
            raise ValueError(f"optimizer.learning_rate={self.learning_rate} must be > 0")
        if not 0 <= self.warmup_steps < steps:
            raise ValueError(
                f"optimizer.warmup_steps={self.warmup_steps} must lie in [0, steps={steps})"
            )
        if not self.clip_norm > 0:
            raise ValueError(f"optimizer.clip_norm={self.clip_norm} must be > 0 (inf: no clipping)")


def make_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step."""
    peak, rest = config.learning_rate, steps - config.warmup_steps
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction),
        "linear": optax.linear_schedule(peak, peak * config.final_fraction, rest),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    warmup = optax.linear_schedule(0.0, peak, max(config.warmup_steps, 1))
    return optax.join_schedules([warmup, decay], [config.warmup_steps])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping, then AdamW under the schedule."""

    def decays(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: not path[-1].key.startswith(("scale", "bias")), params
        )

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            make_schedule(config, steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )
