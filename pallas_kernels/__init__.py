"""Position-aware attention: one softmax, two value streams (token values and position state)."""

from pallas_kernels.attention import tape_attention
from pallas_kernels.implementations import IMPLEMENTATIONS, ScoreMod

__all__ = ["IMPLEMENTATIONS", "ScoreMod", "tape_attention"]
