"""Position-aware attention: one softmax, two value streams (token values and position state)."""

from pallas_kernels.attention import tape_attention
from pallas_kernels.implementations import IMPLEMENTATIONS
from pallas_kernels.scores import LinearBias, ScoreMod

__all__ = ["IMPLEMENTATIONS", "LinearBias", "ScoreMod", "tape_attention"]
