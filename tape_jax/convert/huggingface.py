"""Hugging Face Llama and official TAPE checkpoints: into our parameters and back."""

import dataclasses
import functools
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tape_jax.config import ModelConfig
from tape_jax.convert.configs import read_config, read_json, write_config
from tape_jax.convert.fill import load_params
from tape_jax.convert.folders import new_folder
from tape_jax.convert.names import Conversion, Rule, parts
from tape_jax.convert.source import Held, Index, Source
from tape_jax.convert.start import flatten, parameter_shapes
from tape_jax.convert.tensor_files import DTYPES, Track, open_folder, write_folder
from tape_jax.errors import unknown

SHARD_BYTES = 4 << 30
_FLOATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def from_huggingface(
    hf_config: Mapping[str, Any], tensors: Mapping[str, Any], **overrides
) -> tuple[ModelConfig, dict]:
    """Our config and float32 parameters from a Llama or official TAPE checkpoint in memory.

    Args:
      hf_config: the parsed config.json; both the old (`rope_theta`, `rope_scaling`) and the new
        (`rope_parameters`) style, and the official TAPE keys (`rpe_type`, `position_size`, `shift`
        and others: `tape_jax.convert.encodings`).
      tensors: state-dict name -> array, Linear weights (out, in).
      **overrides: ModelConfig fields that win over the file's.

    Raises:
      ValueError: a config we cannot honour, or tensors that do not fit; every missing,
        superfluous and misshapen tensor is listed.
    """
    config = read_config(hf_config, overrides)
    sources = {name: Held(np.asarray(tensor)) for name, tensor in tensors.items()}
    return config, load_params(config, sources, new_position="position" in overrides)


def load_huggingface(
    folder: Path | str,
    *,
    mesh: jax.sharding.Mesh | None = None,
    seed: int = 0,
    track: Track = iter,
    **overrides,
) -> tuple[ModelConfig, dict]:
    """Our config and float32 parameters from a checkpoint's folder, read tensor by tensor.

    Host memory beside the parameters: one tensor. With `position="tape"` a plain Llama becomes a
    TAPE model that computes what it did: the encoding takes its frequencies from the checkpoint and
    starts its own parameters from `seed`.

    Args:
      folder: config.json and model.safetensors, or its shards with their index.
      mesh: parameters go onto it as `tape_jax.sharding.parameter_shardings` plans; without one, to
        the default device.
      seed: of parameters that the checkpoint cannot have.
      track: wraps the tensors to read, for a progress bar.
      **overrides: ModelConfig fields that win over the file's. A `position` by name keeps the
        checkpoint's rotations; one that is an encoding is taken as it is.

    Raises:
      FileNotFoundError: no config or no weights there, or a missing shard.
      ValueError: what `from_huggingface` refuses, or a damaged file.
    """
    folder = Path(folder)
    config = read_config(read_json(folder), overrides)
    tensors = open_folder(folder)
    try:
        params = load_params(
            config,
            dict(sorted(tensors.items(), key=lambda item: (item[1].file, item[1].offset))),
            mesh=mesh,
            seed=seed,
            new_position="position" in overrides,
            track=track,
        )
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    return config, params


def read_huggingface_config(folder: Path | str, **overrides) -> tuple[ModelConfig, int | None]:
    """The config that `load_huggingface` would give, and the length the model was trained on.

    Raises:
      FileNotFoundError: no config.json there.
      ValueError: a config we cannot honour.
    """
    hf = read_json(Path(folder))
    return read_config(hf, overrides), hf.get("max_position_embeddings")


def save_huggingface(
    folder: Path | str,
    config: ModelConfig,
    params: dict,
    *,
    dtype: str = "float32",
    length: int | None = None,
    token_ids: Mapping[str, int | None] = MappingProxyType({}),
    extra_files: Iterable[Path] = (),
    shard_bytes: int = SHARD_BYTES,
    track: Track = iter,
) -> None:
    """Writes a checkpoint that transformers (plain RoPE) or the official TAPE code can load.

    One tensor at a time is in host memory. The folder appears when everything is in it.

    Args:
      folder: a new one.
      config: the model.
      params: its parameters, on whatever devices of this process.
      dtype: of the tensors: "float32", "bfloat16" or "float16".
      length: what it was trained on, written as max_position_embeddings (2048 when None) unless
        the encoding implies another.
      token_ids: `bos_token_id` and `eos_token_id`, where generation starts and stops; none when not
        given, since what transformers would take instead is another model's.
      extra_files: copied beside: the tokenizer's.
      shard_bytes: above this size, several files and an index are written.
      track: wraps the names of the tensors to write, for a progress bar.

    Raises:
      FileExistsError: the folder is there already.
      ValueError: what their format cannot express; names the fields and what would do.
    """
    if dtype not in _FLOATS:
        raise ValueError(unknown("dtype", dtype, _FLOATS))
    marks = {"bos_token_id": None, "eos_token_id": None} | dict(token_ids)
    hf = write_config(config, dtype=dtype, length=length) | marks
    tensors = to_huggingface(config, params, dtype=dtype)
    with new_folder(Path(folder)) as partial:
        (partial / "config.json").write_text(json.dumps(hf, indent=2) + "\n")
        for file in extra_files:
            shutil.copy(file, partial)
        write_folder(partial, tensors, shard_bytes, track)


def to_huggingface(
    config: ModelConfig, params: dict, *, dtype: str = "float32"
) -> dict[str, Source]:
    """The tensors of a checkpoint, each made from the parameters when it is read.

    Raises:
      ValueError: a parameter that their format has no place for, or that is not the config's.
    """
    flat, shapes = flatten(params), parameter_shapes(config)
    for path in sorted(flat.keys() ^ shapes.keys()):
        raise ValueError(f"parameter {path!r} is {'not ' * (path in flat)}one of this config's")
    copied = getattr(config.position, "mixing", None) == "separate"
    return {
        rule.name(index): Ours(leaf, rule, index, DTYPES[_FLOATS[dtype]])
        for path, leaf in flat.items()
        for rule, index in parts(path, leaf.shape, copied=copied)
    }


@dataclasses.dataclass(frozen=True)
class Ours:
    """One tensor of theirs, made from the part at `index` of a parameter of ours."""

    leaf: Array
    rule: Rule
    index: tuple[int, ...]
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As theirs."""
        return self.rule.conversion.their_shape(self.leaf.shape[len(self.index) :])

    def read(self, index: Index = ()) -> np.ndarray:
        """Converted on the device, then fetched."""
        where = tuple(map(np.int32, self.index))
        return np.asarray(_part(self.leaf, where, self.rule.conversion, self.dtype))[index]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _part(leaf, index, conversion: Conversion, dtype):
    for i in index:
        leaf = jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False)
    return conversion.backward(leaf).astype(jnp.dtype(dtype))
