"""Weights from elsewhere into our parameters."""

from tape_jax.convert.huggingface import from_huggingface

__all__ = ["from_huggingface"]
