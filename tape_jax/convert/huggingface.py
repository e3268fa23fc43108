"""Hugging Face Llama and official TAPE checkpoints: their config and tensors into ours.

The tables below are the whole knowledge. A tensor that no line names is an error; config keys that
do not shape a Llama (token ids, dropout, the library's version) are ignored.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tape_jax import positions
from tape_jax.config import ModelConfig
from tape_jax.convert.encodings import read_position
from tape_jax.errors import unknown
from tape_jax.model import Transformer
from tape_jax.positions.additive import alibi_slopes

_CONFIG_FIELDS = {
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
"""Their config key -> our ModelConfig field."""


def _transpose(x):
    return x.T


def _row_sums(x):
    """The official post_attention_linear acts as its rows' sums (einsum 'bqnd,qe->bqnd')."""
    return x.sum(axis=1)


def _same(x):
    return x


Convert = Callable[[np.ndarray], np.ndarray]
Rule = tuple[str, str, Convert]
_FIRE = r"self_attn\.rotary_emb\."
_TENSORS: tuple[Rule, ...] = (
    (r"model\.embed_tokens\.weight", "embedding/embedding", _same),
    (r"model\.norm\.weight", "final_norm/scale", _same),
    (r"lm_head\.weight", "head/kernel", _transpose),
)
_LAYER_TENSORS: tuple[Rule, ...] = (
    (r"input_layernorm\.weight", "attention_norm/scale", _same),
    (r"post_attention_layernorm\.weight", "mlp_norm/scale", _same),
    *(
        rule
        for theirs, ours in (
            ("self_attn.q_proj", "attention/query"),
            ("self_attn.k_proj", "attention/key"),
            ("self_attn.v_proj", "attention/value"),
            ("self_attn.o_proj", "attention/out"),
            ("mlp.gate_proj", "mlp/gate"),
            ("mlp.up_proj", "mlp/up"),
            ("mlp.down_proj", "mlp/down"),
        )
        for rule in (
            (re.escape(theirs) + r"\.weight", f"{ours}/kernel", _transpose),
            (re.escape(theirs) + r"\.bias", f"{ours}/bias", _same),
        )
    ),
    (r"pe\.up_proj(?:s\.(\d+))?\.weight", "position/w1", _same),
    (r"pe\.x_proj\.weight", "position/gate/kernel", _transpose),
    (r"pe\.down_proj(?:s\.(\d+))?\.weight", "position/w2", _same),
    (r"post_attention_linear(?:s\.(\d+))?\.weight", "position/post", _row_sums),
    (r"self_attn\.relative_attention_bias\.weight", "attention/position/table", _same),
    (_FIRE + r"c", "attention/position/c", _same),
    (_FIRE + r"L_multiplier", "attention/position/multiplier", _same),
    (_FIRE + r"mlp\.0\.weight", "attention/position/w1", np.ravel),
    (_FIRE + r"mlp\.0\.bias", "attention/position/bias1", _same),
    (_FIRE + r"mlp\.2\.weight", "attention/position/w2", _transpose),
    (_FIRE + r"mlp\.2\.bias", "attention/position/bias2", _same),
)
"""Tensor name (regular expression) -> parameter path -> how to turn one into the other.

A group in the expression is the index of one of several copies of the parameter in a layer.
"""


