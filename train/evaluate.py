"""Score a checkpoint again: `python -m train.evaluate --workdir DIR [--step N]`."""

import dataclasses
import logging
from pathlib import Path

import jax
import tyro

from train.checkpoint import Checkpoints, load_config
from train.config import TrainConfig
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
) -> dict[str, float] | None:
    """Scores the newest checkpoint of a run, or the one of a step, on any number of devices.

    Args:
      workdir: where the run lives; its config is read from there.
      step: which checkpoint; the newest when None.
      mesh: how this machine's devices are used, whatever the training used.
      eval_examples: problems per cell, instead of the config's.
      eval_digits: longest operands scored, instead of the config's.

    Raises:
      FileNotFoundError: no run or no such checkpoint there.
    """
    changes = {"eval_examples": eval_examples, "eval_digits": eval_digits}
    config: TrainConfig = load_config(workdir)
    task = dataclasses.replace(config.task, **{k: v for k, v in changes.items() if v is not None})
    config = dataclasses.replace(config, task=task, mesh=mesh)
    config.validate()
    devices = make_mesh(mesh)
    checkpoints = Checkpoints(workdir, config.keep)
    with jax.set_mesh(devices), Interrupt() as stop, RunLog(workdir) as log:
        state = checkpoints.read(abstract_state(config, devices), step)
        return evaluate(config, workdir, devices, state.params, int(state.step), stop, log)


def main() -> None:
    """The command."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        tyro.cli(evaluate_checkpoint)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
