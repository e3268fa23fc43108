"""The 155M training step compiled for an accelerator that is not here: memory and operations.

`python -m benchmarks.fit` compiles one optimizer step of TAPE and of RoPE for one H200, at batch 8
of length 1,024 and at batch 1 of length 8,192, and prints what the compiler allots beside the
ratio to RoPE. Operations are those of the same step with its attention written out (XLA does not
look into kernels), so causal attention counts in full. It takes no time measurements: that needs
the device.
"""

import dataclasses
import json
from pathlib import Path

import jax
import tyro
from jax.sharding import AxisType, Mesh
from rich.console import Console
from rich.table import Table

from tape_jax import ModelConfig
from tape_jax.sharding import MESH_AXES
from train import targets
from train.config import TrainConfig
from train.data.tokens import Tokens
from train.plan import FUSED, lower_step

POSITIONS = ("rope", "tape")


@dataclasses.dataclass(frozen=True)
class Fit:
    """What is compiled.

    Attributes:
      target: the device, by its name in `train.targets`.
      shapes: batch and length of each step.
      layers: of the 155M model's 12; fewer for a quick look.
      attention: the implementation; the target's fused one when None.
      remat: what the blocks keep for the backward pass, as in ModelConfig.
      output: where the figures go as JSON.
    """

    target: str = "h200"
    shapes: tuple[tuple[int, int], ...] = ((8, 1024), (1, 8192))
    layers: int = 12
    attention: str | None = None
    remat: str = "none"
    output: Path | None = None

    def __post_init__(self):
        """Raises ValueError for a target that is not described."""
        if self.target not in targets.TARGETS:
            known = ", ".join(targets.TARGETS)
            raise ValueError(f"target={self.target!r} is not described; known: {known}")


def experiment(position: str, batch: int, length: int, fit: Fit, **changes) -> TrainConfig:
    """A training run of the 155M model; only its model and optimizer matter here."""
    model = ModelConfig(
        position=position,
        num_layers=fit.layers,
        dtype="bfloat16",
        scan_layers=False,
        remat=fit.remat,
        attention=fit.attention or FUSED[targets.TARGETS[fit.target].platform],
    )
    return TrainConfig(
        name="fit",
        model=dataclasses.replace(model, **changes),
        task=Tokens(sequence_length=length),
        batch_size=batch,
    )


def lower(config: TrainConfig, target: str | None):
    """One optimizer step, lowered for one device of `target` (for the CPU here when None)."""
    device = targets.devices(target)[0] if target else jax.devices("cpu")[0]
    mesh = Mesh([[[[device]]]], MESH_AXES, axis_types=(AxisType.Auto,) * 4)
    return lower_step(config, mesh, target)


def measure(position: str, batch: int, length: int, fit: Fit) -> dict[str, float]:
    """Bytes of one step on the target, and its operations."""
    config = experiment(position, batch, length, fit)
    memory = lower(config, fit.target).compile().memory_analysis()
    written_out = experiment(position, batch, length, fit, attention="reference", remat="none")
    operations = lower(written_out, None).cost_analysis()["flops"]
    return {
        "state_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "operations": operations,
    }


def show(results: dict[str, dict[str, dict[str, float]]], fit: Fit) -> None:
    """The table: each figure, and in brackets its ratio to RoPE's."""
    table = Table(title=f"{fit.layers} layers of 768 on one {fit.target}; in brackets: times RoPE")
    for column in ("batch x length", "model", "state GB", "temporaries GB", "TFLOP per step"):
        table.add_column(column, justify="right" if column[0] in "stT" else "left")
    for shape, by_position in results.items():
        base = by_position["rope"]
        for position, figures in by_position.items():
            cells = [
                f"{figures[name] / scale:.3f} ({figures[name] / base[name]:.3f})"
                for name, scale in (
                    ("state_bytes", 1e9),
                    ("temporary_bytes", 1e9),
                    ("operations", 1e12),
                )
            ]
            table.add_row(shape, position, *cells)
    Console().print(table)


def main() -> None:
    """The command."""
    fit = tyro.cli(Fit, description=__doc__)
    try:
        results = {
            f"{batch} x {length}": {p: measure(p, batch, length, fit) for p in POSITIONS}
            for batch, length in fit.shapes
        }
    except (ModuleNotFoundError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None
    show(results, fit)
    if fit.output is not None:
        fit.output.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
