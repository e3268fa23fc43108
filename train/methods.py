"""What a fine-tuning run makes of a pre-trained model, and which weights it trains.

A method changes the base's `ModelConfig` once, before training. What it changes is in the config of
the run from then on, so training, evaluation and decoding see the same positions.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from tape_jax import ModelConfig, positions
from tape_jax.errors import check_choices, unknown
from tape_jax.lora import LoRA
from tape_jax.positions.rotary import Rotary

ALSO: Mapping[str, str] = {
    "embeddings": r"embedding/embedding",
    "norms": r"(layers/(attention|mlp)|final)_norm/scale",
    "head": r"head/kernel",
}
"""Parts that can be trained beside what a method is about -> the paths of their parameters."""


@dataclasses.dataclass(frozen=True)
class Method:
    """Training from scratch, and the base of all methods: every weight is trained.

    Attributes:
      base: the rotary base instead of the checkpoint's ("theta scaling"); None keeps it.
      scaling: of the positions; "none" keeps the checkpoint's.
    """

    name: str = "scratch"
    base: float | None = None
    scaling: positions.Scaling = positions.Scaling()

    def validate(self, length: int) -> None:
        """Raises ValueError, naming field, value and fix; rows have `length` tokens."""
        check_choices(self, "method")
        if type(self) is Method and (self.base is not None or self.scaling != positions.Scaling()):
            raise ValueError(
                "method.name='scratch' changes nothing: set model.position.base and"
                " model.position.scaling, or choose another method"
            )

    def adapt(self, model: ModelConfig) -> ModelConfig:
        """The model that is trained, from that of the checkpoint.

        Raises:
          ValueError: a model that the method cannot change.
        """
        if self.base is None and self.scaling == positions.Scaling():
            return model
        return dataclasses.replace(model, position=self._stretch(model.position))

    def _stretch(self, position: positions.Encoding) -> Rotary:
        """The same positions with this base and scaling."""
        if not isinstance(position, Rotary):
            raise ValueError(
                f"method.name={self.name!r} changes rotations, and the checkpoint's positions are"
                f" {position.name!r}"
            )
        scaled = self.scaling != positions.Scaling()
        if scaled and position.scaling not in (positions.Scaling(), self.scaling):
            raise ValueError(
                f"method.scaling.name={self.scaling.name!r} would replace the scaling"
                f" {position.scaling.name!r} that the checkpoint was trained with: use 'none'"
            )
        scaling = self.scaling if scaled else position.scaling
        base = position.base if self.base is None else self.base
        return dataclasses.replace(position, base=base, scaling=scaling)

    def stretched_like(self, other: Method) -> Method:
        """With base and scaling of another method, if this one sets neither."""
        if self.base is not None or self.scaling != positions.Scaling():
            return self
        return dataclasses.replace(self, base=other.base, scaling=other.scaling)

    def trains(self, path: str) -> bool:
        """Whether the parameter at this slash-separated path is trained."""
        return True

    def training_model(self, model: ModelConfig) -> ModelConfig:
        """The model as the training step computes it; evaluation takes `model`."""
        return model


@dataclasses.dataclass(frozen=True)
class Full(Method):
    """Every weight of a checkpoint is trained."""

    name: str = "full"


@dataclasses.dataclass(frozen=True)
class TapeMethod(Method):
    """TAPE put into a rotary model; a new one computes exactly what the base does.

    Attributes:
      reading: "paper": all position weights are trained and nothing else (section 3.3). "official":
        what the published script trains: the position MLP (its matrix after the attention stays
        frozen at zero), the embeddings and the norms; with the official code's flavour.
      width: P of the position MLP; 4 H when None.
    """

    name: str = "tape"
    reading: Literal["paper", "official"] = "paper"
    width: int | None = None

    def adapt(self, model):
        """The base with its rotations as TAPE's start; a TAPE model stays the one it is."""
        stretched = self._stretch(model.position)
        if isinstance(stretched, positions.Tape):
            if self.width not in (None, stretched.width):
                raise ValueError(
                    f"method.width={self.width}, and the checkpoint's position.width is"
                    f" {stretched.width}: leave it None"
                )
            return dataclasses.replace(model, position=stretched)
        if type(stretched) is not positions.RoPE or stretched.log_length is not None:
            raise ValueError(
                "TAPE starts from plain rotations (no log_length), and the checkpoint's positions"
                f" are {stretched.name!r}"
            )
        flavour: dict[str, Any] = _FLAVOURS[self.reading]
        tape = positions.Tape(
            base=stretched.base,
            shift=stretched.shift,
            scaling=stretched.scaling,
            width=self.width,
            **flavour,
        )
        return dataclasses.replace(model, position=tape)

    def trains(self, path):
        """The reading's."""
        return any(re.fullmatch(pattern, path) for pattern in _READINGS[self.reading])


