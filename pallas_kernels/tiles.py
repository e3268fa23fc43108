"""Tile sizes of the GPU kernels: a table, and an estimate that keeps them within a part.

`tiles.json` maps compute capability -> dtype -> padded head width -> kernel -> [block_q, block_k,
num_warps, num_stages]. What is shipped was chosen by registers and spills (`python -m
benchmarks.registers`); `python -m benchmarks.autotune` measures and writes the table.
"""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

TABLE = pathlib.Path(__file__).with_name("tiles.json")
KERNELS = ("forward", "keys", "queries")
"""forward: by query tile; keys: dk, dv, de by key tile; queries: dq by query tile."""

SHARED_MEMORY = {"8.0": 166_912, "8.6": 101_376, "9.0": 232_448, "10.0": 232_448, "12.0": 101_376}
"""Bytes that one block may use, by compute capability and upwards (CUDA programming guide)."""

ASSUMED = "9.0"
"""The capability kernels are made for where no GPU is present (compiling for one elsewhere)."""

SMALLEST = 16  # a side of the smallest matrix product that Triton takes


class Tile(NamedTuple):
    """One kernel's tile."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of the three kernels of one call."""

    forward: Tile
    keys: Tile
    queries: Tile

    def within(self, n_q: int, n_k: int) -> "Tiles":
        """The same, with no side longer than the sequence it covers needs."""
        return Tiles(
            **{
                field.name: (tile := getattr(self, field.name))._replace(
                    block_q=min(tile.block_q, padded(n_q)), block_k=min(tile.block_k, padded(n_k))
                )
                for field in dataclasses.fields(self)
            }
        )


def padded(width: int) -> int:
    """Channels of a tile that holds `width` of them: Triton's arrays are powers of two."""
    return max(SMALLEST, 1 << (width - 1).bit_length())


def shared_memory(kernel: str, tile: Tile, width: int, e_width: int, itemsize: int) -> int:
    """Bytes of shared memory a kernel needs, from above.

    The operands of its loop are buffered `num_stages` times, those that stay are held once, and
    the tile of probabilities (with its gradient, backward) passes through once more.
    """
    block_q, block_k, _, stages = tile
    queries = block_q * padded(width)
    keys = block_k * padded(width)
    values = padded(width) + (padded(e_width) if e_width else 0)  # of one row, all streams
    scores = block_q * block_k
    stay, loop = {
        "forward": (queries, keys + block_k * values),
        "keys": (keys + block_k * values, queries + block_q * values),
        "queries": (queries + block_q * values, keys + block_k * values),
    }[kernel]
    return itemsize * (stay + stages * loop + scores * (1 if kernel == "forward" else 2))


def fit(kernel: str, tile: Tile, width: int, e_width: int, itemsize: int, limit: int) -> Tile:
    """The tile, or the largest smaller one that needs at most `limit` bytes of shared memory.

    Raises:
      ValueError: not even the smallest tile fits.
    """
    while shared_memory(kernel, tile, width, e_width, itemsize) > limit:
        if tile.num_stages > 1:
            tile = tile._replace(num_stages=tile.num_stages - 1)
        elif tile.block_q >= tile.block_k and tile.block_q > SMALLEST:
            tile = tile._replace(block_q=tile.block_q // 2)
        elif tile.block_k > SMALLEST:
            tile = tile._replace(block_k=tile.block_k // 2)
        else:
            raise ValueError(
                f"the {kernel} kernel for head width {width} needs"
                f" {shared_memory(kernel, tile, width, e_width, itemsize)} bytes of shared memory,"
                f" the device has {limit}: use implementation='xla'"
            )
    return tile


def nearest(capability: str, known: Mapping[str, object]) -> str:
    """The newest known capability that is not newer than this one (the oldest, failing that)."""
    number = lambda name: tuple(int(part) for part in name.split("."))  # noqa: E731
    older = [name for name in known if number(name) <= number(capability)]
    return max(older or [min(known, key=number)], key=number)


def load(path: pathlib.Path = TABLE) -> dict:
    """The table, as nested dictionaries."""
    return json.loads(path.read_text())


@functools.cache
def _table():
    return load()


def choose(
    width: int, e_width: int, dtype, capability: str | None = None, limit: int | None = None
) -> Tiles:
    """The tiles for heads of this width (e_width 0: no position states).

    Args:
      capability: "9.0" for an H100 or H200; the GPU at hand when None, `ASSUMED` without one.
      limit: bytes of shared memory a block may use; by capability when None.

    Raises:
      ValueError: the device is too small for the head width.
    """
    capability = capability or device_capability()
    limit = limit or SHARED_MEMORY[nearest(capability, SHARED_MEMORY)]
    dtype = jnp.dtype(dtype)
    by_dtype = _table()[nearest(capability, _table())]
    by_width = by_dtype["float32" if dtype == jnp.float32 else "bfloat16"]
    entry = by_width[str(padded(max(width, e_width)))]
    return Tiles(
        **{
            kernel: fit(kernel, Tile(*entry[kernel]), width, e_width, dtype.itemsize, limit)
            for kernel in KERNELS
        }
    )


def device_capability() -> str:
    """Compute capability of the first GPU, or `ASSUMED`."""
    if jax.default_backend() == "gpu":
        return getattr(jax.devices()[0], "compute_capability", ASSUMED)
    return ASSUMED
