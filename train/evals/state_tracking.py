"""Accuracy of running products over the length of the word, as JSON and as curves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train.data.state_tracking import StateTracking
from train.evals.runner import Scorer

matplotlib.use("Agg")

CURVES = {
    "accuracy": "the product after t elements",
    "all_steps": "all products up to t",
}
"""What is kept for every length t = 1 .. eval_length, and what is right in it."""


def evaluate_lengths(
    task: StateTracking, scorer: Scorer, seed: int, folder: Path
) -> dict[str, float]:
    """Writes length.json and length.png into `folder`; returns the means in and beyond training.

    The accuracy at length t is the fraction of words of t elements whose product is right: every
    step of a longer word is predicted from its prefix alone. "in range" is its mean over t up to
    `max_length`, "beyond" over the longer ones, "mean" over all.
    """
    hits = scorer.hits(task.scored_words(seed), task.eval_examples)[:, 1:]  # behind the mark
    curves = {
        "accuracy": hits.mean(axis=0),
        "all_steps": np.logical_and.accumulate(hits, axis=1).mean(axis=0),
    }
    summary = summarise(curves["accuracy"], task.max_length)
    if jax.process_index() != 0:
        return summary
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "task": task.name,
        "group": task.group,
        "train_length": task.max_length,
        "words": task.eval_examples,
        "chance": 1 / task.order,
        **summary,
        **{name: np.round(curve, 4).tolist() for name, curve in curves.items()},
    }
    (folder / "length.json").write_text(json.dumps(record, indent=1) + "\n")
    draw_lengths(record).savefig(folder / "length.png", dpi=120)
    return summary


def summarise(accuracy: np.ndarray, max_length: int) -> dict[str, float]:
    """The means of accuracies by length: in the training range, beyond it, over everything."""
    parts = {"in_range": accuracy[:max_length], "beyond": accuracy[max_length:], "mean": accuracy}
    return {name: float(part.mean()) for name, part in parts.items() if part.size}


def draw_lengths(record: Mapping) -> Figure:
    """Both curves of one evaluation, as kept in length.json."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    for name, label in CURVES.items():
        axes.plot(range(1, len(record[name]) + 1), record[name], label=label)
    _frame(axes, record)
    axes.set(title=f"running products in {record['group']}", ylabel="fraction of words right")
    axes.legend()
    return figure


def draw_comparison(evaluations: Mapping[str, Sequence[Path]]) -> Figure:
    """A panel per curve with a line per encoding: the mean of its seeds in a band of their range.

    Reads the length.json in each folder.
    """
    figure = Figure(figsize=(13, 4.4), layout="constrained")
    panels = figure.subplots(1, len(CURVES), sharey=True)
    for name, folders in evaluations.items():
        records = [json.loads((folder / "length.json").read_text()) for folder in folders]
        for axes, curve in zip(panels, CURVES, strict=True):
            values = np.array([record[curve] for record in records])
            lengths = range(1, values.shape[1] + 1)
            axes.plot(lengths, values.mean(axis=0), label=name)
            axes.fill_between(lengths, values.min(axis=0), values.max(axis=0), alpha=0.2)
    for axes, title in zip(panels, CURVES.values(), strict=True):
        _frame(axes, records[0])
        axes.set_title(title)
        axes.legend()
    panels[0].set_ylabel("fraction of words right")
    figure.suptitle(f"running products in {records[0]['group']}, mean of the seeds")
    return figure


def _frame(axes: Axes, record: Mapping) -> None:
    """The training length, chance, and the axes' ranges."""
    axes.axvline(record["train_length"], color="red", linewidth=1, label="length in training")
    axes.axhline(record["chance"], color="grey", linewidth=1, linestyle=":", label="chance")
    axes.set(xlabel="length of the word, t", ylim=(-0.02, 1.02), xlim=(1, len(record["accuracy"])))