_FLAVOURS = {"paper": {}, "official": {"post": "scalar", "zero": "w1"}}
_READINGS = {
    "paper": (r"layers/position/.*",),
    "official": (r"layers/position/(w1|w2|gate/kernel)", ALSO["embeddings"], ALSO["norms"]),
}


@dataclasses.dataclass(frozen=True)
class LoraMethod(Method):
    """Low-rank updates of projections.

    Attributes:
      rank, alpha, targets: as in PEFT (r, lora_alpha, target_modules).
      also: parts that are trained in full beside them: "embeddings", "norms", "head".
      groups: LongLoRA's shifted sparse attention with this many groups, in training only.
    """

    name: str = "lora"
    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    also: tuple[str, ...] = ()
    groups: int | None = None

    @property
    def lora(self) -> LoRA:
        """The update."""
        return LoRA(self.rank, self.alpha, self.targets)

    def validate(self, length):
        """Raises ValueError for an update that cannot be, an unknown part, or groups too many."""
        super().validate(length)
        _ = self.lora
        if self.groups is not None and (self.groups < 1 or length % (2 * self.groups)):
            raise ValueError(
                f"method.groups={self.groups} and their halves do not cut rows of {length} tokens:"
                f" use rows of a multiple of {2 * max(self.groups, 1)}, or other groups"
            )
        for part in self.also:
            if part not in ALSO:
                raise ValueError(unknown("method.also", part, ALSO))

    def adapt(self, model):
        """The base with updates beside its projections."""
        if model.lora is not None:
            raise ValueError("the checkpoint already has low-rank updates: merge them first")
        if "head" in self.also and model.tie_embeddings:
            raise ValueError(
                "method.also has 'head', and this model's head is its embedding: use 'embeddings'"
            )
        return dataclasses.replace(super().adapt(model), lora=self.lora)

    def trains(self, path):
        """The updates and what is trained beside them."""
        beside = any(re.fullmatch(ALSO[part], path) for part in self.also)
        return beside or path.rpartition("/")[2] in ("lora_a", "lora_b")

    def training_model(self, model):
        """In groups, where there are any."""
        return dataclasses.replace(model, shifted_groups=self.groups)


METHODS: Mapping[str, type[Method]] = {
    "scratch": Method,
    "full": Full,
    "tape": TapeMethod,
    "lora": LoraMethod,
}
"""Name -> class."""

VARIANTS: Mapping[str, Method] = {
    # LongLoRA: sparse training, embeddings and norms too (section 3.3 there).
    "longlora": LoraMethod(also=("embeddings", "norms"), groups=4),
    # A larger base; the TAPE paper's baseline of that name divides positions by 2 as well.
    "theta": LoraMethod(base=1e6),
    "theta-linear": LoraMethod(base=1e6, scaling=positions.LinearScaling(2.0)),
    "pi": LoraMethod(scaling=positions.LinearScaling(2.0)),
    "yarn": LoraMethod(scaling=positions.YarnScaling(2.0, 4096)),
}
"""Names for settings of LoRA that comparisons ask for."""


def get(name: str) -> Method:
    """A method or a variant by name.

    Raises:
      ValueError: an unknown name, with the nearest known ones.
    """
    if name in VARIANTS:
        return VARIANTS[name]
    if name not in METHODS:
        raise ValueError(unknown("method", name, (*METHODS, *VARIANTS)))
    return METHODS[name]()
