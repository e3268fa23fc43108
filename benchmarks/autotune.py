"""Measures the tiles of the GPU kernels and writes them into `pallas_kernels/tiles.json`.

`python -m benchmarks.autotune` takes every head width, dtype and kernel of the table in turn, on a
causal training shape: tiles that fit the GPU's shared memory and registers are compiled, those
whose results are those of the tile in the table are timed in interleaved rounds, and the fastest
takes its place. The table is written after every width and dtype; an interrupted run is continued
by the same command. Entries of other GPUs stay as they are.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro

from benchmarks import timing
from pallas_kernels import IMPLEMENTATIONS, gpu, tiles
from pallas_kernels.flash import Spec
from pallas_kernels.tiles import Tile, Tiles

WIDTHS = (16, 32, 64, 128)

SIDES = {"bfloat16": (32, 64, 128, 256), "float32": (16, 32, 64)}
"""Rows of candidates."""

WARPS, STAGES = (4, 8), (1, 2, 3, 4)

SUMS = {"bfloat16": 192, "float32": 64}
"""Float32 sums that a thread, which has 255 registers, can hold beside what else it needs.

Without tensor cores a float32 product's factors go through registers too. Candidates beyond spill
kilobytes, and the largest float32 ones take the compiler half a minute each.
"""

TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}
"""Relative root mean square between two tiles' results that rounding explains."""

GAIN = 1.02
"""How much faster a tile must be to replace the one in the table: less is noise."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is tuned, and on what.

    Attributes:
      widths: padded head widths; of the states too.
      dtypes: bfloat16 stands for float16 as well.
      batch, length, heads: the shape that is timed.
      rounds: timed passes of every candidate; the median counts.
      out: the table; another file starts as a copy of the library's.
    """

    widths: tuple[int, ...] = WIDTHS
    dtypes: tuple[str, ...] = tuple(SIDES)
    batch: int = 4
    length: int = 4096
    heads: int = 16
    rounds: int = 5
    out: Path = tiles.TABLE

    def __post_init__(self):
        """Raises ValueError, naming field, value and fix."""
        timing.check_positive("autotune", self, "widths", "batch", "length", "heads", "rounds")
        for field, known in (("widths", WIDTHS), ("dtypes", tuple(SIDES))):
            given = getattr(self, field)
            if not given or set(given) - set(known):
                raise ValueError(f"autotune.{field}={given} must be some of {known}")
        if not self.out.parent.is_dir():
            raise ValueError(f"autotune.out={self.out}: {self.out.parent} is no folder, make it")


@dataclasses.dataclass(frozen=True)
class Problem:
    """One kernel, width and dtype, at the shape that is timed."""

    kernel: str
    width: int
    dtype: str
    batch: int
    length: int
    heads: int

    def shared_memory(self, tile: Tile) -> int:
        """Bytes that a block needs."""
        return tiles.shared_memory(self.kernel, tile, *self._sizes)

    def fit(self, tile: Tile, limit: int) -> Tile:
        """What the library makes of a tile where a block has `limit` bytes."""
        return tiles.fit(self.kernel, tile, *self._sizes, limit)

    @property
    def _sizes(self):
        return self.width, self.width, jnp.dtype(self.dtype).itemsize

    def sums(self, tile: Tile) -> float:
        """Float32 numbers that a thread holds: its share of the results and of a tile of scores."""
        rows, streams = {
            "forward": (tile.block_q, 2),
            "keys": (tile.block_k, 3),
            "queries": (tile.block_q, 1),
        }[self.kernel]
        numbers = rows * streams * self.width + tile.block_q * tile.block_k
        return numbers / (32 * tile.num_warps)


def candidates(problem: Problem, limit: int) -> list[Tile]:
    """Tiles that need at most `limit` bytes of shared memory and can hold their sums."""
    sides = SIDES[problem.dtype]
    every = itertools.starmap(Tile, itertools.product(sides, sides, WARPS, STAGES))
    return [
        tile
        for tile in every
        if problem.shared_memory(tile) <= limit and problem.sums(tile) <= SUMS[problem.dtype]
    ]


# --- Running a kernel -----------------------------------------------------------------------------

