"""GGUF files of the Llama architecture: their keys as a Hugging Face config, their tensors' names.

Quantised numbers are turned into float32 by the gguf package, tensor by tensor. llama.cpp keeps the
rows of query and key projections in interleaved pairs, (d/2, 2); Hugging Face and we keep the two
halves, (2, d/2): the rows are put back before they are dequantised.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tape_jax import positions
from tape_jax.config import ModelConfig
from tape_jax.convert.configs import read_config
from tape_jax.convert.fill import load_params
from tape_jax.convert.names import EMBEDDING, HEAD
from tape_jax.convert.source import Index, Source
from tape_jax.convert.tensor_files import Track
from tape_jax.errors import unknown

_KEYS = {
    "vocab_size": "vocab_size",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
}
"""Their key, after "llama." -> Hugging Face's."""

_REFUSED = (
    "expert_count",
    "attention.sliding_window",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
)
"""Keys of what is more than a Llama, or another scaling than ours, when they are not 0."""

_SCALINGS: Mapping[str, Callable[[Mapping[str, Any]], dict | None]] = {
    "none": lambda keys: None,
    "linear": lambda keys: {"type": "linear", "factor": keys["rope.scaling.factor"]},
    "yarn": lambda keys: {
        "rope_type": "yarn",
        "factor": keys["rope.scaling.factor"],
        "original_max_position_embeddings": keys["rope.scaling.original_context_length"],
    },
}
"""rope.scaling.type -> Hugging Face's rope_scaling."""

