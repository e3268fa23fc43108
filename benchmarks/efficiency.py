"""What each positional encoding costs: the paper's Tables 3 and 4 in one command.

`python -m benchmarks.efficiency` takes every registered encoding as its defaults make it, batch 1:

- operations of the 155M model's forward pass, by XLA's cost analysis of the program compiled for
  the CPU with every product written out (a loop over tiles would be counted once), and parameters;
- bytes of position state that a token carries from layer to layer;
- speed of one attention layer (`tape_jax.attention.Attention`: projections, rotation, attention
  over tokens and state, output projection; the position MLP belongs to the block) on this device,
  with the state of a layer inside the stack.

Encodings that mix a state have a second row, "separate": three attention calls that share q and k,
for v, cos and sin, as in the official code without its kernel; cos and sin hold each half of the
state twice. The model's own attention ("fused") mixes v and the state in one call. Ratios are to
RoPE, beside those of the paper, "Rethinking Addressing in Language Models via Contextualized
Equivariant Positional Encoding" (arXiv 2501.00712v1), Tables 3 and 4.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from rich.table import Table

from benchmarks import costs, report, timing
from pallas_kernels import tape_attention
from pallas_kernels.implementations import Implementation, registered
from tape_jax import ModelConfig, positions
from tape_jax.attention import Attention

BASE = "rope"

MEASURES = {
    "gflop": "GFLOP forward",
    "parameters": "parameters",
    "state_bytes": "state, bytes per token",
    "iterations_per_second": "layer, it/s",
}

PAPER = {
    "rope": {"gflop": 321.10, "parameters": 154.89 * 2**20, "iterations_per_second": 4810},
    "tape": {"gflop": 365.65, "parameters": 155.33 * 2**20, "iterations_per_second": 3910},
    "tape, separate": {"iterations_per_second": 1775},
    "fire": {"gflop": 331.97, "parameters": 154.90 * 2**20, "iterations_per_second": 1799},
    "t5": {"gflop": 321.10, "parameters": 154.90 * 2**20, "iterations_per_second": 1449},
}
"""Published figures by row: 155M models at length 1024, and one layer on an A100."""


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What is measured.

    Attributes:
      layers: of the 155M model's 12; fewer for a quick look.
      length: tokens of the one sequence.
      rounds: timed passes of every layer; the median counts.
      out: folder of efficiency.json and efficiency.png.
    """

    layers: int = 12
    length: int = 1024
    rounds: int = 20
    out: Path = Path("runs/benchmarks")

    def __post_init__(self):
        """Raises ValueError, naming field, value and fix."""
        timing.check_positive("efficiency", self, "layers", "length", "rounds")


@dataclasses.dataclass(frozen=True)
class Variant:
    """One row: an encoding, and whether its attention is three separate calls."""

    encoding: positions.Encoding
    separate: bool = False

    @property
    def name(self) -> str:
        """As in `PAPER`."""
        return f"{self.encoding.name}, separate" if self.separate else self.encoding.name

    def config(self, **fields) -> ModelConfig:
        """The 155M model."""
        return ModelConfig(position=self.encoding, scan_layers=False, **fields)

    @contextlib.contextmanager
    def attention(self, within: str | None, apart: bool = False):
        """The name of its attention by implementation `within`, while the context lasts."""
        if not self.separate:
            yield within
            return
        attend = functools.partial(_three_calls, within, apart)
        with registered("separate", Implementation(attend)) as name:
            yield name


def _three_calls(implementation, apart, q, k, v, e, *, order, **arguments):
    """P v and P e in three calls. `apart` keeps XLA from computing the equal scores once."""
    arguments |= {"positions": order, "implementation": implementation}
    out, _ = tape_attention(q, k, v, **arguments)
    if e is None:
        return out, None, None
    halves, last = [], out
    for half in jnp.split(e, 2, axis=-1):
        if apart:  # no zero to the compiler: the product may be NaN
            q = q + 0 * last[:1, :1, :1, :1]
        last, _ = tape_attention(q, k, jnp.concatenate([half, half], axis=-1), **arguments)
        halves.append(last[..., : half.shape[-1]])
    return out, jnp.concatenate(halves, axis=-1), None


def variants() -> list[Variant]:
    """Every registered encoding; those that mix a state also with separate calls."""
    found = []
    for name in positions.names():
        variant = Variant(positions.get(name))
        found.append(variant)
        state = timing.attempt(costs.state, variant.config(), 1)
        failed = isinstance(state, Exception)  # its row will say why
        if not failed and variant.encoding.values(state) is not None:
            found.append(Variant(variant.encoding, separate=True))
    return found


# --- Measuring ------------------------------------------------------------------------------------


def count(variant: Variant, benchmark: Benchmark) -> dict[str, float]:
    """The figures that do not vary: operations, parameters, bytes of state."""
    with variant.attention("reference", apart=True) as attention:
        config = variant.config(num_layers=benchmark.layers, attention=attention)
        program = costs.forward(config, benchmark.length).compile(costs.OPTIONS)
        return {
            "gflop": program.cost_analysis()["flops"] / 1e9,
            "parameters": costs.parameters(config),
            "state_bytes": costs.state_bytes(config),
        }