Build = Callable[[Problem, Sequence[Tile]], Mapping[Tile, timing.Run | Exception]]
Timer = Callable[[Mapping[Tile, timing.Run]], Mapping[Tile, float | Exception]]


def build(problem: Problem, those: Sequence[Tile]) -> dict[Tile, timing.Run | Exception]:
    """The kernel compiled with each tile, on the same inputs."""
    operands = _operands(problem)
    programs = timing.compiled(
        {tile: functools.partial(_lower, problem, tile, operands) for tile in those}
    )
    return {
        tile: x if isinstance(x, Exception) else functools.partial(x, *operands)
        for tile, x in programs.items()
    }


def _operands(problem):
    """q, k, values, gradients of the outputs, log-sum-exp and delta, of whatever kernel."""
    shape = (problem.batch, problem.length, problem.heads, problem.width)
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v, e, *d_outs = (jax.random.normal(key, shape, problem.dtype) for key in keys)
    plain = {"causal": True, "order": None, "segment_ids": None, "score_mod": None}
    attend = functools.partial(IMPLEMENTATIONS["xla"].attend, scale=problem.width**-0.5, **plain)
    *outs, lse = jax.jit(attend)(q, k, v, e)
    pairs = zip(d_outs, outs, strict=True)
    delta = sum((d.astype(jnp.float32) * x.astype(jnp.float32)).sum(axis=-1) for d, x in pairs)
    return q, k, (v, e), tuple(d_outs), lse.swapaxes(1, 2), delta.swapaxes(1, 2)


def _lower(problem, tile, operands):
    spec = Spec(
        n_q=problem.length,
        n_k=problem.length,
        scale=problem.width**-0.5,
        causal=True,
        by_index=True,
        tiles=Tiles(tile, tile, tile),
        kernels=(gpu.forward, gpu.backward),
        interpret=gpu.INTERPRET,
    )

    def forward(q, k, values, d_outs, lse, delta):
        return gpu.forward(spec, q, k, values, side=None, bias=None)

    def backward(q, k, values, *rest):
        return gpu.backward(spec, q, k, values, None, None, *rest)

    # Of the backward pass's two kernels, the compiler drops the one whose results nobody takes.
    taken = {
        "forward": forward,
        "keys": lambda *x: backward(*x)[1:],
        "queries": lambda *x: backward(*x)[0],
    }
    return jax.jit(taken[problem.kernel]).lower(*operands)


