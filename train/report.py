"""The report of a run: one page in Markdown, its curves as a picture."""

import json
from pathlib import Path

from matplotlib.figure import Figure

from train.config import TrainConfig, to_dict
from train.runlog import read_metrics


def write_report(
    workdir: Path, config: TrainConfig, step: int, folder: Path, summary: dict[str, float]
) -> Path:
    """Writes report.md and curves.png into `workdir`, about the evaluation kept in `folder`."""
    draw_curves(workdir).savefig(workdir / "curves.png", dpi=120)
    rows = [f"| {name} | {100 * value:.2f} % |" for name, value in summary.items()]
    pictures = [f"![{p.stem}]({p.relative_to(workdir)})" for p in sorted(folder.glob("*.png"))]
    text = [
        f"# {config.name}: step {step} of {config.steps}",
        f"Position encoding `{config.model.position.name}`, task `{config.task.name}`.",
        "| | exact match |\n|---|---|\n" + "\n".join(rows),
        *pictures,
        "![curves](curves.png)",
        "## Config",
        "```json\n" + json.dumps(to_dict(config), indent=2) + "\n```",
    ]
    path = workdir / "report.md"
    path.write_text("\n\n".join(text) + "\n")
    return path


def draw_curves(workdir: Path) -> Figure:
    """Loss and evaluations by step, and the position state's size by layer where there is one."""
    steps, evals = read_metrics(workdir, "train"), read_metrics(workdir, "eval")
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    loss, score, size = figure.subplots(1, 3)
    loss.plot(list(steps), [r["loss"] for r in steps.values()])
    loss.set(title="training loss", xlabel="step", yscale="log")
    for name in dict.fromkeys(k for r in evals.values() for k in r if k not in ("kind", "step")):
        points = {s: r[name] for s, r in evals.items() if name in r}
        score.plot(list(points), list(points.values()), marker="o", label=name)
    score.set(title="evaluation", xlabel="step", ylim=(-0.02, 1.02))
    if evals:
        score.legend()
    states = {s: r["position_norm"] for s, r in steps.items() if "position_norm" in r}
    for layer in range(len(next(iter(states.values()), []))):
        size.plot(list(states), [norms[layer] for norms in states.values()], label=f"layer {layer}")
    size.set(title="size of the state each layer reads", xlabel="step")
    if states:
        size.legend()
    return figure
