"""Perplexity of held-out tokens and their loss by position in the window, as JSON and curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train.data.tokens import Tokens
from train.evals.runner import Scorer

matplotlib.use("Agg")

POINTS = 32
"""Of a drawn curve; each is the mean of the positions around it."""


def evaluate_perplexity(task: Tokens, scorer: Scorer, folder: Path) -> dict[str, float]:
    """Writes loss.json and loss.png into `folder`; returns the perplexity at every length.

    The same tokens are scored, each once, in windows of every length: what differs is how much
    stands before them. "perplexity" is that of the training length, "perplexity_N" of windows of N.
    """
    curves = {length: losses_by_position(task, scorer, length) for length in task.lengths}
    losses = {length: float(curve.mean()) for length, curve in curves.items()}
    others = [length for length in task.lengths if length != task.sequence_length]
    summary = {"perplexity": perplexity(losses[task.sequence_length])}
    summary |= {f"perplexity_{length}": perplexity(losses[length]) for length in others}
    if jax.process_index() != 0:
        return summary
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "task": task.name,
        "eval_file": task.eval_file,
        "train_length": task.sequence_length,
        "scored_tokens": task.scored_tokens,
        **summary,
        "loss": losses,
        "by_position": {length: np.round(curve, 4).tolist() for length, curve in curves.items()},
    }
    text = json.dumps(record, indent=1)
    (folder / "loss.json").write_text(text + "\n")
    draw_losses(json.loads(text)).savefig(folder / "loss.png", dpi=120)
    return summary


def losses_by_position(task: Tokens, scorer: Scorer, length: int) -> np.ndarray:
    """Mean negative log likelihood in nats at each place of the windows of `length`: (length,)."""
    losses = scorer.losses(task.held_out(length), task.scored_tokens // length)
    return losses.mean(axis=0, dtype=np.float64)


def perplexity(loss: float) -> float:
    """Of a mean loss in nats; infinite where it overflows."""
    with np.errstate(over="ignore"):
        return float(np.exp(loss))


def draw_losses(record: Mapping) -> Figure:
    """A curve for every length, as kept in loss.json."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    for length, curve in record["by_position"].items():
        label = f"windows of {length}: perplexity {perplexity(record['loss'][length]):.2f}"
        axes.plot(*_smooth(np.array(curve)), label=label)
    _frame(axes, record)
    axes.set_title("loss by position in the window")
    axes.legend()
    return figure


def draw_comparison(evaluations: Mapping[str, Sequence[Path]]) -> Figure:
    """A line per encoding in the longest windows: the mean of its seeds in a band of their range.

    Reads the loss.json in each folder.
    """
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    for name, folders in evaluations.items():
        records = [json.loads((folder / "loss.json").read_text()) for folder in folders]
        longest = max(records[0]["by_position"], key=int)
        curves = np.array([record["by_position"][longest] for record in records])
        positions, mean = _smooth(curves.mean(axis=0))
        axes.plot(positions, mean, label=name)
        spread = [_smooth(edge(curves, axis=0))[1] for edge in (np.min, np.max)]
        axes.fill_between(positions, *spread, alpha=0.2)
    _frame(axes, records[0])
    axes.set_title(f"loss by position in windows of {longest}, mean of the seeds")
    axes.legend()
    return figure


def _smooth(curve: np.ndarray) -> tuple[list[float], list[float]]:
    """Positions from 1 on and values, in at most POINTS means of neighbours."""
    points = min(POINTS, len(curve))
    parts = [np.array_split(x, points) for x in (np.arange(1, len(curve) + 1), curve)]
    return tuple([part.mean() for part in split] for split in parts)


def _frame(axes: Axes, record: Mapping) -> None:
    """The training length and the axes' names."""
    axes.axvline(record["train_length"], color="red", linewidth=1, label="length in training")
    axes.set(xlabel="position in the window", ylabel="loss [nats / token]")