def is_close(got: Any, want: Any, tolerance: float) -> bool:
    """Whether two results differ by rounding only."""
    return all(
        bool(_relative_rms(a, b) < tolerance)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


@jax.jit
def _relative_rms(a, b):
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.sqrt(jnp.mean((a - b) ** 2) / jnp.mean(b**2))


# --- Choosing -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Choice:
    """The tile of one problem, and how it was found.

    Attributes:
      seconds, before: of the tile, and of the one it replaces; None where that one does not run.
      failed, wrong: how many candidates did not run, and how many gave other results.
    """

    tile: Tile
    seconds: float
    before: float | None
    failed: int
    wrong: int


def choose(problem: Problem, current: Tile, limit: int, build: Build, timer: Timer) -> Choice:
    """The fastest right tile; `current`, made to fit, unless another is faster by `GAIN`.

    Right is what gives the result of the current tile, or of the first that runs where that does
    not.

    Raises:
      ValueError: not even the smallest tile fits.
      RuntimeError: no tile runs.
    """
    current = problem.fit(current, limit)
    those = list(dict.fromkeys([current, *candidates(problem, limit)]))
    kept, truth, wrong = {}, None, 0
    for tile, run in build(problem, those).items():
        result = run if isinstance(run, Exception) else timing.attempt(run)
        if isinstance(result, Exception):
            continue
        truth = result if truth is None else truth
        if is_close(result, truth, TOLERANCE[problem.dtype]):
            kept[tile] = run
        else:
            wrong += 1
    times = {tile: t for tile, t in timer(kept).items() if not isinstance(t, Exception)}
    if not times:
        raise RuntimeError(f"no tile runs for {problem}: the table keeps what it has")
    best, before = min(times, key=times.__getitem__), times.get(current)
    if before is not None and before <= GAIN * times[best]:
        best = current
    return Choice(best, times[best], before, len(those) - len(times) - wrong, wrong)


def tune(
    settings: Settings,
    capability: str,
    limit: int,
    build: Build,
    timer: Timer,
    report: Callable[[str], None] = print,
) -> dict:
    """Tunes what an earlier, interrupted run has not, and returns the table.

    Args:
      limit: bytes of shared memory that a block may use.
    """
    table, progress = start(settings, capability), Progress(settings, capability)
    pairs = list(itertools.product(settings.dtypes, settings.widths))
    for number, (dtype, width) in enumerate(pairs, 1):
        name = f"[{number}/{len(pairs)}] {dtype}, width {width}"
        if progress.has(dtype, width):
            report(f"{name}: done by an earlier run")
            continue
        entry = table[capability][dtype][str(width)]
        for kernel in tiles.KERNELS:
            shape = settings.batch, settings.length, settings.heads
            problem, old = Problem(kernel, width, dtype, *shape), Tile(*entry[kernel])
            chosen = timing.attempt(choose, problem, old, limit, build, timer)
            if isinstance(chosen, Exception):
                report(f"{name}, {kernel}: {timing.summary(chosen)}")
                continue
            entry[kernel] = list(chosen.tile)
            report(f"{name}, {kernel}: {_describe(chosen, old)}")
        timing.write(settings.out, dumps(table) + "\n")
        progress.add(dtype, width)
    progress.finish()
    return table


def _describe(chosen, old):
    text = f"{tuple(chosen.tile)} {1e3 * chosen.seconds:.3f} ms"
    if chosen.tile != old:
        before = "does not run" if chosen.before is None else f"{1e3 * chosen.before:.3f} ms"
        text += f" instead of {tuple(old)} {before}"
    return f"{text} ({chosen.failed} failed, {chosen.wrong} wrong)"


# --- The table ------------------------------------------------------------------------------------


def start(settings: Settings, capability: str) -> dict:
    """The table to improve, with every entry of this GPU: those of the nearest one at first."""
    table = tiles.load(settings.out if settings.out.exists() else tiles.TABLE)
    nearest = table[tiles.nearest(capability, table)]
    return table | {capability: json.loads(json.dumps(nearest))}


def dumps(node: Any, indent: str = "") -> str:
    """The table as JSON, a line for each kernel."""
    if not isinstance(node, Mapping):
        return json.dumps(node)
    deeper = indent + "  "
    lines = [f"{deeper}{json.dumps(key)}: {dumps(x, deeper)}" for key, x in node.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


class Progress:
    """What a run with these settings has finished, in a file beside its table."""

    def __init__(self, settings: Settings, capability: str):
        self.path = settings.out.with_name(settings.out.name + ".progress")
        shape = {name: getattr(settings, name) for name in ("batch", "length", "heads", "rounds")}
        self.state: dict[str, Any] = {"capability": capability, **shape, "done": []}
        if self.path.exists() and settings.out.exists():
            earlier = json.loads(self.path.read_text())
            if earlier | {"done": []} == self.state:
                self.state = earlier

    def has(self, dtype: str, width: int) -> bool:
        """Whether this entry was tuned."""
        return [dtype, width] in self.state["done"]

    def add(self, dtype: str, width: int) -> None:
        """Notes that it was."""
        self.state["done"].append([dtype, width])
        timing.write_json(self.path, self.state)

    def finish(self) -> None:
        """Nothing is left to continue."""
        self.path.unlink(missing_ok=True)


def main() -> None:
    """The command; exit status 1 on bad input or without a GPU, 130 when interrupted."""
    settings = tyro.cli(Settings, description=__doc__)
    if (platform := jax.default_backend()) != "gpu":
        raise SystemExit(
            f"error: tiles are measured on a GPU, and JAX found only {platform}: run this on a"
            ' machine with an NVIDIA GPU and pip install "tape-jax[cuda]"'
        )
    capability = tiles.device_capability()
    limit = tiles.SHARED_MEMORY[tiles.nearest(capability, tiles.SHARED_MEMORY)]
    timer = functools.partial(timing.on_device, rounds=settings.rounds)
    try:
        tune(settings, capability, limit, build, timer)
    except KeyboardInterrupt:
        print(f"interrupted; {settings.out} holds what was finished, the same command continues")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
