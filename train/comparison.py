"""The report of a comparison, from what its runs have left on disk."""

import dataclasses
import functools
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from matplotlib.figure import Figure

from train.config import TrainConfig, to_dict
from train.data.task import Metric
from train.loop import evaluation_folder
from train.report import evaluations, plot_loss
from train.runlog import read_metrics
from train.step import count_parameters, make_state


@dataclasses.dataclass(frozen=True)
class Run:
    """One encoding with one seed, and where it is kept."""

    encoding: str
    seed: int
    config: TrainConfig
    workdir: Path


def is_finished(run: Run) -> bool:
    """Whether the last step has been taken and scored."""
    return run.config.steps in evaluations(run.workdir)


def write_comparison(
    workdir: Path,
    config: TrainConfig,
    runs: Sequence[Run],
    refusals: Mapping[str, str],
    failures: Mapping[Run, str],
) -> Path:
    """Writes report.md, comparison.json and their pictures into `workdir`; returns the report.

    Args:
      config: what the runs have in common.
      refusals: why an encoding has no run.
      failures: why a run has ended before its last step.
    """
    records = [_record(run, failures.get(run)) for run in runs]
    rows = [_row(name, records) for name in dict.fromkeys(run.encoding for run in runs)]
    rows += [{"encoding": name, "scores": {}, "notes": [why]} for name, why in refusals.items()]
    path, metric = workdir / "report.md", config.task.metric
    if jax.process_index() != 0:
        return path
    draw_losses(runs).savefig(workdir / "losses.png", dpi=120)
    pictures = ["![training losses](losses.png)"]
    folders = _finished_folders(runs)
    if folders:
        config.task.draw_comparison(folders).savefig(workdir / "evaluations.png", dpi=120)
        pictures.insert(0, f"![{metric.name}](evaluations.png)")
    seeds = list(dict.fromkeys(run.seed for run in runs))
    report = {"title": _title(config, seeds), "config": _common(config), "seeds": seeds}
    text = json.dumps(report | {"encodings": rows, "runs": records}, indent=1)
    (workdir / "comparison.json").write_text(text + "\n")
    finished = sum(map(is_finished, runs))
    measured = f"{metric.name}, in percent" if metric.fraction else metric.name
    state = "All" if finished == len(runs) else f"{finished} of"
    paragraphs = [
        f"# {report['title']}",
        f"{state} {len(runs)} runs are finished. Scores are {measured}: mean over the"
        " finished seeds [lowest, highest].",
        _table(rows, metric),
        *pictures,
        "## What the runs have in common",
        "```json\n" + json.dumps(report["config"], indent=2) + "\n```",
    ]
    path.write_text("\n\n".join(paragraphs) + "\n")
    return path


def draw_losses(runs: Sequence[Run]) -> Figure:
    """Training losses of all runs, a color for every encoding."""
    figure = Figure(figsize=(8, 4.8), layout="constrained")
    axes = figure.subplots()
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(r.encoding for r in runs))}
    for run in runs:
        first = run == next(r for r in runs if r.encoding == run.encoding)
        label = run.encoding if first else None
        plot_loss(axes, run.workdir, color=colors[run.encoding], label=label, linewidth=1)
    axes.legend()
    return figure


def _record(run: Run, failure: str | None) -> dict[str, Any]:
    """What is known of a run."""
    steps = read_metrics(run.workdir, "train")
    times = [r["step_seconds"] for r in steps.values() if "step_seconds" in r]
    return {
        "encoding": run.encoding,
        "seed": run.seed,
        "parameters": _parameters(run.config),
        "steps": max(steps, default=0),
        "step_seconds": statistics.median(times) if times else None,
        "scores": evaluations(run.workdir).get(run.config.steps),
        "failure": failure,
    }


@functools.cache
def _parameters(config: TrainConfig) -> int:
    """Traced once for all the reports of a comparison."""
    return count_parameters(jax.eval_shape(lambda: make_state(config, config.seed)).params)


def _row(encoding: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The seeds of an encoding together."""
    mine = [r for r in records if r["encoding"] == encoding]
    finished = [r["scores"] for r in mine if r["scores"]]
    names = finished[0] if finished else {}
    times = [r["step_seconds"] for r in mine if r["step_seconds"]]
    return {
        "encoding": encoding,
        "parameters": mine[0]["parameters"],
        "scores": {name: _spread([scores[name] for scores in finished]) for name in names},
        "steps": sorted({r["steps"] for r in mine}),
        "step_seconds": statistics.median(times) if times else None,
        "notes": [
            f"seed {r['seed']}: {r['failure'] or 'not finished'}" for r in mine if not r["scores"]
        ],
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}


def _finished_folders(runs: Sequence[Run]) -> dict[str, list[Path]]:
    """Encoding -> the evaluations of its finished runs."""
    folders: dict[str, list[Path]] = {}
    for run in filter(is_finished, runs):
        folder = evaluation_folder(run.workdir, run.config.steps)
        folders.setdefault(run.encoding, []).append(folder)
    return folders


def _title(config: TrainConfig, seeds: Sequence[int]) -> str:
    listed = ", ".join(map(str, seeds))
    return f"{config.name}: encodings after {config.steps} steps, seeds {listed}"


def _common(config: TrainConfig) -> dict[str, Any]:
    fields = to_dict(config)
    del fields["seed"], fields["model"]["position"]
    return fields


def _table(rows: Sequence[Mapping[str, Any]], metric: Metric) -> str:
    """The rows in Markdown, the best headline number first."""

    def order(row):
        return metric.order({name: spread["mean"] for name, spread in row["scores"].items()})

    names = list(dict.fromkeys(name for row in rows for name in row["scores"]))
    head = ["encoding", "parameters", *(n.replace("_", " ") for n in names), "steps", "s / step"]
    lines = [[*head, "notes"], ["---"] * (len(head) + 1)]
    for row in sorted(rows, key=order):
        scores = [_range(row["scores"].get(name), metric) for name in names]
        seconds = row.get("step_seconds")
        lines.append(
            [
                row["encoding"],
                f"{row['parameters']:,}" if "parameters" in row else "",
                *scores,
                ", ".join(map(str, row.get("steps", []))),
                f"{seconds:.3f}" if seconds else "",
                "; ".join(row["notes"]),
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _range(spread: Mapping[str, float] | None, metric: Metric) -> str:
    if spread is None:
        return ""
    mean, low, high = (metric.text(spread[key], digits=1) for key in ("mean", "min", "max"))
    return f"{mean} [{low}, {high}]"
