"""The report of a run: one page in Markdown, its curves as a picture."""

import json
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from train.config import TrainConfig, to_dict
from train.data.task import Metric
from train.runlog import read_metrics


def write_report(
    workdir: Path, config: TrainConfig, step: int, folder: Path, summary: dict[str, float]
) -> Path:
    """Writes report.md and curves.png into `workdir`, about the evaluation kept in `folder`."""
    metric = config.task.metric
    draw_curves(workdir, metric).savefig(workdir / "curves.png", dpi=120)
    rows = [f"| {name} | {metric.text(value)}{metric.unit} |" for name, value in summary.items()]
    pictures = [f"![{p.stem}]({p.relative_to(workdir)})" for p in sorted(folder.glob("*.png"))]
    text = [
        f"# {config.name}: step {step} of {config.steps}",
        f"Position encoding `{config.model.position.name}`, task `{config.task.name}`.",
        f"| | {metric.name} |\n|---|---|\n" + "\n".join(rows),
        *pictures,
        "![curves](curves.png)",
        "## Config",
        "```json\n" + json.dumps(to_dict(config), indent=2) + "\n```",
    ]
    path = workdir / "report.md"
    path.write_text("\n\n".join(text) + "\n")
    return path


def evaluations(workdir: Path) -> dict[int, dict[str, float]]:
    """Step -> the headline numbers of its evaluation."""
    records = read_metrics(workdir, "eval")
    return {
        step: {name: x for name, x in record.items() if name not in ("kind", "step")}
        for step, record in records.items()
    }


def plot_loss(axes: Axes, workdir: Path, **style) -> None:
    """The training loss by step, as one line."""
    steps = read_metrics(workdir, "train")
    marker = "o" if len(steps) == 1 else None  # a line of one point is not seen
    axes.plot(list(steps), [r["loss"] for r in steps.values()], marker=marker, **style)
    axes.set(title="training loss", xlabel="step", yscale="log")


def draw_curves(workdir: Path, metric: Metric) -> Figure:
    """Loss and evaluations by step, and the position state's size by layer where there is one."""
    steps, evals = read_metrics(workdir, "train"), evaluations(workdir)
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    loss, score, size = figure.subplots(1, 3)
    plot_loss(loss, workdir)
    for name in dict.fromkeys(name for summary in evals.values() for name in summary):
        points = {step: summary[name] for step, summary in evals.items() if name in summary}
        score.plot(list(points), list(points.values()), marker="o", label=name)
    score.set(title=metric.name, xlabel="step")
    if metric.fraction:
        score.set(ylim=(-0.02, 1.02))
    if evals:
        score.legend()
    states = {s: r["position_norm"] for s, r in steps.items() if "position_norm" in r}
    layers = len(next(iter(states.values()), []))
    named = {round(layer) for layer in np.linspace(0, layers - 1, min(layers, 6))}
    for layer in range(layers):
        norms = [by_layer[layer] for by_layer in states.values()]
        label = f"layer {layer}" if layer in named else None
        color, marker = colormaps["viridis"](layer / layers), "o" if len(states) == 1 else None
        size.plot(list(states), norms, label=label, color=color, marker=marker)
    size.set(title="size of the state each layer reads", xlabel="step")
    if states:
        size.legend()
    return figure
