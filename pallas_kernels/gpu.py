"""Fused position-aware attention for NVIDIA GPUs: three Pallas kernels in the Triton dialect.

Each holds one score tile and one accumulator per value stream (v, and e when there are position
states). Loads mask the channels that pad a head to a power of two and the rows past the end, so
nothing outside an array is ever read. Tiles that causality by index leaves whole run without a
score mask.

Letters: n, m rows of a query and a key tile; D, W padded widths of heads and of a value stream.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import flash, tiles
from pallas_kernels.decode import split_keys
from pallas_kernels.flash import LOG2_E, readable, visits
from pallas_kernels.reference import LOWEST

INTERPRET = False
"""Run the kernels' Python instead of compiling them: how tests run them without a GPU."""

WIDEST = 128


def refusal(q, k, v, e, *, score_mod, **_) -> str | None:
    """Why these kernels cannot honour a call; None when they can."""
    if score_mod is not None:
        return "score_mod (it takes arrays the kernel cannot see)"
    for name, x in {"q": q, "v": v, "e": e}.items():
        if x is not None and (x.shape[-1] > WIDEST or x.shape[-1] % 8):
            return f"{name} of width {x.shape[-1]}: a multiple of 8 up to {WIDEST}"
    if q.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"dtype {q.dtype}: float32, bfloat16 or float16"
    return None


@split_keys
def fused(q, k, v, e, **arguments):
    """(out, mixed, log-sum-exp (B, Nq, H)) of a normalised call of `tape_attention`."""
    return flash.fused((forward, backward), INTERPRET, q, k, v, e, **arguments)


# --- Tiles ----------------------------------------------------------------------------------------


class Strip(NamedTuple):
    """The rows one tile covers: indices, and which exist (None: all do)."""

    index: Any
    valid: Any
    size: int
    start: Any


def _strip(tile, size, length):
    start = tile * size
    index = start + jnp.arange(size)
    ragged = length is not None and length % size
    return Strip(index, index < length if ragged else None, size, start)


def _mask(strip, width, wide):
    """Which elements of a (rows, wide) tile exist; None: all."""
    mask = None if strip.valid is None else strip.valid[:, None]
    if width != wide:
        columns = (jnp.arange(wide) < width)[None, :]
        mask = columns if mask is None else mask & columns
    return mask if mask is None else jnp.broadcast_to(mask, (strip.size, wide))


def _load(ref, strip, width, *head):
    """A (rows, padded width) tile, zero where nothing exists."""
    mask = _mask(strip, width, ref.shape[-1])
    other = None if mask is None else 0.0
    return plt.load(ref.at[(pl.ds(strip.start, strip.size), *head)], mask=mask, other=other)


def _load_row(ref, strip, *head, other=0):
    """One number per row, `other` where there is no row."""
    other = None if strip.valid is None else other
    at = ref.at[(*head, pl.ds(strip.start, strip.size))]
    return plt.load(at, mask=strip.valid, other=other)


def _store(ref, strip, width, tile):
    mask = _mask(strip, width, ref.shape[-1])
    plt.store(ref.at[pl.ds(strip.start, strip.size)], tile.astype(ref.dtype), mask=mask)


def _dot(a, b, **transposed):
    """a b summed in float32; float32 factors are not rounded to tf32."""
    precise = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return plt.dot(a, b, precision=precise, **transposed)


def _readable(spec, side, q, k, q_axis):
    """Which key of strip k each query of strip q may read; queries along axis `q_axis`."""
    down, across = (lambda x: x[:, None]), (lambda x: x[None, :])
    as_q, as_k = (down, across) if q_axis == 0 else (across, down)
    if side is not None:
        return readable(
            spec,
            as_q(_load_row(side.q_order, q)),
            as_k(_load_row(side.k_order, k)),
            as_q(_load_row(side.q_segment, q)),
            as_k(_load_row(side.k_segment, k, other=-1)),
        )
    mask = True if k.valid is None else as_k(k.valid)
    return mask & (as_q(q.index) >= as_k(k.index)) if spec.causal else mask


