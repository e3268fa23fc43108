"""Exact match of addition over the grid of operand lengths, as JSON and as a heat map."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path

import jax
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle

from train.data.addition import Addition
from train.evals.runner import Scorer

matplotlib.use("Agg")

MAPS_IN_A_ROW = 3
"""Heat maps side by side in a comparison."""


def evaluate_grid(task: Addition, scorer: Scorer, seed: int, folder: Path) -> dict[str, float]:
    """Writes grid.json and grid.png into `folder`; returns the means in and beyond training.

    "in range" is the mean over cells with both operands within `max_digits`, "beyond" over the
    other cells, "mean" over the whole grid (the paper's figure). A cell is the fraction of
    problems whose every digit and end mark greedy decoding gets right.
    """
    lengths = range(1, task.eval_digits + 1)
    samples = chain.from_iterable(task.cell(i, j, seed) for i in lengths for j in lengths)
    total = len(lengths) ** 2 * task.eval_examples
    matches = scorer.exact_matches(samples, total)
    grid = matches.reshape(len(lengths), len(lengths), -1).mean(axis=-1)
    summary = summarise(grid, task.max_digits)
    if jax.process_index() != 0:
        return summary
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "task": task.name,
        "train_digits": task.max_digits,
        "examples_per_cell": task.eval_examples,
        **summary,
        "grid": np.round(grid, 4).tolist(),
    }
    (folder / "grid.json").write_text(json.dumps(record, indent=1) + "\n")
    draw_grid(grid, task.max_digits, summary).savefig(folder / "grid.png", dpi=120)
    return summary


def summarise(grid: np.ndarray, max_digits: int) -> dict[str, float]:
    """The means of a grid of accuracies: in the training range, beyond it, over everything."""
    inside = np.zeros(grid.shape, bool)
    inside[:max_digits, :max_digits] = True
    summary = {"in_range": grid[inside].mean()}
    if not inside.all():
        summary["beyond"] = grid[~inside].mean()
    return {name: float(value) for name, value in (summary | {"mean": grid.mean()}).items()}


def draw_grid(grid: np.ndarray, max_digits: int, summary: dict[str, float]) -> Figure:
    """The heat map, the training range boxed."""
    figure = Figure(figsize=(6.4, 5.6), layout="constrained")
    axes = figure.subplots()
    image = _draw_cells(axes, grid, max_digits)
    axes.set_ylabel("digits of the first operand")
    axes.set_title(f"exact match: {_in_words(summary)}\nred: lengths seen in training")
    figure.colorbar(image, ax=axes, label="exact match")
    return figure


def draw_comparison(evaluations: Mapping[str, Sequence[Path]]) -> Figure:
    """A heat map per encoding, the mean of its seeds, from folders with a grid.json."""
    columns = min(len(evaluations), MAPS_IN_A_ROW)
    rows = -(-len(evaluations) // columns)
    figure = Figure(figsize=(1.0 + 4.2 * columns, 4.8 * rows + 0.4), layout="compressed")
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes, (name, folders) in zip(panels.flat, evaluations.items(), strict=False):
        records = [json.loads((folder / "grid.json").read_text()) for folder in folders]
        grid, max_digits = np.mean([r["grid"] for r in records], axis=0), records[0]["train_digits"]
        image = _draw_cells(axes, grid, max_digits)
        axes.set_title(f"{name}\n{_in_words(summarise(grid, max_digits))}", fontsize=10)
    for axes in panels.flat[len(evaluations) :]:
        axes.set_axis_off()
    for axes in panels[:, 0]:
        axes.set_ylabel("digits of the first operand")
    figure.suptitle("exact match, mean of the seeds; red: lengths seen in training")
    figure.colorbar(image, ax=panels, label="exact match")
    return figure


def _draw_cells(axes: Axes, grid: np.ndarray, max_digits: int) -> AxesImage:
    n = len(grid)
    image = axes.imshow(
        grid, origin="lower", vmin=0, vmax=1, cmap="viridis", extent=(0.5, n + 0.5, 0.5, n + 0.5)
    )
    side = min(max_digits, n)
    axes.add_patch(Rectangle((0.5, 0.5), side, side, fill=False, edgecolor="red", linewidth=2))
    if n <= 12:
        for i, j in np.ndindex(grid.shape):
            color = "white" if grid[i, j] < 0.6 else "black"
            text = f"{100 * grid[i, j]:.0f}"
            axes.text(j + 1, i + 1, text, ha="center", va="center", color=color, fontsize=9)
        axes.set_xticks(range(1, n + 1))
        axes.set_yticks(range(1, n + 1))
    axes.set_xlabel("digits of the second operand")
    return image


def _in_words(summary: Mapping[str, float]) -> str:
    names = {"in_range": "in range", "beyond": "beyond", "mean": "all"}
    return ", ".join(f"{names[key]} {100 * value:.1f} %" for key, value in summary.items())
