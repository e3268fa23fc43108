"""Which encoding a checkpoint's config.json asks for: Hugging Face's and the official TAPE keys."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from tape_jax import positions
from tape_jax.errors import unknown

Config = Mapping[str, Any]


def read_position(hf: Config) -> positions.Encoding:
    """The encoding of a Llama (`rope_scaling`, `rope_parameters`) or official TAPE (`rpe_type`).

    Raises:
      ValueError: a kind we do not know, with the nearest names, or one without its fields.
    """
    rpe_type = hf.get("rpe_type")
    if rpe_type not in _ENCODINGS:
        raise ValueError(unknown("rpe_type", str(rpe_type), filter(None, _ENCODINGS)))
    return _ENCODINGS[rpe_type](hf)


# --- Scalings -------------------------------------------------------------------------------------


def _parameters(hf: Config) -> Config:
    """Where either style of config keeps the base and the scaling."""
    return hf.get("rope_parameters") or hf.get("rope_scaling") or {}


def _kind(hf: Config) -> str:
    scaling = _parameters(hf)
    return scaling.get("rope_type", scaling.get("type", "default"))


def _field(hf: Config, name: str) -> Any:
    scaling = _parameters(hf)
    if name not in scaling:
        raise ValueError(f"rope_scaling of type {_kind(hf)!r} lacks {name!r}")
    return scaling[name]


def _original(hf: Config) -> int:
    """The training length: beside the scaling, beside everything, or the length of the model."""
    name = "original_max_position_embeddings"
    found = _parameters(hf).get(name) or hf.get(name) or hf.get("max_position_embeddings")
    if found is None:
        raise ValueError(f"rope_scaling of type {_kind(hf)!r} lacks {name!r}")
    return int(found)


def _yarn(hf: Config) -> positions.YarnScaling:
    scaling = _parameters(hf)
    fields = ("beta_fast", "beta_slow", "attention_factor")
    given = {name: scaling[name] for name in fields if scaling.get(name) is not None}
    refused = [name for name in ("mscale", "mscale_all_dim", "truncate") if name in scaling]
    if refused:
        raise ValueError(f"rope_scaling of type 'yarn' with {', '.join(refused)} is not supported")
    return positions.YarnScaling(float(_field(hf, "factor")), _original(hf), **given)


def _llama3(hf: Config) -> positions.Llama3Scaling:
    return positions.Llama3Scaling(
        factor=float(_field(hf, "factor")),
        original=int(_field(hf, "original_max_position_embeddings")),
        low=float(_field(hf, "low_freq_factor")),
        high=float(_field(hf, "high_freq_factor")),
    )


_SCALINGS: Mapping[str, Callable[[Config], positions.Scaling]] = {
    "default": lambda hf: positions.Scaling(),
    "linear": lambda hf: positions.LinearScaling(float(_field(hf, "factor"))),
    "dynamic": lambda hf: positions.DynamicNTKScaling(
        float(_field(hf, "factor")), int(hf["max_position_embeddings"])
    ),
    "yarn": _yarn,
    "llama3": _llama3,
}
"""`rope_type` (once `type`) -> our scaling."""


def _scaling(hf: Config, known=tuple(_SCALINGS)) -> positions.Scaling:
    if _kind(hf) not in known:
        raise ValueError(unknown("rope_scaling type", _kind(hf), known))
    return _SCALINGS[_kind(hf)](hf)


# --- Encodings ------------------------------------------------------------------------------------


def _rotary(hf: Config) -> dict[str, Any]:
    theta = _parameters(hf).get("rope_theta", hf.get("rope_theta", 10_000.0))
    return {"base": float(theta), "shift": int(hf.get("shift") or 0)}


def _rope(hf: Config) -> positions.RoPE:
    log_length = int(hf["train_scale"]) if hf.get("log_scale") else None
    return positions.RoPE(**_rotary(hf), scaling=_scaling(hf), log_length=log_length)


def _official_yarn(hf: Config) -> positions.RoPE:
    """models/llama/yarn.py: the factor is ceil(max / original), whatever the config says."""
    original = _original(hf)
    factor = math.ceil(hf["max_position_embeddings"] / original)
    return positions.RoPE(**_rotary(hf), scaling=positions.YarnScaling(float(factor), original))


def _xpos(hf: Config) -> positions.XPos:
    """models/llama/xpos.py: S = 2048, centred on the model's length."""
    center = int(hf["max_position_embeddings"]) // 2
    return positions.XPos(**_rotary(hf), scale=2048.0, center=center)


def _randomized(hf: Config) -> positions.Randomized:
    """models/llama/randrope.py draws from twice the model's length, at evaluation too."""
    inner = positions.RoPE(**_rotary(hf))
    most = 2 * int(hf["max_position_embeddings"])
    return positions.Randomized(inner=inner, max_position=most, evaluation="draw")


def _t5(hf: Config) -> positions.T5:
    return positions.T5(
        buckets=int(hf["relative_attention_num_buckets"]),
        max_distance=int(hf["relative_attention_max_distance"]),
    )


def _tape(**fields) -> Callable[[Config], positions.Tape]:
    """models/llama/ada*.py: the official flavour, with what the variant changes."""

    def read(hf: Config) -> positions.Tape:
        # Their positions are divided by the factor whatever the type says; another type would
        # silently mean something else here.
        scaling = _scaling(hf, known=("default", "linear"))
        official = {"post": "scalar", "zero": "w1", "width": hf.get("position_size")}
        every: dict[str, Any] = _rotary(hf) | official | {"scaling": scaling} | fields
        return positions.Tape(**every)

    return read


def _tape_yarn(hf: Config) -> positions.Tape:
    """models/llama/adayarn.py: the temperature of max / original up to the original length."""
    original = _original(hf)
    factor = hf["max_position_embeddings"] / original
    scaling = positions.DynamicYarnScaling(factor, original)
    plain = {**hf, "rope_scaling": None, "rope_parameters": None}
    return _tape(scaling=scaling)(plain)


TAPES: Mapping[str, dict[str, Any]] = {
    "adape": {},
    "adamlp": {"contextualize": "mlp"},
    "adattention": {"contextualize": "attention"},
    "adatensor": {"mixing": "separate"},
    "adavector": {"mixing": "channels"},
    "adawoeq": {"mixing": "all"},
}
"""Official kinds of TAPE -> what they change of ours."""

_ENCODINGS: Mapping[str | None, Callable[[Config], positions.Encoding]] = {
    None: _rope,
    "rope": _rope,
    "nope": lambda hf: positions.NoPE(),
    "sincos": lambda hf: positions.Sinusoidal(),
    "alibi": lambda hf: positions.ALiBi(),
    "fire": lambda hf: positions.Fire(),
    "t5rb": _t5,
    "xpos": _xpos,
    "randrope": _randomized,
    "yarn": _official_yarn,
    **{kind: _tape(**fields) for kind, fields in TAPES.items()},
    "adayarn": _tape_yarn,
}
"""Official `rpe_type` -> our encoding; a plain Llama has none."""
