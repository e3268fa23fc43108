"""Time of position-aware attention, forward and forward + backward, beside plain attention.

`python -m benchmarks.attention` runs every implementation that this platform has, each with
position states (v and e mixed) and without (v alone: RoPE's attention), and beside them, in the
same rounds:

- jax.nn: `jax.nn.dot_product_attention`, which is cuDNN on GPUs: one call (RoPE), and the three
  calls of the official PyTorch code (for v and for its cos and sin, which hold each half of e
  twice). Adding up their three gradients of q and k is left out, in their favour.
- tokamax, where it is installed: `tokamax.dot_product_attention` of v, and of [v | e].

TFLOP/s count what the mathematics needs, whatever a row computes anew: with n value streams of
width D, 2 B H N^2 D operations for the scores and for each stream forward, and (3 + 2 n) times that
backward (the scores again, dq and dk; each stream's gradient and its share of the scores'); half of
it all when causal. `--device-check` first compares every implementation with float64 and makes the
exit status 1 when one is off.
"""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import tyro
from matplotlib.figure import Figure
from rich.table import Table

from benchmarks import device_check, timing
from pallas_kernels import IMPLEMENTATIONS, tape_attention
from tape_jax.errors import unknown

MOST_SCORES = 2 * 2**30
"""Bytes of N x N float32 scores up to which attention that writes them out takes part.

Forward and backward hold about five arrays of that size: 10 GiB, which a 16 GB accelerator has.
"""

ON_CPU = {"lengths": (256, 512, 1024, 2048), "widths": (64,), "heads": (4,), "tokens": 1}
ON_ACCELERATOR = {
    "lengths": (1024, 4096, 16384),
    "widths": (64, 128),
    "heads": (16,),
    "tokens": 16384,
}


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """What is measured; None takes what suits the platform.

    Attributes:
      lengths, widths, heads: N, D and H, every combination.
      tokens: B N; the batch is at least one sequence.
      dtype: of all arrays; float32 on CPUs, bfloat16 elsewhere.
      implementations: some of this platform's; all when None.
      causal: a query reads itself and the past.
      rounds: timed passes of every row; the median counts.
      device_check: first compare with float64, outputs and gradients.
      out: folder of attention.json and attention.png.
    """

    lengths: tuple[int, ...] | None = None
    widths: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    tokens: int | None = None
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    implementations: tuple[str, ...] | None = None
    causal: bool = True
    rounds: int = 5
    device_check: bool = False
    out: Path = Path("runs/benchmarks")

    def __post_init__(self):
        """Raises ValueError, naming field, value and fix."""
        timing.check_positive("attention", self, "lengths", "widths", "heads", "tokens", "rounds")
        for width in self.widths or ():
            if width % 2:
                raise ValueError(f"attention.widths={width} must be even: states have two halves")


def resolve(benchmark: Benchmark) -> Benchmark:
    """The benchmark with every field set for this platform.

    Raises:
      ValueError: an implementation that is unknown or does not run here.
    """
    platform = jax.default_backend()
    here = tuple(name for name, x in IMPLEMENTATIONS.items() if platform in x.platforms)
    for name in benchmark.implementations or ():
        if name not in here:
            known = unknown("implementation", name, here)
            raise ValueError(f"attention.implementations={name} on {platform}: {known}")
    on_cpu = platform == "cpu"
    defaults = (ON_CPU if on_cpu else ON_ACCELERATOR) | {
        "dtype": "float32" if on_cpu else "bfloat16",
        "implementations": here,
    }
    missing = {key: x for key, x in defaults.items() if getattr(benchmark, key) is None}
    return dataclasses.replace(benchmark, **missing)


