"""Weights from elsewhere into our parameters, and back."""

from tape_jax.convert.adapter import fingerprint, load_adapter, save_adapter
from tape_jax.convert.configs import with_rotations_of
from tape_jax.convert.gguf_files import load_gguf, read_gguf_config
from tape_jax.convert.huggingface import (
    from_huggingface,
    load_huggingface,
    read_huggingface_config,
    save_huggingface,
)
from tape_jax.convert.peft import save_peft
from tape_jax.convert.start import start_missing

__all__ = [
    "fingerprint",
    "from_huggingface",
    "load_adapter",
    "load_gguf",
    "load_huggingface",
    "read_gguf_config",
    "read_huggingface_config",
    "save_adapter",
    "save_huggingface",
    "save_peft",
    "start_missing",
    "with_rotations_of",
]
