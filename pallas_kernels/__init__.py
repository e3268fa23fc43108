"""Position-aware attention: one softmax, two value streams (token values and position state)."""

from pallas_kernels.attention import IMPLEMENTATIONS, ScoreMod, tape_attention

__all__ = ["IMPLEMENTATIONS", "ScoreMod", "tape_attention"]
