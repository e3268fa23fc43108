"""What several runs have gained: their first and last evaluations side by side."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from rich.table import Table

from train.checkpoint import load_config
from train.report import evaluations

matplotlib.use("Agg")

Run = dict[str, Any]
"""`run`, `method`, `position`, `metric`, and by step what the evaluation says: `evaluations`."""


def read_run(workdir: Path) -> Run:
    """What the run in `workdir` has written of itself.

    Raises:
      FileNotFoundError: no run there, or one that was never evaluated.
    """
    config = load_config(workdir)
    found = evaluations(workdir)
    if not found:
        raise FileNotFoundError(f"{workdir} holds no evaluation yet: let the run finish")
    return {
        "run": workdir.resolve().name,
        "method": config.method.name,
        "position": config.model.position.name,
        "metric": config.task.metric.name,
        "evaluations": found,
    }


def tabulate(runs: Sequence[Run]) -> Table:
    """A row a run: every number before, an arrow, and after."""
    names = list(dict.fromkeys(n for run in runs for x in run["evaluations"].values() for n in x))
    table = Table(title="first and last evaluation", title_justify="left")
    for column in ("run", "steps", *names):
        table.add_column(column, justify="left" if column == "run" else "right")
    for run in runs:
        first, last = _ends(run)
        cells = [
            f"{first[1].get(n, float('nan')):.2f} → {last[1].get(n, float('nan')):.2f}"
            for n in names
        ]
        table.add_row(run["run"], f"{first[0]} → {last[0]}", *cells)
    return table


def _ends(run: Run) -> tuple[tuple[int, Mapping[str, float]], tuple[int, Mapping[str, float]]]:
    steps = sorted(run["evaluations"])
    return tuple((step, run["evaluations"][step]) for step in (steps[0], steps[-1]))


def draw(runs: Sequence[Run]) -> Figure:
    """An arrow for every run and number, from the first evaluation to the last."""
    names = list(dict.fromkeys(n for run in runs for x in run["evaluations"].values() for n in x))
    figure = Figure(figsize=(3.0 * len(names), 1.4 + 0.45 * len(runs)), layout="constrained")
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for panel, name in zip(panels, names, strict=True):
        for place, run in enumerate(runs):
            first, last = (values.get(name) for _, values in _ends(run))
            if first is None or last is None:
                continue
            panel.plot([first, last], [place, place], color="C0", linewidth=1.5)
            panel.plot(first, place, "o", color="C0", markerfacecolor="white")
            panel.plot(last, place, "o", color="C0")
            panel.annotate(
                f"{last:.3g}", (last, place), (0, 6), textcoords="offset points", ha="center"
            )
        panel.set(title=name, xscale="log")
        panel.xaxis.set_major_formatter("{x:.4g}")
        panel.xaxis.set_minor_formatter("{x:.4g}")
        panel.tick_params(axis="x", which="both", labelrotation=45, labelsize="small")
        panel.margins(x=0.15, y=0.2)
        panel.grid(axis="x", which="both", alpha=0.3)
    panels[0].set_yticks(range(len(runs)), [run["run"] for run in runs])
    panels[0].invert_yaxis()
    figure.suptitle(f"{runs[0]['metric']}: first (open) and last evaluation")
    return figure


def write_progress(folder: Path, runs: Sequence[Run]) -> None:
    """progress.json and progress.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "progress.json").write_text(json.dumps(runs, indent=1) + "\n")
    draw(runs).savefig(folder / "progress.png", dpi=120)
