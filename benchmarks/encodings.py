"""What every positional encoding costs, in figures that do not vary from run to run.

`python -m benchmarks.encodings` takes every encoding and variant of `tape_jax.positions` as its
defaults make it (a scaling of RoPE costs what RoPE does), in the 155M model, batch 1, and compiles
without running:

- parameters, and how many more than RoPE's;
- operations of the forward pass with every product written out, from programs of 2 and of 3 layers:
  each further layer adds the same;
- bytes of position state that a token carries from layer to layer;
- temporaries of a forward and backward pass through 2 layers, with the attention that
  `attention=None` chooses on a CPU and a vocabulary of 256, at `length` and at twice that. Linear
  memory doubles, the N x N array of scores grows fourfold;
- the attention implementations that do not refuse the encoding's calls.

Writes encodings.json and encodings.png.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from benchmarks import costs, report, timing
from tape_jax import ModelConfig, positions

BASE = "rope"

LONGER = 2
"""How many times longer the second length is."""

SQUARE = LONGER**1.5
"""Growth of temporaries from which on memory counts as N x N: halfway, as powers, to fourfold."""

PANELS = {
    "gflop": "operations, times RoPE",
    "parameters": "parameters beyond RoPE",
    "state_bytes": "state, bytes per token",
    "temporaries": "temporaries, times RoPE",
}


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What is measured.

    Attributes:
      encodings: names in `tape_jax.positions`, variants included; all when empty. RoPE is always
        measured, as the base.
      layers: of the model whose operations and parameters are counted, at least 2.
      length: tokens of the one sequence.
      out: folder of encodings.json and encodings.png.
    """

    encodings: tuple[str, ...] = ()
    layers: int = 12
    length: int = 1024
    out: Path = Path("runs/benchmarks")

    def __post_init__(self):
        """Raises ValueError, naming field, value and fix."""
        timing.check_positive("encodings", self, "layers", "length")
        if self.layers < 2:
            raise ValueError(f"encodings.layers={self.layers} must be >= 2")
        for name in self.encodings:
            positions.get(name)

    @property
    def names(self) -> list[str]:
        """RoPE first, then what was asked for."""
        asked = self.encodings or (*positions.ENCODINGS, *positions.VARIANTS)
        return list(dict.fromkeys((BASE, *asked)))


# --- Measuring ------------------------------------------------------------------------------------


def programs(name: str, length: int) -> dict[tuple[str, str], timing.Run]:
    """(name, what for) -> the program to compile, for one encoding."""
    encoding = positions.get(name)
    counted = functools.partial(ModelConfig, position=encoding, attention="reference")
    trained = ModelConfig(position=encoding, num_layers=2, vocab_size=256)
    return {
        (name, "two layers"): lambda: costs.forward(counted(num_layers=2), length),
        (name, "three layers"): lambda: costs.forward(counted(num_layers=3), length),
        (name, "short"): lambda: costs.backward(trained, length),
        (name, "long"): lambda: costs.backward(trained, LONGER * length),
    }


def figures(name: str, compiled: Mapping[Any, Any], layers: int) -> dict[str, Any]:
    """One encoding's figures; raises what its compilation raised."""
    found = [compiled[name, part] for part in ("two layers", "three layers", "short", "long")]
    for program in found:
        if isinstance(program, Exception):
            raise program
    two, three = (program.cost_analysis()["flops"] / 1e9 for program in found[:2])
    short, long = (program.memory_analysis().temp_size_in_bytes for program in found[2:])
    config = ModelConfig(position=positions.get(name), num_layers=layers)
    return {
        "parameters": costs.parameters(config),
        "gflop": two + (layers - 2) * (three - two),
        "state_bytes": costs.state_bytes(config),
        "temporaries": short,
        "growth": long / short,
        "implementations": costs.implementations(config),
    }


def measure(benchmark: Benchmark) -> list[dict[str, Any]]:
    """One row per encoding: its figures, those relative to RoPE's, any error."""
    asked = {}
    for name in benchmark.names:
        asked |= programs(name, benchmark.length)
    compiled = timing.compiled(asked, costs.OPTIONS)
    rows = []
    for name in benchmark.names:
        found = timing.attempt(figures, name, compiled, benchmark.layers)
        failed = isinstance(found, Exception)
        error = timing.summary(found) if failed else None
        rows.append({"name": name, "figures": {} if failed else found, "error": error})
    base = rows[0]["figures"]
    for row in rows:
        row["over_rope"] = _over(row["figures"], base)
    return rows


def _over(found, base):
    """What `PANELS` shows of some figures: ratios to RoPE's, a difference, a plain figure."""
    if not (found and base):
        return {}
    return {
        "gflop": found["gflop"] / base["gflop"],
        "parameters": found["parameters"] - base["parameters"],
        "state_bytes": found["state_bytes"],
        "temporaries": found["temporaries"] / base["temporaries"],
    }


def is_linear(found: Mapping[str, Any]) -> bool:
    """Whether memory grew with the length and not with its square."""
    return found["growth"] < SQUARE


# --- Reporting ------------------------------------------------------------------------------------


def show(rows: Sequence[Mapping[str, Any]], benchmark: Benchmark) -> None:
    """The table."""
    shape = f"{benchmark.layers} layers of 768, batch 1, length {benchmark.length}"
    table = Table(title=shape + "; in brackets: beside RoPE")
    table.add_column("encoding")
    for title in ("parameters", "GFLOP forward", "state, B/token", "temporaries, MB"):
        table.add_column(title, justify="right")
    for title in (f"at {LONGER} N", "attention"):
        table.add_column(title)
    for row in rows:
        found, over = row["figures"], row["over_rope"]
        if not over:
            table.add_row(row["name"], "", "", "", "", "", row["error"] or "")
            continue
        table.add_row(
            row["name"],
            f"{found['parameters']:,} ({over['parameters']:+,})",
            f"{found['gflop']:.1f} ({over['gflop']:.3f})",
            f"{found['state_bytes']:,}",
            f"{found['temporaries'] / 1e6:,.1f} ({over['temporaries']:.3f})",
            f"x {found['growth']:.1f}, {'linear' if is_linear(found) else 'N x N'}",
            " ".join(found["implementations"]),
        )
    timing.console().print(table)


def draw(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """A panel of bars for each of `PANELS`."""
    figure = Figure(figsize=(4 * len(PANELS), 1.6 + 0.3 * len(rows)), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for panel, (name, panel_title) in zip(panels, PANELS.items(), strict=True):
        values = [row["over_rope"].get(name, 0) for row in rows]
        bars = panel.barh(range(len(rows)), values)
        panel.bar_label(bars, [f"{x:,.3f}".rstrip("0").rstrip(".") for x in values], padding=3)
        panel.set_yticks(range(len(rows)), [row["name"] for row in rows])
        panel.margins(x=0.25)
        panel.set_title(panel_title)
    panels[0].invert_yaxis()
    return figure


def run(benchmark: Benchmark) -> report.Report:
    """Measures, shows and writes everything."""
    return report.published(
        "encodings",
        benchmark,
        measure=lambda: {"rows": measure(benchmark)},
        show=lambda found: show(found["rows"], benchmark),
        draw=lambda found: draw(
            found["rows"],
            f"positional encodings, {benchmark.layers} layers of 768, length {benchmark.length}",
        ),
    )


def main() -> None:
    """The command; exit status 1 on bad input."""
    report.command(Benchmark, run, __doc__)


if __name__ == "__main__":
    main()
