"""How an encoding is written into a config.json: the inverse of `encodings.read_position`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tape_jax import positions
from tape_jax.config import ModelConfig
from tape_jax.convert.encodings import TAPES, read_position

Keys = dict[str, Any]


def write_position(config: ModelConfig, length: int | None = None) -> Keys:
    """The keys that say which encoding a model has, `max_position_embeddings` among them.

    What is written is read back: what comes out otherwise cannot be said in their format.

    Args:
      config: the model.
      length: what it was trained on. Some encodings imply a max_position_embeddings: theirs wins.

    Raises:
      ValueError: an encoding without a place in their format, with the fields and what would do.
    """
    encoding = _settled(config)
    if encoding.name not in _WRITERS:
        known = ", ".join(sorted(_WRITERS))
        raise ValueError(
            f"position.name={encoding.name!r} has no place in a Hugging Face config; these have:"
            f" {known}"
        )
    keys = {"max_position_embeddings": length or 2048} | _WRITERS[encoding.name](encoding)
    lines = _differences("position", encoding, read_position(keys))
    if lines:
        raise ValueError("a Hugging Face config cannot hold " + "; ".join(lines))
    if isinstance(encoding, positions.Tape) and config.kv_heads != config.num_heads:
        raise ValueError(
            f"model.num_kv_heads={config.kv_heads}: the official TAPE needs one per query head, "
            f"{config.num_heads}"
        )
    return keys


def _settled(config: ModelConfig) -> positions.Encoding:
    """The encoding with what changes a trained model in nothing as the official code has it."""
    encoding = config.position
    if isinstance(encoding, positions.Tape):
        width = encoding.mlp_width(config)
        return dataclasses.replace(encoding, width=width, zero="w1", state_dtype="float32")
    return encoding


def _differences(path: str, ours: Any, theirs: Any) -> list[str]:
    if not dataclasses.is_dataclass(ours) or type(ours) is not type(theirs):
        return [] if ours == theirs else [f"{path}={ours!r}, only {theirs!r}"]
    lines = []
    for field in dataclasses.fields(ours):
        pair = (getattr(x, field.name) for x in (ours, theirs))
        lines += _differences(f"{path}.{field.name}", *pair)
    return lines


# --- Scalings -------------------------------------------------------------------------------------


def _stretched(scaling) -> Keys:
    """The old kinds have `type` and a factor, and early transformers allow nothing else."""
    return {"type": scaling.name, "factor": scaling.factor}


def _yarn(scaling) -> Keys:
    fields = ("factor", "beta_fast", "beta_slow", "attention_factor")
    given = {field: getattr(scaling, field) for field in fields}
    given = {field: value for field, value in given.items() if value is not None}
    return {"rope_type": "yarn", "original_max_position_embeddings": scaling.original} | given


def _llama3(scaling) -> Keys:
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
    }


_SCALINGS: Mapping[str, tuple[Callable[[Any], Keys | None], Callable[[Any], Keys]]] = {
    "none": (lambda _: None, lambda _: {}),
    "linear": (_stretched, lambda _: {}),
    "dynamic": (_stretched, lambda s: {"max_position_embeddings": s.original}),
    # Some versions of transformers take max / original for the factor.
    "yarn": (_yarn, lambda s: {"max_position_embeddings": round(s.factor * s.original)}),
    "llama3": (_llama3, lambda _: {}),
}
"""Our scaling -> (its `rope_scaling`, what it implies of the other keys)."""


def _rotary(encoding, **keys) -> Keys:
    """Base and scaling in the old style and in the new one; `keys` win."""
    scaling = encoding.scaling
    if scaling.name not in _SCALINGS:
        known = ", ".join(_SCALINGS)
        raise ValueError(
            f"position.scaling.name={scaling.name!r} has no place in a Hugging Face config; these"
            f" have: {known}"
        )
    write, imply = _SCALINGS[scaling.name]
    old = write(scaling)
    new = {"rope_type": "default"} if old is None else dict(old)
    new = {"rope_theta": encoding.base, "rope_type": new.pop("type", None)} | new
    shift = {"shift": encoding.shift} if encoding.shift else {}
    base = {"rope_theta": encoding.base, "rope_scaling": old, "rope_parameters": new}
    return base | imply(scaling) | shift | keys


# --- Encodings ------------------------------------------------------------------------------------


def _rope(encoding) -> Keys:
    official: Keys = {"rpe_type": "rope"} if encoding.shift else {}
    if encoding.log_length is not None:
        official = {"rpe_type": "rope", "log_scale": True, "train_scale": encoding.log_length}
    return _rotary(encoding, **official)


def _xpos(encoding) -> Keys:
    return _rotary(encoding, rpe_type="xpos", max_position_embeddings=2 * encoding.center)


def _randomized(encoding) -> Keys:
    rotary = encoding.inner if isinstance(encoding.inner, positions.RoPE) else positions.RoPE()
    half = encoding.max_position // 2
    return _rotary(rotary, rpe_type="randrope", max_position_embeddings=half)


def _t5(encoding) -> Keys:
    return {
        "rpe_type": "t5rb",
        "relative_attention_num_buckets": encoding.buckets,
        "relative_attention_max_distance": encoding.max_distance,
    }


def _tape(encoding) -> Keys:
    """The official kind that changes what this encoding does."""
    fields = {field: getattr(encoding, field) for field in ("contextualize", "mixing")}
    usual = {field: getattr(positions.Tape(), field) for field in fields}
    kind = next((kind for kind, change in TAPES.items() if usual | change == fields), "adape")
    keys = {"rpe_type": kind, "position_size": encoding.width}
    scaling = encoding.scaling
    if not isinstance(scaling, positions.DynamicYarnScaling):
        return _rotary(encoding, **keys)
    return _rotary(
        dataclasses.replace(encoding, scaling=positions.Scaling()),
        **keys | {"rpe_type": "adayarn"},
        original_max_position_embeddings=scaling.original,
        max_position_embeddings=round(scaling.factor * scaling.original),
    )


_WRITERS: Mapping[str, Callable[[Any], Keys]] = {
    "rope": _rope,
    "nope": lambda _: {"rpe_type": "nope"},
    "sinusoidal": lambda _: {"rpe_type": "sincos"},
    "alibi": lambda _: {"rpe_type": "alibi"},
    "fire": lambda _: {"rpe_type": "fire"},
    "t5": _t5,
    "xpos": _xpos,
    "randomized": _randomized,
    "tape": _tape,
}
"""Our encoding -> its keys."""
