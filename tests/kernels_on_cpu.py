"""Running every implementation's own code on a CPU."""

import importlib

import jax
import jax.numpy as jnp

from pallas_kernels import chunked, cudnn, gpu, tiles, tpu
from pallas_kernels.tiles import Tile, Tiles

SMALL_TILES = Tiles(Tile(16, 32, 4, 1), Tile(32, 16, 4, 1), Tile(16, 32, 4, 1))


def run_on_cpu(name, monkeypatch):
    """Makes implementation `name` run here, with tiles small enough to need several of them.

    Pallas kernels run in interpret mode, which fills whatever lies outside an array with NaN;
    Triton's own in its interpreter, among NaNs; cuDNN's one call by JAX's plain implementation.
    """
    PREPARE.get(name, lambda _: None)(monkeypatch)


def _chunked(monkeypatch):
    monkeypatch.setattr(chunked, "BLOCK_Q", 16)
    monkeypatch.setattr(chunked, "BLOCK_K", 32)


def _pallas(monkeypatch):
    monkeypatch.setattr(gpu, "INTERPRET", True)
    monkeypatch.setattr(tiles, "choose", lambda *_: SMALL_TILES)


def _triton(monkeypatch):
    _pallas(monkeypatch)
    importlib.import_module("tests.triton_interpreter").install(monkeypatch)


def _cudnn(monkeypatch):
    def library(*arrays, **arguments):
        wide = (x.astype(jnp.float32) for x in arrays)
        return jax.nn.dot_product_attention(*wide, **arguments).astype(arrays[0].dtype)

    monkeypatch.setattr(cudnn, "library", library)
    monkeypatch.setattr(cudnn, "DTYPES", (*cudnn.DTYPES, "float32"))


def _tpu(monkeypatch):
    monkeypatch.setattr(tpu, "INTERPRET", True)


PREPARE = {"xla": _chunked, "pallas": _pallas, "triton": _triton, "cudnn": _cudnn, "tpu": _tpu}
