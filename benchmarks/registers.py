"""What the GPU kernels use of a device that is not here: registers, spills, shared memory.

`python -m benchmarks.registers` compiles forward and backward of a causal call for an H200 with the
tiles of the table, and prints what ptxas and XLA say of each kernel. Spilled bytes are registers
that did not fit; "serialized" products wait for each other.
"""

import dataclasses

import jax
import jax.numpy as jnp
import tyro
from jax.sharding import SingleDeviceSharding
from rich.table import Table

from benchmarks import timing
from pallas_kernels import tape_attention, tiles
from train import targets


@dataclasses.dataclass(frozen=True)
class Registers:
    """What is compiled.

    Attributes:
      widths: of heads and of position states.
      dtype: of all arrays: bfloat16, float16 or float32.
      length: of the sequence.
    """

    widths: tuple[int, ...] = (16, 32, 64, 128)
    dtype: str = "bfloat16"
    length: int = 1024


def report(width: int, settings: Registers) -> dict[str, targets.Kernel]:
    """Each kernel by its name in `tiles.KERNELS`."""
    place = SingleDeviceSharding(targets.devices("h200")[0])
    shape = (1, settings.length, 8, width)
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(settings.dtype), sharding=place)

    def gradient(*arrays):
        def loss(*arrays):
            both = tape_attention(*arrays, implementation="pallas")
            return sum(y.astype(jnp.float32).sum() for y in both)

        return jax.grad(loss, argnums=(0, 1, 2, 3))(*arrays)

    prefix = "tape_attention_"
    found = targets.kernels("h200", targets.lower("h200", gradient, x, x, x, x), prefix)
    return {name.removeprefix(prefix): kernel for name, kernel in found.items()}


def main() -> None:
    """The command; exit status 1 where the compilers are missing."""
    settings = tyro.cli(Registers, description=__doc__)
    table = Table(title=f"one H200, {settings.dtype}, causal, N {settings.length}")
    for column in ("width", "kernel", "tile"):
        table.add_column(column)
    figures = ("registers", "spilled", "serialized", "shared_memory", "wgmma", "mma")
    for column in (*figures, "estimated shared_memory"):
        table.add_column(column.replace("_", " "), justify="right")
    for width in settings.widths:
        try:
            found = report(width, settings)
        except (ImportError, targets.NoReportError, ValueError) as error:
            raise SystemExit(f"error: {error}") from None
        chosen = tiles.choose(width, width, settings.dtype, "9.0")
        for name in tiles.KERNELS:
            tile, kernel = getattr(chosen, name), found[name]
            itemsize = jnp.dtype(settings.dtype).itemsize
            estimate = tiles.shared_memory(name, tile, width, width, itemsize)
            cells = [str(getattr(kernel, figure)) for figure in figures]
            table.add_row(str(width), name, " ".join(map(str, tile)), *cells, str(estimate))
    timing.console().print(table)


if __name__ == "__main__":
    main()
