"""A run's log: JSON lines and TensorBoard for machines, a bar or plain lines for people."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

PLAIN_SECONDS = 10.0
"""Seconds between two lines of progress where there is no terminal."""


class RunLog:
    """Writes on process 0 and is silent elsewhere.

    metrics.jsonl is append-only: after a resume the steps since the checkpoint stand in it twice,
    and `read_metrics` takes the later line.
    """

    def __init__(self, workdir: Path):
        """Opens the files of `workdir`, which must exist."""
        self._on = jax.process_index() == 0
        self.console = Console(quiet=not self._on, highlight=False, soft_wrap=True)
        self._last_line = 0.0
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self.console,
            disable=not (self._on and self.console.is_terminal),
        )
        self._bars: dict[str, Any] = {}
        if self._on:
            from tensorboardX import SummaryWriter  # imports torch, if there: seconds

            self._file = (workdir / "metrics.jsonl").open("a", buffering=1)
            self._board = SummaryWriter(str(workdir / "tensorboard"))

    def __enter__(self) -> "RunLog":
        """Starts the progress bar where there is a terminal."""
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the bar and closes the files."""
        self._progress.stop()
        if self._on:
            self._file.close()
            self._board.close()

    def say(self, message: str) -> None:
        """A line for people."""
        self.console.print(message, markup=False)

    def write(self, kind: str, step: int, figures: Mapping[str, Any]) -> None:
        """One record, of `kind` "train", "eval" or "event", to the files."""
        if not self._on:
            return
        plain = {name: _plain(value) for name, value in figures.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, **plain}) + "\n")
        for name, value in plain.items():
            if isinstance(value, list):
                for i, item in enumerate(value):
                    self._board.add_scalar(f"{kind}/{name}/{i:02d}", item, step)
            elif isinstance(value, int | float):
                self._board.add_scalar(f"{kind}/{name}", value, step)

    def show(self, name: str, done: int, total: int, figures: str = "") -> None:
        """Progress of the training or of an evaluation."""
        if self._progress.disable:
            now = time.monotonic()
            if figures and (now - self._last_line > PLAIN_SECONDS or done == total):
                self._last_line = now
                self.say(f"{name} {done}/{total}  {figures}")
            return
        if name not in self._bars:
            self._bars[name] = self._progress.add_task(name, total=total, figures=figures)
        self._progress.update(self._bars[name], completed=done, total=total, figures=figures)
        if name != "train" and done >= total:
            self._progress.remove_task(self._bars.pop(name))


def read_metrics(workdir: Path, kind: str) -> dict[int, dict[str, Any]]:
    """Step -> the latest record of this kind, in order of steps."""
    path, records = workdir / "metrics.jsonl", {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # a line cut short by a kill
            continue
        if record["kind"] == kind:
            records[record["step"]] = record
    return dict(sorted(records.items()))


def _plain(value):
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return np.asarray(value).tolist()
    return value
