"""LoRA factors as an adapter that Hugging Face's PEFT loads onto its Llama."""

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path

from tape_jax.config import ModelConfig
from tape_jax.convert.configs import write_config
from tape_jax.convert.folders import new_folder
from tape_jax.convert.huggingface import Ours
from tape_jax.convert.names import EMBEDDING, HEAD, RULES, TRANSPOSED, Rule, parts
from tape_jax.convert.start import flatten
from tape_jax.convert.tensor_files import DTYPES, write_file

_FACTORS = {"lora_a": "lora_A", "lora_b": "lora_B"}
_PREFIX = "base_model.model."


def save_peft(
    folder: Path | str,
    config: ModelConfig,
    params: dict,
    base_name: str,
    *,
    trained: Collection[str] = (),
) -> None:
    """Writes adapter_config.json and adapter_model.safetensors, in float32.

    Args:
      folder: a new one.
      config: the model, with `lora`.
      params: its parameters: `lora_a` (L, in, r) and `lora_b` (L, r, out) beside their kernels.
      base_name: name or path of the base in Hugging Face's format.
      trained: paths of parameters that were trained whole, such as "embedding/embedding": they go
        along, as PEFT's modules_to_save do.

    Raises:
      FileExistsError: the folder is there already.
      ValueError: a model without LoRA, or one whose base transformers does not have.
    """
    if config.lora is None:
        raise ValueError("model.lora is None: there are no factors to write")
    _check_base(config)
    flat, dtype, modules, tensors = flatten(params), DTYPES["F32"], set(), {}
    for path, leaf in flat.items():
        if path.rsplit("/", 1)[-1] in _FACTORS:
            rule = _factor_rule(path)
            for layer in range(leaf.shape[0]):
                name = _PREFIX + rule.name((layer,))
                tensors[name] = Ours(leaf, rule, (layer,), dtype)
    for path in trained:
        for rule, index in parts(path, flat[path].shape, copied=False):
            tensors[_PREFIX + rule.name(index)] = Ours(flat[path], rule, index, dtype)
            modules.add(rule.theirs.removeprefix("model.layers.{layer}.").removesuffix(".weight"))
    if config.tie_embeddings and _PREFIX + EMBEDDING in tensors:
        # A module that PEFT replaces is tied to nothing: the head goes along.
        tensors[_PREFIX + HEAD] = tensors[_PREFIX + EMBEDDING]
        modules.add(HEAD.removesuffix(".weight"))
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(config.lora.targets),
        "modules_to_save": sorted(modules) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with new_folder(Path(folder)) as partial:
        (partial / "adapter_config.json").write_text(json.dumps(about, indent=2) + "\n")
        write_file(partial / "adapter_model.safetensors", tensors, {"format": "pt"})


def _check_base(config):
    keys = write_config(dataclasses.replace(config, lora=None), dtype="float32")
    if "rpe_type" in keys:
        raise ValueError(
            f"position.name={config.position.name!r} is not in transformers' Llama, onto which PEFT"
            " puts its adapters: use save_adapter"
        )


def _factor_rule(path: str) -> Rule:
    """Where a factor goes: beside the weight of its projection."""
    module, leaf = path.rsplit("/", 1)
    kernel = next(rule for rule in RULES if rule.ours == f"{module}/kernel")
    theirs = kernel.theirs.replace(".weight", f".{_FACTORS[leaf]}.weight")
    return Rule(theirs, path, TRANSPOSED)
