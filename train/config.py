"""TrainConfig: what an experiment is, how it is checked, saved and read back."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from pallas_kernels import IMPLEMENTATIONS
from tape_jax import ModelConfig, positions, saved
from tape_jax.errors import check_choices, unknown
from tape_jax.saved import to_dict as to_dict
from train import methods
from train.data.addition import Addition
from train.data.state_tracking import StateTracking
from train.data.task import Task
from train.data.tokens import Tokens
from train.mesh import MeshConfig, check_divisible
from train.optimizer import OptimizerConfig

TASKS: dict[str, type[Task]] = {
    "addition": Addition,
    "state-tracking": StateTracking,
    "tokens": Tokens,
}


@dataclasses.dataclass(frozen=True)
class Registry:
    """The kinds of a base class.

    Attributes:
      classes: by the `name` field of their instances: how a saved config finds its classes.
      make: an instance from a name, which may also be that of a variant; raises ValueError.
    """

    classes: Mapping[str, type]
    make: Callable[[str], Any]


def _registry(kind: str, classes: Mapping[str, type]) -> Registry:
    """A registry without variants; `kind` is what an unknown name is said to be none of."""

    def make(name: str) -> Any:
        if name not in classes:
            raise ValueError(unknown(kind, name, classes))
        return classes[name]()

    return Registry(classes, make)


REGISTRIES: Mapping[type, Registry] = {
    positions.Encoding: Registry(positions.ENCODINGS, positions.get),
    positions.Scaling: _registry("scaling", positions.SCALINGS),
    positions.Start: _registry("start", positions.STARTS),
    Task: _registry("task", TASKS),
    methods.Method: Registry(methods.METHODS, methods.get),
}
"""Base class -> its kinds. Whatever part of a config is an instance can be chosen by name."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One experiment.

    Attributes:
      model: what is trained. A method has already changed it.
      method: which weights are trained, and what it makes of a checkpoint's model.
      steps: optimizer steps; `batch_size` sequences each, in `accumulation` micro-batches.
      seed: of initialisation, data and everything else drawn.
      log_every, eval_every, save_every: in steps. The last step is always evaluated and saved.
      keep: newest checkpoints kept.
    """

    name: str
    model: ModelConfig
    task: Task
    optimizer: OptimizerConfig = OptimizerConfig()
    method: methods.Method = methods.Method()
    mesh: MeshConfig = MeshConfig()
    steps: int = 10_000
    batch_size: int = 512
    accumulation: int = 1
    seed: int = 0
    log_every: int = 10
    eval_every: int = 1_000
    save_every: int = 500
    keep: int = 3

    def validate(self) -> None:
        """Everything that can be known before compilation.

        Raises:
          ValueError: the first field that cannot work, its value and what would.
        """
        for field in ("steps", "log_every", "eval_every", "save_every", "keep"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be >= 1")
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be >= 0")
        if self.model.dtype == "float16":
            raise ValueError("model.dtype='float16' needs loss scaling; train in 'bfloat16'")
        check_names(self)
        check_platform(self.model)
        check_choices(self.task, "task")
        check_choices(self.optimizer, "optimizer")
        self.task.validate()
        self.optimizer.validate(self.steps)
        self.check_sizes(jax.device_count())
        if self.batch_size % jax.process_count():
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of the {jax.process_count()}"
                " processes"
            )

    def check_sizes(self, devices: int) -> None:
        """What has to fit before a step can be compiled for so many devices.

        Raises:
          ValueError: the first field that does not fit the others, its value and what would.
        """
        self.method.validate(self.task.length)
        self.method.training_model(self.model)  # its config checks itself
        self.model.position.default_positions(self.task.longest)  # those that it reaches
        if self.model.vocab_size < self.task.vocab_size:
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size} must be >= {self.task.vocab_size}, the"
                f" ids of task {self.task.name!r}"
            )
        check_divisible(
            self.mesh, devices, self.model, self.batch_size, self.accumulation, self.task.length
        )


def registered(config: Any, path: str = "") -> Iterator[tuple[str, Registry, Any]]:
    """(path, registry, part) of every part of a config that is chosen by name, outermost first."""
    for field in dataclasses.fields(config):
        part, where = getattr(config, field.name), f"{path}{field.name}"
        if not dataclasses.is_dataclass(part):
            continue
        for base, registry in REGISTRIES.items():
            if isinstance(part, base):
                yield where, registry, part
        yield from registered(part, f"{where}.")


def check_names(config: Any) -> None:
    """Raises ValueError when the `name` of a registered part is not that of its class."""
    for path, registry, part in registered(config):
        if part.name not in registry.classes:
            raise ValueError(unknown(f"{path}.name", part.name, registry.classes))
        if type(part) is not registry.classes[part.name]:
            raise ValueError(
                f"{path}.name={part.name!r} names a {registry.classes[part.name].__name__}, but"
                f" {path} is a {type(part).__name__}"
            )


def check_platform(model: ModelConfig) -> None:
    """Raises ValueError when `model.attention` names what does not run on this machine."""
    here, name = jax.default_backend(), model.attention
    if name is not None and here not in IMPLEMENTATIONS[name].platforms:
        able = ", ".join(n for n, one in IMPLEMENTATIONS.items() if here in one.platforms)
        raise ValueError(
            f"model.attention={name!r} runs on {' and '.join(IMPLEMENTATIONS[name].platforms)},"
            f" and this is a {here}: use one of {able}, or leave it None"
        )


def from_dict(cls: type, values: Mapping[str, Any]) -> Any:
    """Rebuilds a (nested) config dataclass from what `to_dict` gave.

    Raises:
      ValueError: unknown fields or names, with the nearest known ones.
    """
    kinds = {base: registry.classes for base, registry in REGISTRIES.items()}
    return saved.from_dict(cls, values, kinds)


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], path="") -> list[str]:
    """Lines `field: theirs -> ours` for everything in which two saved configs differ."""
    lines = []
    for field in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(field, "absent"), theirs.get(field, "absent")
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += differences(a, b, f"{path}{field}.")
        elif a != b:
            lines.append(f"{path}{field}: {b!r} -> {a!r}")
    return lines
