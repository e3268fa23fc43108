"""How much a model's inside changes when a sentence is moved (TAPE paper, Table 8).

A sentence is moved in two ways: filler tokens are put in front of it, or its positions start later.
What an encoding calls relative should not notice the second, and be told apart from content by the
first.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure
from rich.table import Table

from pallas_kernels import reference
from pallas_kernels.implementations import Implementation, registered
from tape_jax import ModelConfig, Transformer

matplotlib.use("Agg")

MOVED_BY = 3

MEASURES = {"attention": "attention maps", "state": "inner products of the states"}
CASES = {
    "prefix": f"{MOVED_BY} filler tokens in front",
    "shift": f"positions from {MOVED_BY}",
}

DEFINITION = (
    "||A' - A||_F / ||A||_F of a layer, over its heads and the pairs of the sentence's own tokens,"
    " mean over sentences, in float32. A: the attention map of the layer, or the inner products"
    " e_i . e_j of the states it reads, summed over channels; A': the same of the moved sentence."
    " How the paper normalises its differences is not known."
)


@contextlib.contextmanager
def recorded_attention(maps: list[Float[Array, "B H N N"]]) -> Iterator[str]:
    """An attention implementation that appends its probabilities to `maps`; gives its name."""

    def attend(q, k, v, e, **arguments):
        maps.append(reference.probabilities(q, k, **arguments)[0])
        return reference.reference(q, k, v, e, **arguments)

    with registered("recorded", Implementation(attend)) as name:
        yield name


@functools.partial(jax.jit, static_argnames="config")
def observe(
    config: ModelConfig, params: dict, tokens: Int[Array, "B N"], positions: Int[Array, "1 N"]
) -> dict[str, Array | None]:
    """What every layer sees: attention maps and inner products of states.

    Returns:
      "attention" (L, B, H, N, N), and "state" (L, B, K, N, N) of the states that the layers read,
      None for an encoding without one.
    """
    maps: list[Array] = []
    with recorded_attention(maps) as name:
        # Unrolled, with nothing recomputed: one trace in which every layer is seen once.
        unrolled = dataclasses.replace(
            config, attention=name, scan_layers=False, remat="none", dtype="float32"
        )
        _, kept = Transformer(unrolled).apply(
            {"params": params}, tokens, positions, mutable=["intermediates"]
        )
    states = kept["intermediates"].get("position_states")
    # Before the layers, Flax asks their initialisers for shapes, which records an empty map.
    maps = maps[-config.num_layers :]
    return {"attention": jnp.stack(maps), "state": None if states is None else _gram(states[:-1])}


def _gram(states: Float[Array, "L B N K S"]) -> Float[Array, "L B K N N"]:
    x = states.astype(jnp.float32)
    return jnp.einsum("lbnks,lbmks->lbknm", x, x, precision=jax.lax.Precision.HIGHEST)


def relative_change(moved: Float[Array, "L B H N N"], still: Float[Array, "L B H N N"]) -> Array:
    """||moved - still|| / ||still|| over heads and pairs of tokens: (L, B)."""
    axes = (-3, -2, -1)
    difference = jnp.sqrt(jnp.square(moved - still).sum(axes))
    return difference / jnp.sqrt(jnp.square(still).sum(axes))


def changes(
    config: ModelConfig,
    params: dict,
    rows: Int[np.ndarray, "B N"],
    filler: int,
    track: Callable[[Sequence], Iterator] = iter,
) -> dict[str, dict[str, list[float]] | None]:
    """Measure -> case -> relative change by layer, the mean over the rows.

    Args:
      rows: sentences of one length.
      filler: the token put in front.
      track: goes over the rows, and may show how far it is.
    """
    measured = [_changes_of_one(config, params, row[None], filler) for row in track(rows)]
    means = jax.tree.map(lambda *each: np.mean(each, axis=0).tolist(), *measured)
    return {measure: means[measure] for measure in MEASURES}


def _changes_of_one(config, params, row, filler):
    length = row.shape[1]
    at = config.position.default_positions(length + MOVED_BY)
    longer = np.pad(row, ((0, 0), (MOVED_BY, 0)), constant_values=filler)
    still = observe(config, params, row, at[:, :length])
    prefixed = observe(config, params, longer, at)
    cut = jax.tree.map(lambda x: x[..., MOVED_BY:, MOVED_BY:], prefixed)
    shifted = observe(config, params, row, at[:, :length] + MOVED_BY)
    cases = {"prefix": cut, "shift": shifted}
    return {
        measure: None
        if still[measure] is None
        else {
            case: np.asarray(relative_change(moved[measure], still[measure])).mean(axis=1)
            for case, moved in cases.items()
        }
        for measure in MEASURES
    }


def write_stability(out: Path, runs: Sequence[Mapping[str, Any]], sequences: int) -> None:
    """Writes stability.json and stability.png into `out`; a run has its `run` and `changes`."""
    out.mkdir(parents=True, exist_ok=True)
    record = {"definition": DEFINITION, "moved_by": MOVED_BY, "sequences": sequences, "runs": runs}
    (out / "stability.json").write_text(json.dumps(record, indent=1) + "\n")
    draw_stability(runs).savefig(out / "stability.png", dpi=120)


def draw_stability(runs: Sequence[Mapping[str, Any]]) -> Figure:
    """A panel for every measure and case, in it a line by layer for every run."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    panels = figure.subplots(len(MEASURES), len(CASES), squeeze=False, sharex=True, sharey=True)
    for (row, column), axes in np.ndenumerate(panels):
        measure, case = list(MEASURES)[row], list(CASES)[column]
        for i, run in enumerate(runs):
            found = run["changes"][measure]
            if found is not None:
                layers = range(1, len(found[case]) + 1)
                shown = np.maximum(found[case], 1e-8)  # no change at all has no logarithm
                axes.plot(layers, shown, marker="o", color=f"C{i}", label=run["run"])
        axes.set(yscale="log", ylim=(5e-9, 5.0), xlabel="layer")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_title(f"{MEASURES[measure]}: {CASES[case]}", fontsize=10)
    panels[0, 0].legend(fontsize=8)
    figure.supylabel("relative change")
    return figure


def tabulate(runs: Sequence[Mapping[str, Any]]) -> Table:
    """The changes by layer, a line for every run, measure and case."""
    depth = max(len(run["changes"]["attention"]["prefix"]) for run in runs)
    words = "; ".join(f"{name}: {means}" for name, means in (MEASURES | CASES).items())
    title = "relative change when the sentence is moved"
    table = Table(title=title, caption=f"{words}. {DEFINITION}")
    for head in ("run", "of", "moved by"):
        table.add_column(head, overflow="fold")
    for layer in range(1, depth + 1):
        table.add_column(f"layer {layer}", justify="right")
    for run in runs:
        for measure, cases in run["changes"].items():
            for case, values in (cases or {}).items():
                cells = [f"{x:.2e}" for x in values]
                table.add_row(run["run"], measure, case, *cells)
    return table
