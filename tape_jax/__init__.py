"""TAPE in JAX: the decoder, its positional encodings, and the road from Llama weights."""

from tape_jax import convert, positions
from tape_jax.config import ModelConfig
from tape_jax.model import Transformer

__all__ = ["ModelConfig", "Transformer", "convert", "positions"]