# Tiles with a mask come first: after the whole ones, ptxas would find the sums of the second loop
# moved between registers, and serialize its wgmma (warning C7515).


def _key_ranges(spec, tile, i, visited):
    """(start, stop, masked) of the key tiles that query tile i reads."""
    if visited is not None:
        return ((visited[0], visited[1], True),)
    whole, count = spec.n_k // tile.block_k, pl.cdiv(spec.n_k, tile.block_k)
    if not spec.causal:
        ragged = ((whole, count, True),) if whole < count else ()
        return (*ragged, (0, whole, False))
    full = jnp.minimum(lax.div(i * tile.block_q + 1, tile.block_k), whole)
    end = jnp.minimum(lax.div((i + 1) * tile.block_q - 1, tile.block_k) + 1, count)
    return ((full, end, True), (0, full, False))


def _query_ranges(spec, tile, j, visited):
    """(start, stop, masked) of the query tiles that read key tile j."""
    if visited is not None:
        return ((visited[0], visited[1], True),)
    count = pl.cdiv(spec.n_q, tile.block_q)
    if not spec.causal:
        return ((0, count, False),)
    first = jnp.minimum(lax.div(j * tile.block_k, tile.block_q), count)
    last_key = (j + 1) * tile.block_k - 1
    full = jnp.minimum(lax.div(last_key + tile.block_q - 1, tile.block_q), count)
    return ((first, full, True), (full, count, False))


def _loop(ranges, body, carry):
    """body(tile, carry, masked) over all ranges."""
    for start, stop, masked in ranges:
        carry = lax.fori_loop(start, stop, functools.partial(body, masked=masked), carry)
    return carry


# --- Forward --------------------------------------------------------------------------------------