@dataclasses.dataclass(frozen=True)
class Shape:
    """B, N, H and D of one comparison; q, k, v and e all have them."""

    batch: int
    length: int
    heads: int
    width: int

    def operations(self, states: bool, backward: bool, causal: bool) -> float:
        """Of one pass, as the module's docstring counts them."""
        streams = 2 if states else 1
        products = (1 + streams) + (3 + 2 * streams if backward else 0)
        whole = 2.0 * self.batch * self.heads * self.length**2 * self.width * products
        return whole / 2 if causal else whole

    def arrays(self, dtype: str) -> list[jax.Array]:
        """q, k, v, e."""
        size = (self.batch, self.length, self.heads, self.width)
        keys = jax.random.split(jax.random.key(0), 4)
        return [jax.random.normal(key, size, dtype) for key in keys]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to compute attention, plain or with position states.

    Attributes:
      call: what it does, in a word or two.
      attend: (*operands, causal=) -> outputs.
      operands: (q, k, v, e) -> what it is given.
      writes_scores: its memory grows with N^2.
    """

    name: str
    call: str
    states: bool
    attend: Callable[..., Any]
    operands: Callable[..., Sequence[jax.Array]]
    writes_scores: bool = False


def contenders(names: Sequence[str]) -> list[Contender]:
    """The implementations by name, and the peers there are; each plain and with states."""
    found = []
    for name in names:
        ours = functools.partial(tape_attention, implementation=name)
        big = name == "reference"
        found.append(Contender(name, "RoPE", False, ours, _plain, big))
        found.append(Contender(name, "TAPE", True, ours, _all, big))
    on_gpu = jax.default_backend() == "gpu"
    library = functools.partial(_jax_nn, "cudnn" if on_gpu else "xla")
    found.append(Contender("jax.nn", "one call", False, library, _plain, not on_gpu))
    found.append(Contender("jax.nn", "three calls", True, library, _three, not on_gpu))
    if importlib.util.find_spec("tokamax"):
        found.append(Contender("tokamax", "RoPE", False, _tokamax, _plain))
        found.append(Contender("tokamax", "TAPE, [v | e]", True, _tokamax, _all))
    return found


def _plain(q, k, v, e):
    return q, k, v


def _all(q, k, v, e):
    return q, k, v, e


def _three(q, k, v, e):
    # Operands of their own for each call: else XLA computes the three equal scores once.
    a, b = jnp.split(e, 2, axis=-1)
    cos, sin = (jnp.concatenate([half, half], axis=-1) for half in (a, b))
    return q, k, v, q, k, cos, q, k, sin


def _jax_nn(implementation, *operands, causal):
    """A call for each (q, k, values) among the operands."""
    calls = zip(operands[::3], operands[1::3], operands[2::3], strict=True)
    attend = functools.partial(
        jax.nn.dot_product_attention, is_causal=causal, implementation=implementation
    )
    return [attend(*call) for call in calls]


def _tokamax(q, k, *streams, causal):
    import tokamax

    return tokamax.dot_product_attention(q, k, jnp.concatenate(streams, -1), is_causal=causal)


# --- Measuring ------------------------------------------------------------------------------------

PASSES = {"forward": False, "forward_backward": True}
"""The passes by name: whether they go backward."""


def measure(shape: Shape, benchmark: Benchmark, peak: float | None) -> list[dict[str, Any]]:
    """One row per contender and pass.

    Ratios are to plain attention of the same name and to jax.nn's three calls, above 1: slower.

    Args:
      peak: operations per second that `of_matmul` is a fraction of.
    """
    arrays = shape.arrays(benchmark.dtype)
    those = {
        (x, name): x.operands(*arrays)
        for x in contenders(benchmark.implementations)
        for name in PASSES
    }
    programs = timing.compiled(
        {key: functools.partial(_lower, *key, those[key], shape, benchmark.causal) for key in those}
    )
    runs = {key: functools.partial(_run, program, those[key]) for key, program in programs.items()}
    times = timing.on_device(runs, benchmark.rounds)
    return [_row(x, name, shape, benchmark, times, peak) for x, name in times]


def _lower(contender, name, operands, shape, causal):
    scores = 4 * shape.batch * shape.heads * shape.length**2
    if contender.writes_scores and scores > MOST_SCORES:
        raise ValueError(
            f"left out: its scores take {scores / 2**30:.1f} GiB, more than"
            f" {MOST_SCORES / 2**30:.0f}"
        )
    attend = functools.partial(contender.attend, causal=causal)

    def both(*operands):
        outs, pull = jax.vjp(attend, *operands)
        return outs, pull(outs)

    return jax.jit(both if PASSES[name] else attend).lower(*operands)


def _run(program, operands):
    if isinstance(program, Exception):
        raise program
    return program(*operands)


def _row(contender, name, shape, benchmark, times, peak):
    row = dataclasses.asdict(shape) | {
        "implementation": contender.name,
        "call": contender.call,
        "states": contender.states,
        "pass": name,
    }
    seconds = times[contender, name]
    if isinstance(seconds, Exception):
        return row | {"seconds": None, "error": timing.summary(seconds)}
    by_call = {(x.name, x.states): s for (x, one_pass), s in times.items() if one_pass == name}
    rate = shape.operations(contender.states, PASSES[name], benchmark.causal) / seconds
    return row | {
        "seconds": seconds,
        "tflops": rate / 1e12,
        "over_plain": _ratio(seconds, by_call[contender.name, False]),
        "over_three_calls": _ratio(seconds, by_call["jax.nn", True]),
        "of_matmul": None if peak is None else rate / peak,
        "error": None,
    }


def _ratio(seconds, base):
    return None if isinstance(base, Exception) else seconds / base


def matmul_rate(size: int = 8192) -> float:
    """Operations per second of one large bfloat16 product: what this device gives at best."""
    a = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    program = jax.jit(jnp.dot)
    seconds = timing.on_device({"dot": lambda: program(a, a)}, rounds=5)["dot"]
    if isinstance(seconds, Exception):
        raise seconds
    return 2.0 * size**3 / seconds


# --- Reporting ------------------------------------------------------------------------------------


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """The table of one shape."""
    batch, length, heads, width = (rows[0][x] for x in ("batch", "length", "heads", "width"))
    table = Table(title=f"B {batch}, N {length}, H {heads}, D {width}")
    columns = ("implementation", "call", "pass")
    figures = {
        "ms": ("seconds", 1e3),
        "TFLOP/s": ("tflops", 1),
        "x plain": ("over_plain", 1),
        "x three calls": ("over_three_calls", 1),
        "of matmul": ("of_matmul", 1),
    }
    for column in (*columns, *figures):
        table.add_column(column, justify="left" if column in columns else "right")
    for row in rows:
        cells = [row["implementation"], row["call"], row["pass"].replace("_", " + ")]
        if row["error"]:
            table.add_row(*cells, row["error"])
            continue
        values = [(row[name], factor) for name, factor in figures.values()]
        table.add_row(*cells, *("" if x is None else f"{x * by:.3f}" for x, by in values))
    timing.console().print(table)


def draw(rows: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Time against length: a row of panels per heads and width, a column per pass."""
    sizes = sorted({(row["heads"], row["width"]) for row in rows})
    colours = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(_names(rows)))}
    figure = Figure(figsize=(12, 0.6 + 4.6 * len(sizes)), layout="constrained")
    figure.suptitle(title)
    panels = figure.subplots(len(sizes), len(PASSES), squeeze=False)
    for size, row_of_panels in zip(sizes, panels, strict=True):
        for name, panel in zip(PASSES, row_of_panels, strict=True):
            here = [r for r in rows if (r["heads"], r["width"], r["pass"]) == (*size, name)]
            _draw_lines(panel, here, colours)
            heads, width = size
            panel.set_title(f"{name.replace('_', ' + ')}, H {heads}, D {width}")
    panels[0, -1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), fontsize="small")
    return figure


