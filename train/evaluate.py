"""Measure what a run has learned: `python -m train.evaluate [COMMAND] --workdir DIR ...`.

task (when no command is named): score a checkpoint on its own task again.
stability: how much the inside of several runs changes when a sentence is moved.
"""

import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import tyro
from rich.console import Console
from rich.progress import track

from tape_jax.errors import unknown
from train.checkpoint import Checkpoints, load_config
from train.config import TrainConfig
from train.evals.stability import changes, tabulate, write_stability
from train.interrupt import Interrupt
from train.loop import evaluate
from train.mesh import MeshConfig, make_mesh
from train.runlog import RunLog
from train.step import abstract_state


def evaluate_checkpoint(
    workdir: Path,
    step: int | None = None,
    mesh: MeshConfig = MeshConfig(),  # noqa: B008 - frozen
    eval_examples: int | None = None,
    eval_digits: int | None = None,
    eval_length: int | None = None,
) -> dict[str, float] | None:
    """Scores the newest checkpoint of a run, or the one of a step, on any number of devices.

    Args:
      workdir: where the run lives; its config is read from there.
      step: which checkpoint; the newest when None.
      mesh: how this machine's devices are used, whatever the training used.
      eval_examples: addition's problems per cell, or words, instead of the config's.
      eval_digits: longest operands scored, instead of the config's.
      eval_length: elements of a scored word, instead of the config's.

    Raises:
      ValueError: a field that the task of the run does not have.
      FileNotFoundError: no run or no such checkpoint there.
    """
    asked = {"eval_examples": eval_examples, "eval_digits": eval_digits, "eval_length": eval_length}
    asked = {field: value for field, value in asked.items() if value is not None}
    config: TrainConfig = load_config(workdir)
    for field in asked.keys() - {field.name for field in dataclasses.fields(config.task)}:
        raise ValueError(f"{field}={asked[field]}: task {config.task.name!r} has no such field")
    task = dataclasses.replace(config.task, **asked)
    config = dataclasses.replace(config, task=task, mesh=mesh)
    config.validate()
    devices = make_mesh(mesh)
    checkpoints = Checkpoints(workdir, config.keep)
    with jax.set_mesh(devices), Interrupt() as stop, RunLog(workdir) as log:
        state = checkpoints.read(abstract_state(config, devices), step)
        return evaluate(config, workdir, devices, state.params, int(state.step), stop, log)


def evaluate_stability(
    workdirs: tuple[Path, ...], out: Path, sequences: int = 8, seed: int = 0
) -> None:
    """Compares what moving a sentence changes inside the newest checkpoints of several runs.

    Args:
      workdirs: where the runs live.
      out: folder of stability.json and stability.png.
      sequences: sentences of each run's own task.
      seed: of the sentences.

    Raises:
      ValueError: no sequences.
      FileNotFoundError: no run or no checkpoint in one of the work directories.
    """
    if sequences < 1:
        raise ValueError(f"sequences={sequences} must be >= 1")
    configs = {workdir: load_config(workdir) for workdir in workdirs}
    mesh, runs = make_mesh(MeshConfig()), []
    for workdir, config in configs.items():
        name = f"{config.model.position.name} ({workdir})"
        state = Checkpoints(workdir, config.keep).read(abstract_state(config, mesh))
        rows = config.task.probe(seed, sequences)
        found = changes(
            config.model, state.params, rows, config.task.filler, lambda x, n=name: track(x, n)
        )
        runs.append({"run": name, "step": int(state.step), "changes": found})
    write_stability(out, runs, sequences)
    console = Console()
    console.print(tabulate(runs))
    console.print(f"kept in {out}", markup=False)


COMMANDS: Mapping[str, Callable] = {
    "task": evaluate_checkpoint,
    "stability": evaluate_stability,
}


def main(args: Sequence[str] | None = None) -> None:
    """The command."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    args = list(sys.argv[1:] if args is None else args)
    named = bool(args) and not args[0].startswith("-")
    name = args.pop(0) if named else "task"
    try:
        if name not in COMMANDS:
            raise ValueError(unknown("command", name, COMMANDS))
        tyro.cli(COMMANDS[name], args=args, prog=f"python -m train.evaluate {name}")
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
