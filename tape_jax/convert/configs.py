"""config.json of a Hugging Face Llama or official TAPE model, and our ModelConfig.

Keys that do not shape a Llama (token ids, dropout, the library's version) are ignored.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tape_jax import positions
from tape_jax.config import ModelConfig
from tape_jax.convert.encodings import read_position
from tape_jax.convert.encodings_out import write_position
from tape_jax.errors import unknown
from tape_jax.saved import read_object

_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias",
    "tie_word_embeddings": "tie_embeddings",
    "initializer_range": "initializer_range",
}
"""Their config key -> our ModelConfig field; a config lacks none of the first five."""


def read_json(folder: Path) -> dict[str, Any]:
    """The config.json in this folder.

    Raises:
      FileNotFoundError: there is none.
      ValueError: it is not JSON.
    """
    file = folder / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{file} is missing: {folder} is no Hugging Face checkpoint")
    return read_object(file)


def read_config(hf: Mapping[str, Any], overrides: Mapping[str, Any]) -> ModelConfig:
    """The config of a checkpoint, with the overrides' fields instead of its own.

    A position given by name starts from the checkpoint's own rotations (`with_rotations_of`); an
    encoding is taken as it is.

    Raises:
      ValueError: keys that are missing or that we cannot honour, or an unknown override.
    """
    for key, only in {"model_type": "llama", "hidden_act": "silu"}.items():
        if hf.get(key, only) != only:
            raise ValueError(f"{key}={hf[key]!r} is not supported; expected {only!r}")
    missing = [key for key in list(_FIELDS)[:5] if key not in hf]
    if missing:
        raise ValueError(f"config lacks {', '.join(missing)}")
    for key in list(_FIELDS)[:5]:
        if not isinstance(hf[key], int):
            raise ValueError(f"{key}={hf[key]!r} is not supported; expected an integer")
    for name in overrides:
        if name not in ModelConfig.__dataclass_fields__:
            raise ValueError(unknown("ModelConfig field", name, ModelConfig.__dataclass_fields__))
    fields = {ours: hf[theirs] for theirs, ours in _FIELDS.items() if theirs in hf}
    position = overrides.get("position")
    if position is None or isinstance(position, str):
        fields["position"] = read_position(hf)
    if isinstance(position, str):
        found = with_rotations_of(fields["position"], positions.get(position))
        overrides = {**overrides, "position": found}
    return ModelConfig(**fields | dict(overrides))


def with_rotations_of(base: positions.Encoding, encoding: positions.Encoding) -> positions.Encoding:
    """`encoding` with the frequencies, scaling and shift of a model's, where both are rotary.

    So that a new TAPE starts as the very RoPE that the model was trained with.
    """
    fields = ("base", "scaling", "shift")
    if not all(hasattr(x, field) for x in (base, encoding) for field in fields):
        return encoding
    return dataclasses.replace(encoding, **{field: getattr(base, field) for field in fields})


def write_config(config: ModelConfig, *, dtype: str, length: int | None = None) -> dict[str, Any]:
    """The config.json of this model, for transformers before and from version 5.

    Args:
      config: the model.
      dtype: that its tensors have.
      length: what it was trained on.

    Raises:
      ValueError: what their format cannot express; names the fields and what would do.
    """
    if config.lora is not None:
        raise ValueError("model.lora has no place in a Hugging Face Llama: merge it, or save_peft")
    settled = dataclasses.replace(config, num_kv_heads=config.kv_heads, head_dim=config.head_width)
    shape = {theirs: getattr(settled, ours) for theirs, ours in _FIELDS.items()}
    fixed = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    return fixed | shape | write_position(config, length)
