"""What was trained on top of a base model, in one small file that knows its base.

A safetensors file of some of a model's parameters under their paths; its metadata hold the config
of the whole model and the fingerprint of the base.
"""

import hashlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jaxtyping import Array, Float, UInt32

from tape_jax.config import ModelConfig
from tape_jax.convert.folders import new_file
from tape_jax.convert.source import Held
from tape_jax.convert.start import flatten, parameter_shapes
from tape_jax.convert.tensor_files import open_file, write_file
from tape_jax.saved import from_dict, to_dict

FORMAT = "tape_jax adapter 1"


def fingerprint(params: dict) -> str:
    """A name for these very numbers, whatever devices they lie on: 64 hexadecimal digits.

    Guards against mistakes, not against malice: a leaf enters by 32 bits.
    """
    digest = hashlib.sha256()
    for path, leaf in sorted(flatten(params).items()):
        digest.update(f"{path} {tuple(leaf.shape)} {int(_digest(leaf))}\n".encode())
    return digest.hexdigest()


@jax.jit
def _digest(x: Float[Array, "..."]) -> UInt32[Array, ""]:
    """The sum modulo 2^32, in any order, of every number's bits scrambled with its place."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    place, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        place, stride = place + index * np.uint32(stride % 2**32), stride * x.shape[axis]
    return _scramble(bits ^ _scramble(place)).sum(dtype=jnp.uint32)


def _scramble(h):
    """MurmurHash3's finaliser: every bit of the result depends on all bits of h + 1."""
    h = h + np.uint32(1)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ (h >> shift)) * np.uint32(factor)
    return h ^ (h >> 16)


def save_adapter(file: Path | str, config: ModelConfig, params: dict, base: str) -> None:
    """Writes some of a model's parameters: those that were trained.

    Args:
      file: a new one, `.safetensors`.
      config: of the whole model.
      params: a tree of some of its parameters, of any float dtype.
      base: the `fingerprint` of the parameters that they were trained on top of.

    Raises:
      FileExistsError: the file is there already.
      ValueError: parameters that the model does not have.
    """
    tensors = {path: Held(np.asarray(x)) for path, x in flatten(params).items()}
    _check(file, config, tensors)
    metadata = {"format": FORMAT, "config": json.dumps(to_dict(config)), "base": base}
    with new_file(Path(file)) as partial:
        write_file(partial, tensors, metadata)


def load_adapter(file: Path | str, base: str | None = None) -> tuple[ModelConfig, dict]:
    """The config of the whole model, and the parameters that the file holds as (part of) its tree.

    Args:
      file: what `save_adapter` wrote.
      base: the `fingerprint` of the parameters that they are to be put on; not compared when None.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a damaged file, another kind of file, or an adapter for another base.
    """
    file = Path(file)
    tensors, metadata = open_file(file)
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{file} is no adapter: expected format {FORMAT!r} in its metadata")
    if base is not None and metadata["base"] != base:
        raise ValueError(
            f"{file} is an adapter for another base: it was trained on parameters with the"
            f" fingerprint {metadata['base'][:12]}..., these have {base[:12]}..."
        )
    config = from_dict(ModelConfig, json.loads(metadata["config"]))
    _check(file, config, tensors)
    params = {path: jnp.asarray(tensor.read()) for path, tensor in tensors.items()}
    return config, unflatten_dict(params, sep="/")


def _check(file, config, tensors):
    shapes = parameter_shapes(config)
    for path, tensor in tensors.items():
        want = shapes[path].shape if path in shapes else "no such parameter"
        if tensor.shape != want:
            raise ValueError(f"{file}: {path} has shape {tensor.shape}, the model has {want}")