_NAMES = {
    "token_embd": EMBEDDING.removesuffix(".weight"),
    "output_norm": "model.norm",
    "output": HEAD.removesuffix(".weight"),
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_PERMUTED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
_FACTORS = "rope_freqs.weight"


def load_gguf(
    file: Path | str,
    *,
    mesh: jax.sharding.Mesh | None = None,
    seed: int = 0,
    track: Track = iter,
    **overrides,
) -> tuple[ModelConfig, dict]:
    """Our config and float32 parameters from a GGUF file, dequantised tensor by tensor.

    Arguments are those of `load_huggingface`.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: a damaged file, another architecture, anything else that we cannot honour, or no
        gguf package; names the extra that brings it.
    """
    file = Path(file)
    hf, tensors = open_gguf(file)
    try:
        config = read_config(hf, overrides)
        new = "position" in overrides
        params = load_params(config, tensors, mesh=mesh, seed=seed, new_position=new, track=track)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error
    return config, params


def read_gguf_config(file: Path | str, **overrides) -> tuple[ModelConfig, int | None]:
    """The config that `load_gguf` would give, and the length the model was trained on.

    Raises:
      As `load_gguf`.
    """
    hf, _ = open_gguf(Path(file))
    return read_config(hf, overrides), hf.get("max_position_embeddings")


def open_gguf(file: Path) -> tuple[dict[str, Any], dict[str, Source]]:
    """The config and the tensors, not yet read, of a GGUF file, in Hugging Face's names.

    Raises:
      As `load_gguf`.
    """
    reader = gguf_reader(file)
    named = reader.fields.get("general.architecture")
    architecture = None if named is None else named.contents()
    if architecture != "llama":
        raise ValueError(f"{file}: architecture {architecture!r} is not supported, only 'llama'")
    keys = {
        key.removeprefix("llama."): _shortest(field.contents())
        for key, field in reader.fields.items()
        if key.startswith("llama.")
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    factors = tensors.pop(_FACTORS, None)
    try:
        hf = _config(keys, tensors, None if factors is None else factors.data)
        return hf, {_name(name): _source(name, x, keys) for name, x in tensors.items()}
    except (KeyError, ValueError) as error:
        lacking = "lacks the key " if isinstance(error, KeyError) else ""
        raise ValueError(f"{file}: {lacking}{error}") from error


def gguf_reader(file: Path):
    """The gguf package's reader, the last one kept: opening a vocabulary takes seconds.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the package is missing, or the file is cut off or no GGUF file.
    """
    if not file.exists():
        raise FileNotFoundError(f"{file} does not exist")
    now = file.stat()
    return _open(file, now.st_mtime_ns, now.st_size)


@functools.lru_cache(maxsize=1)
def _open(file: Path, *version: int):
    try:
        import gguf
    except ModuleNotFoundError as error:
        message = 'GGUF files need the gguf package: pip install "tape-jax[convert]"'
        raise ValueError(message) from error
    try:
        return gguf.GGUFReader(file)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{file} is cut off, or no GGUF file: {error}") from error


def _shortest(value):
    """A float32 as the number that was meant: 1e-05, not 9.999999747378752e-06."""
    if not isinstance(value, float):
        return value
    return float(np.format_float_scientific(np.float32(value)))


def _config(keys, tensors, factors) -> dict[str, Any]:
    for key in _REFUSED:
        if keys.get(key):
            raise ValueError(f"llama.{key}={keys[key]} is not supported")
    hf = {theirs: keys[key] for key, theirs in _KEYS.items() if key in keys}
    hf.setdefault("vocab_size", int(tensors["token_embd.weight"].shape[-1]))
    heads = hf["hidden_size"] // hf["num_attention_heads"]
    turned = keys.get("rope.dimension_count", hf.get("head_dim", heads))
    if turned != hf.get("head_dim", heads):
        raise ValueError(
            f"llama.rope.dimension_count={turned} turns a part of each head of"
            f" {hf.get('head_dim', heads)} only, which is not supported"
        )
    hf["tie_word_embeddings"] = "output.weight" not in tensors
    hf["attention_bias"] = "blk.0.attn_q.bias" in tensors
    hf["mlp_bias"] = "blk.0.ffn_gate.bias" in tensors
    kind = keys.get("rope.scaling.type", "none")
    if kind not in _SCALINGS:
        raise ValueError(unknown("llama.rope.scaling.type", kind, _SCALINGS))
    hf["rope_scaling"] = _SCALINGS[kind](keys)
    if factors is not None:
        hf["rope_scaling"] = _llama3(hf, np.asarray(factors, np.float64), 2 * len(factors))
    return hf


def _llama3(hf, factors, width) -> dict[str, Any]:
    """Llama 3.1's scaling, which GGUF keeps as what each frequency is divided by.

    The only ones in the field have these lengths; that they are meant is checked.
    """
    scaling = positions.Llama3Scaling(float(factors.max()), original=8192, low=1.0, high=4.0)
    base = hf.get("rope_theta", 10_000.0)
    freqs = positions.frequencies(width, base)
    want = freqs / scaling.frequencies(freqs, base, 0)
    if hf["rope_scaling"] is not None or not np.allclose(factors, want, rtol=1e-3):
        raise ValueError(
            f"{_FACTORS} does not hold the factors of Llama 3.1's scaling (original length 8192);"
            " no other is supported"
        )
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original,
        "low_freq_factor": scaling.low,
        "high_freq_factor": scaling.high,
    }


def _name(name: str) -> str:
    """Hugging Face's name of a tensor; its own, which nothing else knows, when there is none."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    table = _NAMES if found is None or found[1] is None else _LAYER_NAMES
    if found is None or found[2] not in table:
        return name
    layer = "" if found[1] is None else f"model.layers.{found[1]}."
    return f"{layer}{table[found[2]]}.{found[3]}"


def _source(name, tensor, keys) -> Source:
    shape = tuple(int(n) for n in reversed(tensor.shape))
    part, order = name.split(".")[-2], None
    if part in _PERMUTED:
        every = keys["attention.head_count"]
        order = _halves(shape[0], keys.get(_PERMUTED[part], every))
    return Quantised(tensor.data, tensor.tensor_type, shape, order)


def _halves(rows: int, heads: int) -> np.ndarray:
    """The rows (heads d), whose pairs within a head are interleaved, in the order of its halves."""
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


@dataclasses.dataclass(frozen=True)
class Quantised:
    """A tensor of a GGUF file.

    Attributes:
      rows: its bytes or numbers as they are in the file, mapped into memory, a row at a time.
      kind: gguf's quantisation type.
      shape: of the numbers.
      order: rows of the file in the order wanted; None: as they are.
    """

    rows: np.ndarray
    kind: Any
    shape: tuple[int, ...]
    order: np.ndarray | None = None
    dtype: np.dtype = dataclasses.field(default=np.dtype(np.float32))

    def read(self, index: Index = ()) -> np.ndarray:
        """The numbers of these rows, dequantised, then of these columns.

        Raises:
          ValueError: a quantisation that the gguf package cannot undo.
        """
        import gguf

        rows = self.rows[index[:1] if self.order is None else self.order[index[:1]]]
        try:
            numbers = gguf.quants.dequantize(rows, self.kind)
        except NotImplementedError as error:
            raise ValueError(f"quantisation {self.kind.name} cannot be read") from error
        return numbers.reshape(len(rows), *self.shape[1:])[(slice(None), *index[1:])]