def from_huggingface(
    hf_config: Mapping[str, Any], tensors: Mapping[str, Any], **overrides
) -> tuple[ModelConfig, dict]:
    """Our config and float32 parameters from a Llama or official TAPE checkpoint.

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
    config = _read_config(hf_config, overrides)
    wanted = jax.eval_shape(
        lambda: Transformer(config).init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    )["params"]
    paths, tree = jax.tree_util.tree_flatten_with_path(wanted)
    shapes = {"/".join(k.key for k in path): leaf.shape for path, leaf in paths}
    filled, problems = _place(config, tensors, shapes)
    problems += [f"missing: nothing fills {path}" for path in shapes if path not in filled]
    if problems:
        raise ValueError("checkpoint does not fit its config:\n  " + "\n  ".join(sorted(problems)))
    leaves = [jnp.asarray(filled[path], jnp.float32) for path in shapes]
    return config, jax.tree_util.tree_unflatten(tree, leaves)


def _read_config(hf: Mapping[str, Any], overrides) -> ModelConfig:
    if hf.get("model_type", "llama") != "llama":
        raise ValueError(f"model_type={hf['model_type']!r} is not supported; expected 'llama'")
    if hf.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act={hf['hidden_act']!r} is not supported; expected 'silu'")
    missing = [k for k in list(_CONFIG_FIELDS)[:5] if k not in hf]
    if missing:
        raise ValueError(f"config lacks {', '.join(missing)}")
    fields = {ours: hf[theirs] for theirs, ours in _CONFIG_FIELDS.items() if theirs in hf}
    if "position" not in overrides:
        fields["position"] = read_position(hf)
    for name in overrides:
        if name not in ModelConfig.__dataclass_fields__:
            raise ValueError(unknown("ModelConfig field", name, ModelConfig.__dataclass_fields__))
    return ModelConfig(**fields | overrides)


def _place(config, tensors, shapes):
    """Path -> stacked array for all tensors that fit, and a line for each that does not."""
    filled, layers, problems = {}, {}, []
    for name, tensor in tensors.items():
        check = _find_constant(name)
        if check is not None:
            problems += check(config, name, np.asarray(tensor))
            continue
        path, index, convert = _find(name)
        if path == "head/kernel" and config.tie_embeddings:
            problems += _check_tied(tensors, tensor)
            continue
        layer, *copy = index
        if path not in shapes or (layer is not None and layer >= config.num_layers):
            problems.append(f"unexpected: {name} has no place in this model")
            continue
        value = convert(np.asarray(tensor, np.float32))
        want = shapes[path][0 if layer is None else len(index) :]
        if value.shape != want or any(c >= shapes[path][1] for c in copy):
            problems.append(f"shape: {name} gives {value.shape} for {path}, expected {want}")
        elif layer is None:
            filled[path] = value
        else:
            layers.setdefault(path, {})[index] = value
    for path, rows in layers.items():
        outer = shapes[path][: len(next(iter(rows)))]
        absent = sorted({index[0] for index in np.ndindex(outer) if index not in rows})
        if absent:
            problems.append(f"missing: {path} has no tensor for layers {absent}")
        whole = [] if absent else [rows[index] for index in np.ndindex(outer)]
        filled[path] = np.stack(whole).reshape(shapes[path]) if whole else None
    return filled, problems


def _find(name) -> tuple[str, tuple[int | None, ...], Convert]:
    """(parameter path, (layer or None, copy if any), conversion); an empty path: none fits."""
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    rules, rest = (_LAYER_TENSORS, layer[2]) if layer else (_TENSORS, name)
    for pattern, path, convert in rules:
        if found := re.fullmatch(pattern, rest):
            if not layer:
                return path, (None,), convert
            copies = (int(i) for i in found.groups() if i is not None)
            return "layers/" + path, (int(layer[1]), *copies), convert
    return "", (None,), _same


def _check_frequencies(config, name, tensor):
    """Stored frequencies say nothing new unless they are not the config's: then that is an error.

    The tolerance lets through tables that were rounded to bfloat16 or float16 with the model.
    """
    base = getattr(config.position, "base", None)
    want = None if base is None else positions.frequencies(config.head_width, base)
    if want is None or tensor.shape != want.shape or not np.allclose(tensor, want, 1e-2, 1e-7):
        return [f"unexpected: {name} does not hold the frequencies of base {base}"]
    return []


def _check_slopes(config, name, tensor):
    """The official ALiBi keeps slope_h * j for every head and position in its state dict."""
    slopes = alibi_slopes(config.num_heads)
    want = slopes[:, None] * np.arange(tensor.shape[-1])
    fits = tensor.size == want.size and np.allclose(tensor.reshape(want.shape), want, 1e-2)
    if not fits or not isinstance(config.position, positions.ALiBi):
        return [f"unexpected: {name} does not hold the slopes of {config.num_heads} heads"]
    return []


def _check_threshold(config, name, tensor):
    """The official FIRE keeps its first threshold as a constant."""
    threshold = getattr(config.position, "threshold", None)
    if threshold is None or tensor != threshold:
        return [f"unexpected: {name} is {tensor}, and position.threshold={threshold}"]
    return []


_CONSTANTS = {
    r".*rotary_emb\.inv_freq": _check_frequencies,
    r".*self_attn\.alibi": _check_slopes,
    r".*rotary_emb\.init_L": _check_threshold,
}
"""Tensor name (regular expression) of what follows from the config -> its check."""


def _find_constant(name):
    return next((check for p, check in _CONSTANTS.items() if re.fullmatch(p, name)), None)


def _check_tied(tensors, head):
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None or not np.array_equal(np.asarray(embedding), np.asarray(head)):
        return ["unexpected: lm_head.weight differs from the embedding it should be tied to"]
    return []
