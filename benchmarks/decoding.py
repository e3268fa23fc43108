"""Tokens per second of decoding from a cache, beside recomputing the whole text for every token.

`python -m benchmarks.decoding` takes the 155M model with several encodings at a context of 2,048:
one step that reads a cache with one place left, and one pass over all of the tokens. Both are
compiled and timed in turns in one run. The bytes of the cache do not vary.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure
from rich.table import Table

from benchmarks import report, timing
from tape_jax import ModelConfig, Transformer
from tape_jax.cache import Cache, new_cache
from tape_jax.generate import Sampling, next_tokens


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What is measured.

    Attributes:
      encodings: by name.
      context: tokens read for each new one.
      layers: of the 155M model's 12; fewer for a quick look.
      batch: texts decoded at once.
      rounds: timed passes of each; the median counts.
      out: folder of decoding.json and decoding.png.
    """

    encodings: tuple[str, ...] = ("rope", "tape", "alibi", "fire", "tapa", "cope")
    context: int = 2_048
    layers: int = 12
    batch: int = 1
    rounds: int = 5
    out: Path = Path("runs/benchmarks")

    def __post_init__(self):
        """Raises ValueError, naming field, value and fix."""
        timing.check_positive("decoding", self, "context", "layers", "batch", "rounds")


def model(encoding: str, benchmark: Benchmark) -> tuple[ModelConfig, dict]:
    """The 155M model with this encoding, newly started."""
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    config = ModelConfig(position=encoding, num_layers=benchmark.layers, dtype=dtype)
    start = jax.jit(Transformer(config).init)
    return config, start(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))["params"]


def cached(config: ModelConfig, params: dict, benchmark: Benchmark) -> timing.Run:
    """One token more, for a cache that all others are in."""
    at = benchmark.context - 1
    cache = new_cache(config, benchmark.batch, benchmark.context)
    segments = jnp.zeros_like(cache.slots.segment_ids)
    held = [
        dataclasses.replace(cache, slots=dataclasses.replace(cache.slots, segment_ids=segments))
    ]
    one = jnp.zeros((benchmark.batch, 1), jnp.int32)

    def run():
        last = held.pop()
        slots = dataclasses.replace(last.slots, filled=jnp.asarray(at))
        chosen, cache = next_tokens(
            config,
            params,
            Cache(last.kept, slots),
            one,
            one + at,
            one,
            Sampling(),
            jax.random.key(0),
        )
        held.append(cache)
        return chosen

    return run


def recomputed(config: ModelConfig, params: dict, benchmark: Benchmark) -> timing.Run:
    """One token more, from all tokens."""
    ids = jnp.zeros((benchmark.batch, benchmark.context), jnp.int32)

    @jax.jit
    def step(params, ids):
        logits = Transformer(config).apply({"params": params}, ids)
        return logits[:, -1].argmax(axis=-1)

    return lambda: step(params, ids)


def cache_bytes(config: ModelConfig, benchmark: Benchmark) -> int:
    """Of the cache, all layers."""
    shapes = jax.eval_shape(lambda: new_cache(config, benchmark.batch, benchmark.context))
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes.kept))


def measure(benchmark: Benchmark) -> dict[str, dict[str, float]]:
    """Encoding -> its figures."""
    figures = {}
    for encoding in benchmark.encodings:  # one model in memory at a time
        config, params = model(encoding, benchmark)
        runs = {
            "cached": cached(config, params, benchmark),
            "recomputed": recomputed(config, params, benchmark),
        }
        times = timing.on_device(runs, benchmark.rounds)
        if errors := [x for x in times.values() if isinstance(x, Exception)]:
            raise errors[0]
        rates = {name: benchmark.batch / seconds for name, seconds in times.items()}
        figures[encoding] = {
            "cache_bytes": cache_bytes(config, benchmark),
            "cached_tokens_per_second": rates["cached"],
            "recomputed_tokens_per_second": rates["recomputed"],
            "speedup": rates["cached"] / rates["recomputed"],
        }
    return figures


def show(figures: Mapping[str, Mapping[str, float]], benchmark: Benchmark) -> None:
    """The table."""
    title = f"{benchmark.layers} layers of 768, batch {benchmark.batch}, {benchmark.context} tokens"
    table = Table(title=title)
    for column in ("encoding", "cache MB", "cached, token/s", "recomputed, token/s", "times"):
        table.add_column(column, justify="left" if column == "encoding" else "right")
    for name, row in figures.items():
        table.add_row(
            name,
            f"{row['cache_bytes'] / 1e6:.1f}",
            f"{row['cached_tokens_per_second']:.2f}",
            f"{row['recomputed_tokens_per_second']:.3f}",
            f"{row['speedup']:.0f}",
        )
    timing.console().print(table)


def draw(figures: Mapping[str, Mapping[str, float]], title: str) -> Figure:
    """Bars of both rates, on a logarithmic axis."""
    figure = Figure(figsize=(7.2, 1.4 + 0.5 * len(figures)), layout="constrained")
    axes = figure.subplots()
    for offset, kind in ((-0.2, "cached"), (0.2, "recomputed")):
        values = [row[f"{kind}_tokens_per_second"] for row in figures.values()]
        bars = axes.barh([i + offset for i in range(len(values))], values, 0.4, label=kind)
        axes.bar_label(bars, [f"{x:.2g}" for x in values], padding=3)
    axes.set(title=title, xlabel="tokens per second", xscale="log")
    axes.set_yticks(range(len(figures)), list(figures))
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.legend()
    return figure


def run(benchmark: Benchmark) -> report.Report:
    """Measures, shows and writes everything."""
    return report.published(
        "decoding",
        benchmark,
        measure=lambda: {"encodings": measure(benchmark)},
        show=lambda found: show(found["encodings"], benchmark),
        draw=lambda found: draw(
            found["encodings"],
            f"{benchmark.context} tokens of context on {found['device']}, {found['date']}",
        ),
    )


def main() -> None:
    """The command; exit status 1 on bad input."""
    report.command(Benchmark, run, __doc__)


if __name__ == "__main__":
    main()