def _names(rows):
    return [row["implementation"] for row in rows]


def _draw_lines(panel, rows, colours):
    """A line for each implementation and call; solid with position states."""
    for name in dict.fromkeys(_names(rows)):
        for states, line, marker in ((True, "-", "o"), (False, "--", "x")):
            found = [r for r in rows if (r["implementation"], r["states"]) == (name, states)]
            points = [(r["length"], 1e3 * r["seconds"]) for r in found if r["error"] is None]
            if points:
                label = f"{name}, {found[0]['call']}"
                xs, ys = zip(*points, strict=True)
                panel.plot(xs, ys, line, color=colours[name], marker=marker, label=label)
    lengths = sorted({row["length"] for row in rows})
    panel.set(xscale="log", yscale="log", xlabel="length N", ylabel="ms")
    panel.set_xticks(lengths, [str(n) for n in lengths])
    panel.minorticks_off()
    panel.grid(True, alpha=0.25)


def run(benchmark: Benchmark) -> dict[str, Any]:
    """Measures, shows and writes everything; what was found is on disk after every shape."""
    benchmark = resolve(benchmark)
    timing.make_folder("attention", benchmark.out)
    report = timing.environment(benchmark) | {"check": [], "matmul_tflops": None, "rows": []}
    path = benchmark.out / "attention.json"
    if benchmark.device_check:
        report["check"] = device_check.check(benchmark.implementations)
        device_check.show(report["check"])
        timing.write_json(path, report)
    peak = None if jax.default_backend() == "cpu" else matmul_rate()
    report["matmul_tflops"] = None if peak is None else peak / 1e12
    for heads in benchmark.heads:
        for width in benchmark.widths:
            for length in benchmark.lengths:
                shape = Shape(max(1, benchmark.tokens // length), length, heads, width)
                rows = measure(shape, benchmark, peak)
                show(rows)
                report["rows"] += rows
                timing.write_json(path, report)
    title = f"attention on {report['device']}, {benchmark.dtype}, {report['date']}"
    draw(report["rows"], title).savefig(path.with_suffix(".png"), dpi=120)
    return report


def main() -> None:
    """The command; exit status 1 on bad input and when the device check fails."""
    benchmark = tyro.cli(Benchmark, description=__doc__)
    try:
        report = run(benchmark)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if failed := device_check.failures(report["check"]):
        raise SystemExit("device check FAILED:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
