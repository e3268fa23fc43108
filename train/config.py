"""TrainConfig, and how a command line, a named config and a saved run become one."""

import argparse
import dataclasses
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import tyro

from pallas_kernels import IMPLEMENTATIONS
from tape_jax import ModelConfig, positions
from tape_jax.errors import check_choices, unknown
from train.data.addition import Addition
from train.data.task import Task
from train.mesh import MeshConfig, check_divisible
from train.optimizer import OptimizerConfig

TASKS: dict[str, type[Task]] = {"addition": Addition}

_REGISTRIES: dict[type, Mapping[str, type]] = {
    positions.Encoding: positions.ENCODINGS,
    Task: TASKS,
}
"""Base class -> its kinds by their `name` field: how a saved config finds its classes."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One experiment.

    Attributes:
      steps: optimizer steps; `batch_size` sequences each, in `accumulation` micro-batches.
      seed: of initialisation, data and everything else drawn.
      log_every, eval_every, save_every: in steps. The last step is always evaluated and saved.
      keep: newest checkpoints kept.
    """

    name: str
    model: ModelConfig
    task: Task
    optimizer: OptimizerConfig = OptimizerConfig()
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
        if self.model.dtype == "float16":
            raise ValueError("model.dtype='float16' needs loss scaling; train in 'bfloat16'")
        if type(self.task) is not TASKS.get(self.task.name):
            raise ValueError(unknown("task.name", self.task.name, TASKS))
        check_platform(self.model)
        check_choices(self.task, "task")
        check_choices(self.optimizer, "optimizer")
        self.task.validate()
        self.optimizer.validate(self.steps)
        if self.model.vocab_size < self.task.vocab_size:
            raise ValueError(
                f"model.vocab_size={self.model.vocab_size} must be >= {self.task.vocab_size}, the"
                f" ids of task {self.task.name!r}"
            )
        check_divisible(
            self.mesh,
            jax.device_count(),
            self.model,
            self.batch_size,
            self.accumulation,
            self.task.length,
        )
        if self.batch_size % jax.process_count():
            raise ValueError(
                f"batch_size={self.batch_size} must be a multiple of the {jax.process_count()}"
                " processes"
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


def to_dict(config: TrainConfig) -> dict[str, Any]:
    """Plain JSON values; `from_dict` gives the config back."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_dict(cls: type, values: Mapping[str, Any]) -> Any:
    """Rebuilds a (nested) config dataclass from what `to_dict` gave.

    Raises:
      ValueError: unknown fields or names, with the nearest known ones.
    """
    if cls in _REGISTRIES:
        registry = _REGISTRIES[cls]
        if values["name"] not in registry:
            raise ValueError(unknown(cls.__name__, values["name"], registry))
        cls = registry[values["name"]]
    hints = typing.get_type_hints(cls)
    for field in values:
        if field not in cls.__dataclass_fields__:
            raise ValueError(unknown(f"field of {cls.__name__}", field, cls.__dataclass_fields__))
    return cls(**{field: _restore(hints[field], value) for field, value in values.items()})


def _restore(hint, value):
    if isinstance(value, Mapping):
        return from_dict(hint, value)
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if isinstance(value, list) and any(typing.get_origin(o) is tuple for o in options):
        return tuple(value)
    return value


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


def parse(args: Sequence[str] | None = None) -> tuple[argparse.Namespace, TrainConfig]:
    """The command line: where to run, and a named config with any of its fields set.

    `--model.position.name NAME` replaces the whole encoding, whose own fields can then be set.
    Unknown configs and fields exit with the nearest names.
    """
    import configs

    args = list(sys.argv[1:] if args is None else args)
    parser = argparse.ArgumentParser(
        description="Train a named experiment. A run found in the work directory is continued.",
        epilog="Every field of the experiment can be set too: give --config NAME --help.",
        add_help="--config" not in args,
        allow_abbrev=False,
    )
    known = ", ".join(configs.names())
    parser.add_argument("--config", required=True, help=f"the experiment: {known}")
    parser.add_argument("--workdir", type=Path, help="config, checkpoints, metrics, evaluations")
    parser.add_argument(
        "--allow-config-change",
        action="store_true",
        help="continue the run in the work directory although its saved config differs",
    )
    parser.add_argument("--model.position.name", dest="encoding", help=argparse.SUPPRESS)
    ours, rest = parser.parse_known_args(args)
    try:
        default = configs.get(ours.config)
        if ours.encoding is not None:
            model = dataclasses.replace(default.model, position=positions.get(ours.encoding))
            default = dataclasses.replace(default, model=model)
        config = tyro.cli(
            TrainConfig,
            args=rest,
            default=default,
            prog=f"{parser.prog} --config {ours.config} --workdir DIR [--allow-config-change]",
            description=f"The fields of {ours.config!r} and their values.",
        )
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if ours.workdir is None:
        raise SystemExit("error: --workdir DIR is required: where the run is kept")
    return ours, config
