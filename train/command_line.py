"""How a command line becomes a config: a named one, with parts of it chosen and fields set."""

import argparse
import copy
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro

from train.config import TrainConfig, registered

_CHOICE = re.compile(r"--(?P<path>[\w.-]+)\.name(=(?P<name>.*))?", re.DOTALL)


def parse(
    args: Sequence[str] | None = None,
    parents: Sequence[argparse.ArgumentParser] = (),
    description: str = "Train a named experiment. A run found in the work directory is continued.",
    needs_workdir: bool = True,
) -> tuple[argparse.Namespace, TrainConfig]:
    """The command line: where to run, and a named config with any of its fields set.

    `--PATH.name NAME` replaces the part at PATH, such as `model.position`, by the one of that name,
    whose own fields can then be set. Unknown configs, names and fields exit with the nearest ones.

    Args:
      args: those of the process when None.
      parents: the options that a command has of its own, made with add_help=False.
      description: what the command does.
      needs_workdir: whether it has one.
    """
    import configs

    args = list(sys.argv[1:] if args is None else args)
    spec = getattr(sys.modules["__main__"], "__spec__", None)  # of a command started with -m
    parser = argparse.ArgumentParser(
        prog=f"python -m {spec.name}" if spec else None,
        description=description,
        epilog="Every field of the experiment can be set too: give --config NAME --help.",
        add_help="--config" not in args,
        allow_abbrev=False,
        parents=parents,
    )
    known = ", ".join(configs.names())
    parser.add_argument("--config", required=True, help=f"the experiment: {known}")
    if needs_workdir:
        parser.add_argument("--workdir", type=Path, help="where everything is kept")
    ours, rest = parser.parse_known_args(args)
    try:
        default, rest = choose(configs.get(ours.config), rest)
        config = tyro.cli(
            TrainConfig,
            args=rest,
            default=default,
            config=(tyro.conf.AvoidSubcommands,),  # of a part that may be None
            prog=f"{parser.prog} --config {ours.config} --workdir DIR",
            description=f"The fields of {ours.config!r} and their values. --help without --config"
            " shows the command's own options.",
        )
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if needs_workdir and ours.workdir is None:
        raise SystemExit("error: --workdir DIR is required: where the run is kept")
    return ours, config


def choose(config: TrainConfig, args: Sequence[str]) -> tuple[TrainConfig, list[str]]:
    """The config with its parts replaced as `--PATH.name NAME` asks, and the other arguments.

    A part is replaced before the parts within it. The config returned is checked by nobody: a new
    part may need fields that are still to be set (making a ModelConfig of it checks it).

    Raises:
      ValueError: an unknown name; the message gives the nearest known ones.
    """
    choices, rest = _split(args)
    for path, name in sorted(choices, key=lambda choice: choice[0].count(".")):
        for where, registry, _ in list(registered(config)):
            if where == path:
                config = _put(config, path.split("."), registry.make(name))
                break
        else:
            rest += [f"--{path}.name", name]  # nothing of ours: tyro knows it, or what is near
    return config, rest


def _split(args: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """The (path, name) of every `--PATH.name NAME` or `--PATH.name=NAME`, and what is left."""
    choices, rest, remaining = [], [], list(args)
    while remaining:
        found = _CHOICE.fullmatch(remaining[0])
        if found is None or (found["name"] is None and len(remaining) == 1):
            rest.append(remaining.pop(0))
            continue
        remaining.pop(0)
        name = remaining.pop(0) if found["name"] is None else found["name"]
        choices.append((found["path"].replace("-", "_"), name))
    return choices, rest


def _put(config: Any, path: Sequence[str], part: Any) -> Any:
    """A copy with another part at this path. Unlike dataclasses.replace, it checks nothing."""
    first, *deeper = path
    changed = copy.copy(config)
    value = _put(getattr(config, first), deeper, part) if deeper else part
    object.__setattr__(changed, first, value)
    return changed