def make_layer(variant: Variant, benchmark: Benchmark) -> timing.Run:
    """One compiled attention layer on this device, with its inputs."""
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    with variant.attention(within=None) as attention:
        config = variant.config(dtype=dtype, attention=attention)
        at = jnp.arange(benchmark.length, dtype=jnp.int32)[None]
        shape = costs.state(config, benchmark.length)
        state = None if shape is None else jnp.ones(shape.shape, shape.dtype)
        x = jax.random.normal(jax.random.key(0), (1, benchmark.length, config.hidden_size), dtype)
        layer = Attention(config)
        params = jax.jit(layer.init)(jax.random.key(1), x, state, at, None)
        compiled = jax.jit(layer.apply).lower(params, x, state, at, None).compile()
    return functools.partial(compiled, params, x, state, at, None)


def measure(benchmark: Benchmark) -> list[dict[str, Any]]:
    """One row per variant: its figures, their ratios to RoPE's, the paper's ratios, any error."""
    found = {x: timing.attempt(count, x, benchmark) for x in variants()}
    layers = {x: timing.attempt(make_layer, x, benchmark) for x in found}
    ready = {x: layer for x, layer in layers.items() if not isinstance(layer, Exception)}
    times = layers | timing.on_device(ready, benchmark.rounds)
    rows = []
    for variant, counts in found.items():
        errors = [x for x in (counts, times[variant]) if isinstance(x, Exception)]
        figures = {} if isinstance(counts, Exception) else dict(counts)
        if not isinstance(times[variant], Exception):
            figures["iterations_per_second"] = 1.0 / times[variant]
        error = "; ".join(map(timing.summary, errors)) or None
        rows.append({"name": variant.name, "figures": figures, "error": error})
    base = next(row["figures"] for row in rows if row["name"] == BASE)
    for row in rows:
        row["ratios"] = _ratios(row["figures"], base)
        row["paper_ratios"] = _ratios(PAPER.get(row["name"], {}), PAPER[BASE])
    return rows


def _ratios(figures, base):
    return {name: x / base[name] for name, x in figures.items() if base.get(name)}


# --- Reporting ------------------------------------------------------------------------------------


def show(rows: Sequence[Mapping[str, Any]], benchmark: Benchmark) -> None:
    """The table: each figure, its ratio to RoPE's and the paper's."""
    title = f"{benchmark.layers} layers of 768, batch 1, length {benchmark.length}"
    table = Table(title=title + "; in brackets: times RoPE, here | in the paper")
    table.add_column("encoding")
    for measure_title in MEASURES.values():
        table.add_column(measure_title, justify="right")
    for row in rows:
        cells = []
        for name in MEASURES:
            if name not in row["figures"]:
                cells.append("")
                continue
            ratios = [row[kind].get(name) for kind in ("ratios", "paper_ratios")]
            inside = " | ".join("-" if x is None else f"{x:.3f}" for x in ratios)
            cells.append(f"{row['figures'][name]:,.1f} ({inside})")
        table.add_row(row["name"], *cells)
    console = timing.console()
    console.print(table)
    for row in rows:
        if row["error"]:
            console.print(f"{row['name']}: {row['error']}")


def draw(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """A panel of bars per measure: ratios to RoPE, here and in the paper."""
    figure = Figure(figsize=(4 * len(MEASURES), 1.6 + 0.55 * len(rows)), layout="constrained")
    figure.suptitle(title + "; times RoPE")
    panels = figure.subplots(1, len(MEASURES), sharey=True)
    for panel, (name, measure_title) in zip(panels, MEASURES.items(), strict=True):
        for offset, kind, label in ((-0.2, "ratios", "here"), (0.2, "paper_ratios", "paper")):
            values = [row[kind].get(name, 0.0) for row in rows]
            places = [i + offset for i in range(len(rows))]
            bars = panel.barh(places, values, 0.4, label=label)
            panel.bar_label(bars, [f"{x:.3f}" if x else "" for x in values], padding=3)
        panel.axvline(1.0, color="grey", linewidth=0.8)
        panel.set_yticks(range(len(rows)), [row["name"] for row in rows])
        panel.margins(x=0.18)
        panel.set_title(measure_title)
    panels[0].invert_yaxis()
    panels[-1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5))
    return figure


def run(benchmark: Benchmark) -> report.Report:
    """Measures, shows and writes everything."""
    return report.published(
        "efficiency",
        benchmark,
        measure=lambda: {"rows": measure(benchmark), "paper": PAPER},
        show=lambda found: show(found["rows"], benchmark),
        draw=lambda found: draw(
            found["rows"], f"positional encodings on {found['device']}, {found['date']}"
        ),
    )


def main() -> None:
    """The command; exit status 1 on bad input."""
    report.command(Benchmark, run, __doc__)


if __name__ == "__main__":
    main()