def _forward_kernel(q_ref, k_ref, value_refs, side, visits_ref, out_refs, lse_ref, *, spec, widths):
    tile, i = spec.tiles.forward, pl.program_id(0)
    rows = _strip(i, tile.block_q, spec.n_q)
    q = _load(q_ref, rows, widths.head)

    def body(j, carry, masked):
        top, total, mixed = carry
        columns = _strip(j, tile.block_k, spec.n_k if masked else None)
        k = _load(k_ref, columns, widths.head)
        scores = _dot(q, k, trans_b=True) * (spec.scale * LOG2_E)
        if masked:  # `top` stays finite, so what is masked weighs exp2(-inf) = 0
            scores = jnp.where(_readable(spec, side, rows, columns, 0), scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        probs = jnp.exp2(scores - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(probs, axis=1)
        mixed = tuple(
            acc * shrink[:, None] + _dot(probs.astype(ref.dtype), _load(ref, columns, width))
            for acc, ref, width in zip(mixed, value_refs, widths.values, strict=True)
        )
        return new_top, total, mixed

    start = (
        jnp.full((tile.block_q,), LOWEST, jnp.float32),
        jnp.zeros((tile.block_q,), jnp.float32),
        tuple(jnp.zeros((tile.block_q, ref.shape[-1]), jnp.float32) for ref in value_refs),
    )
    top, total, mixed = _loop(_key_ranges(spec, tile, i, visits_ref), body, start)
    safe = jnp.where(total == 0.0, 1.0, total)
    for ref, acc, width in zip(out_refs, mixed, widths.values, strict=True):
        _store(ref, rows, width, acc / safe[:, None])
    lse = jnp.where(total == 0.0, LOWEST, top / LOG2_E + jnp.log(safe))
    plt.store(lse_ref.at[pl.ds(rows.start, rows.size)], lse, mask=rows.valid)


# --- Backward -------------------------------------------------------------------------------------


def _keys_kernel(
    q_ref,
    k_ref,
    value_refs,
    side,
    visits_ref,
    d_refs,
    lse_ref,
    delta_ref,
    dk_ref,
    d_value_refs,
    *,
    spec,
    widths,
):
    """dk and the gradients of the values, one key tile; scores are (m, n): keys down."""
    tile, j = spec.tiles.keys, pl.program_id(0)
    columns = _strip(j, tile.block_k, spec.n_k)
    k = _load(k_ref, columns, widths.head)
    values = [_load(ref, columns, w) for ref, w in zip(value_refs, widths.values, strict=True)]

    def over_queries(head, carry):
        def body(i, carry, masked):
            dk, d_values = carry
            rows = _strip(i, tile.block_q, spec.n_q)
            q = _load(q_ref, rows, widths.head, head)
            lse = _load_row(lse_ref, rows, head)
            probs = jnp.exp2(_dot(k, q, trans_b=True) * (spec.scale * LOG2_E) - lse[None] * LOG2_E)
            if masked:
                probs = jnp.where(_readable(spec, side, rows, columns, 1), probs, 0.0)
            low, d_next = probs.astype(q.dtype), []
            d_probs = -_load_row(delta_ref, rows, head)[None]
            for ref, width, value, acc in zip(d_refs, widths.values, values, d_values, strict=True):
                d_out = _load(ref, rows, width, head)
                d_next.append(acc + _dot(low, d_out))
                d_probs = d_probs + _dot(value, d_out, trans_b=True)
            dk += _dot((probs * d_probs).astype(q.dtype), q)
            return dk, tuple(d_next)

        return _loop(_query_ranges(spec, tile, j, visits_ref), body, carry)

    zeros = lambda ref: jnp.zeros((tile.block_k, ref.shape[-1]), jnp.float32)  # noqa: E731
    carry = zeros(k_ref), tuple(zeros(ref) for ref in value_refs)
    groups = q_ref.shape[1]
    dk, d_values = lax.fori_loop(0, groups, over_queries, carry)
    _store(dk_ref, columns, widths.head, dk * spec.scale)
    for ref, acc, width in zip(d_value_refs, d_values, widths.values, strict=True):
        _store(ref, columns, width, acc)


def _queries_kernel(
    q_ref, k_ref, value_refs, side, visits_ref, d_refs, lse_ref, delta_ref, dq_ref, *, spec, widths
):
    """dq, one query tile."""
    tile, i = spec.tiles.queries, pl.program_id(0)
    rows = _strip(i, tile.block_q, spec.n_q)
    q = _load(q_ref, rows, widths.head)
    d_outs = [_load(ref, rows, w) for ref, w in zip(d_refs, widths.values, strict=True)]
    lse, delta = _load_row(lse_ref, rows) * LOG2_E, _load_row(delta_ref, rows)

    def body(j, dq, masked):
        columns = _strip(j, tile.block_k, spec.n_k if masked else None)
        k = _load(k_ref, columns, widths.head)
        probs = jnp.exp2(_dot(q, k, trans_b=True) * (spec.scale * LOG2_E) - lse[:, None])
        if masked:
            probs = jnp.where(_readable(spec, side, rows, columns, 0), probs, 0.0)
        d_probs = -delta[:, None]
        for ref, width, d_out in zip(value_refs, widths.values, d_outs, strict=True):
            d_probs = d_probs + _dot(d_out, _load(ref, columns, width), trans_b=True)
        return dq + _dot((probs * d_probs).astype(k.dtype), k)

    start = jnp.zeros((tile.block_q, q_ref.shape[-1]), jnp.float32)
    dq = _loop(_key_ranges(spec, tile, i, visits_ref), body, start)
    _store(dq_ref, rows, widths.head, dq * spec.scale)


# --- Calls ----------------------------------------------------------------------------------------


class Widths(NamedTuple):
    """Channels of a head and of each value stream."""

    head: int
    values: tuple[int, ...]


def _by_head(x, per_kernel, heads=None):
    """One batch row and head of (B, N, H, D), or `heads` neighbouring heads of it."""
    block = (None, x.shape[1], heads, tiles.padded(x.shape[3]))
    return pl.BlockSpec(block, lambda t, h, b: (b, 0, per_kernel(h), 0))


def _row_by_head(x, heads=None):
    """The same of a number per row, (B, H, N)."""
    return pl.BlockSpec((None, heads, x.shape[2]), lambda t, h, b: (b, h, 0))


def _side_specs(side, visited):
    if side is None:
        return None, None
    whole = jax.tree.map(lambda x: pl.BlockSpec((None, x.shape[1]), lambda t, h, b: (b, 0)), side)
    return whole, pl.BlockSpec((None, None, 2), lambda t, h, b: (b, t, 0))


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _call(kernel, name, spec, grid, in_specs, out_specs, out_shape, widths):
    tile = getattr(spec.tiles, name)
    return pl.pallas_call(
        functools.partial(kernel, spec=spec, widths=widths),
        grid=grid,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=spec.interpret,
        name=f"tape_attention_{name}",
    )


def _visits(spec, side, tile):
    return (None, None) if side is None else visits(spec, side, tile.block_q, tile.block_k)


def forward(spec, q, k, values, side):
    """(outs, log-sum-exp (B, H, Nq)) from q (B, Nq, H, D), k (B, Nk, K, D) and value streams."""
    batch, n_q, heads, _ = q.shape
    group = lambda h: lax.div(h, heads // k.shape[2])  # noqa: E731
    same = lambda h: h  # noqa: E731
    tile = spec.tiles.forward
    visited, _ = _visits(spec, side, tile)
    outs = [jax.ShapeDtypeStruct((*q.shape[:3], x.shape[3]), x.dtype) for x in values]
    lse = jax.ShapeDtypeStruct((batch, heads, n_q), jnp.float32)
    return _call(
        _forward_kernel,
        "forward",
        spec,
        (pl.cdiv(n_q, tile.block_q), heads, batch),
        [
            _by_head(q, same),
            _by_head(k, group),
            tuple(_by_head(x, group) for x in values),
            *_side_specs(side, visited),
        ],
        (tuple(_by_head(x, same) for x in outs), _row_by_head(lse)),
        (tuple(outs), lse),
        Widths(q.shape[3], tuple(x.shape[3] for x in values)),
    )(q, k, values, side, visited)


def backward(spec, q, k, values, side, d_outs, lse, delta):
    """(dq, dk, gradients of the values); lse and delta are (B, H, Nq)."""
    batch, n_q, heads, _ = q.shape
    n_k, kv_heads = k.shape[1:3]
    groups = heads // kv_heads
    group = lambda h: lax.div(h, groups)  # noqa: E731
    same = lambda h: h  # noqa: E731
    widths = Widths(q.shape[3], tuple(x.shape[3] for x in values))
    arrays = (q, k, values, side)
    rest = (d_outs, lse, delta)

    _, visited = _visits(spec, side, spec.tiles.keys)
    dk, d_values = _call(
        _keys_kernel,
        "keys",
        spec,
        (pl.cdiv(n_k, spec.tiles.keys.block_k), kv_heads, batch),
        [
            _by_head(q, same, groups),
            _by_head(k, same),
            tuple(_by_head(x, same) for x in values),
            *_side_specs(side, visited),
            tuple(_by_head(x, same, groups) for x in d_outs),
            _row_by_head(lse, groups),
            _row_by_head(delta, groups),
        ],
        (_by_head(k, same), tuple(_by_head(x, same) for x in values)),
        (_like(k), tuple(_like(x) for x in values)),
        widths,
    )(*arrays, visited, *rest)

    visited, _ = _visits(spec, side, spec.tiles.queries)
    dq = _call(
        _queries_kernel,
        "queries",
        spec,
        (pl.cdiv(n_q, spec.tiles.queries.block_q), heads, batch),
        [
            _by_head(q, same),
            _by_head(k, group),
            tuple(_by_head(x, group) for x in values),
            *_side_specs(side, visited),
            tuple(_by_head(x, same) for x in d_outs),
            _row_by_head(lse),
            _row_by_head(delta),
        ],
        _by_head(q, same),
        _like(q),
        widths,
    )(*arrays, visited, *rest)
    return dq, dk, d_values
