"""Strips of rows: what one tile of a GPU kernel loads, stores, and compares with another.

Loads mask the channels that pad a head to a power of two and the rows past the end, so nothing
outside an array is ever read.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt


class Strip(NamedTuple):
    """The rows one tile covers: indices, and which exist (None: all do)."""

    index: Any
    valid: Any
    size: int
    start: Any


class Meeting(NamedTuple):
    """A strip of queries and a strip of keys; their scores have the queries along `q_axis`."""

    q: Strip
    k: Strip
    q_axis: int

    def of_q(self, x):
        """A number per query, to broadcast against the scores."""
        return jnp.expand_dims(x, 1 - self.q_axis)

    def of_k(self, x):
        """A number per key, to broadcast against the scores."""
        return jnp.expand_dims(x, self.q_axis)


def strip(tile, size, length) -> Strip:
    """The rows of tile number `tile`; of `length` when the last may be ragged, else None."""
    start = tile * size
    index = start + jnp.arange(size)
    ragged = length is not None and length % size
    return Strip(index, index < length if ragged else None, size, start)


def _mask(rows, width, wide):
    """Which elements of a (rows, wide) tile exist; None: all."""
    mask = None if rows.valid is None else rows.valid[:, None]
    if width != wide:
        columns = (jnp.arange(wide) < width)[None, :]
        mask = columns if mask is None else mask & columns
    return mask if mask is None else jnp.broadcast_to(mask, (rows.size, wide))


def load(ref, rows, width, *head):
    """A (rows, padded width) tile, zero where nothing exists."""
    mask = _mask(rows, width, ref.shape[-1])
    other = None if mask is None else 0.0
    return plt.load(ref.at[(pl.ds(rows.start, rows.size), *head)], mask=mask, other=other)


def load_row(ref, rows, *head, other=0):
    """One number per row, `other` where there is no row."""
    other = None if rows.valid is None else other
    at = ref.at[(*head, pl.ds(rows.start, rows.size))]
    return plt.load(at, mask=rows.valid, other=other)


def store(ref, rows, width, tile):
    """Writes what exists of a (rows, padded width) tile."""
    mask = _mask(rows, width, ref.shape[-1])
    plt.store(ref.at[pl.ds(rows.start, rows.size)], tile.astype(ref.dtype), mask=mask)


def dot(a, b, **transposed):
    """a b summed in float32; float32 factors are not rounded to tf32."""
    precise = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plt.dot(a, b, precision=precise, **transposed)
