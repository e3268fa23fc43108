"""Train one experiment with several encodings and seeds, and compare them.

python -m train.compare --config NAME --encodings rope,tape --seeds 0,1 --workdir DIR

Every run lives in DIR/ENCODING/seed-SEED and is one that `train.pretrain` could have made. The same
command continues what was stopped and repeats nothing that is finished.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags
from rich.console import Console

import configs
from tape_jax import positions
from train.checkpoint import check_workdir, keep_config
from train.command_line import parse
from train.comparison import Run, is_finished, write_comparison
from train.config import TrainConfig
from train.ending import command
from train.interrupt import Interrupt
from train.loop import NonFiniteError, train


def plan(
    config: TrainConfig, encodings: Sequence[str], seeds: Sequence[int], workdir: Path
) -> tuple[list[Run], dict[str, str]]:
    """The runs, seeds inside encodings, and why the encodings that have none cannot carry `config`.

    Raises:
      ValueError: an unknown encoding, a config that cannot work, or one that none of them carries.
    """
    parts = {name: positions.get(name) for name in encodings}
    config.validate()
    runs, refusals = [], {}
    for name, position in parts.items():
        try:
            model = dataclasses.replace(config.model, position=position)
            for seed in seeds:
                one = dataclasses.replace(config, model=model, seed=seed)
                one.validate()
                runs.append(Run(name, seed, one, workdir / name / f"seed-{seed}"))
        except ValueError as error:
            refusals[name] = str(error)
    if not runs:
        reasons = "".join(f"\n  {name}: {reason}" for name, reason in refusals.items())
        raise ValueError(f"no encoding carries {config.name!r}:{reasons}")
    return runs, refusals


def compare(
    config: TrainConfig, encodings: Sequence[str], seeds: Sequence[int], workdir: Path
) -> None:
    """Trains what is not trained yet and keeps the report in `workdir` up to date.

    A run whose loss is not finite is reported with the others; SIGTERM or Ctrl-C saves the run at
    hand and ends the comparison.

    Raises:
      ValueError: see `plan`; or a run found in `workdir` has another config.
    """
    runs, refusals = plan(config, encodings, seeds, workdir)
    for run in runs:
        check_workdir(run.workdir, run.config, allow_change=False)
    for run in runs:
        keep_config(run.workdir, run.config)
    console = Console(quiet=jax.process_index() != 0, highlight=False, soft_wrap=True)
    failures: dict[Run, str] = {}
    with Interrupt() as stop:
        for number, run in enumerate(runs, start=1):
            title = f"run {number} of {len(runs)}: {run.encoding}, seed {run.seed}"
            if is_finished(run):
                console.print(f"{title}: finished before")
                continue
            console.print(title)
            try:
                train(run.config, run.workdir)
            except NonFiniteError as error:
                failures[run] = str(error)
                console.print(f"{title}: {error}", markup=False)
            if stop() or run == runs[-1]:
                break  # its report is the last one
            write_comparison(workdir, config, runs, refusals, failures)
    report = write_comparison(workdir, config, runs, refusals, failures)
    console.print(report.read_text().split("![")[0].strip(), markup=False)
    console.print(f"the report: {report}")


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    known = ", ".join(positions.names())
    parser.add_argument(
        "--encodings", required=True, type=_listed(str), help=f"with commas between: {known}"
    )
    parser.add_argument("--seeds", default=[0], type=_listed(int), help="with commas between")
    return parser


def _listed(kind):
    def numbers_or_names(text):
        return list(dict.fromkeys(map(kind, text.split(","))))

    return numbers_or_names


def _check_free(config: TrainConfig, name: str) -> None:
    """Raises ValueError when the command line sets what the comparison varies."""
    default = configs.get(name)
    for field, option, given, own in (
        ("model.position", "--encodings", config.model.position, default.model.position),
        ("seed", "--seeds", config.seed, default.seed),
    ):
        if given != own:
            raise ValueError(f"{field} varies in a comparison: give {option} instead")


def main() -> None:
    """The command. Exit status 0 when done or stopped by a signal, 1 on bad input."""
    ours, config = parse(
        parents=[_options()], description="Train an experiment with several encodings and seeds."
    )
    flags.FLAGS.mark_as_parsed()  # grain's workers read absl flags
    with command():
        _check_free(config, ours.config)
        compare(config, ours.encodings, ours.seeds, ours.workdir)


if __name__ == "__main__":
    main()
