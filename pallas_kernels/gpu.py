"""Fused position-aware attention for NVIDIA GPUs: three Pallas kernels in the Triton dialect.

Each holds one score tile and one accumulator per value stream (v, and e when there are position
states). Tiles that causality by index leaves whole run without a score mask.

Letters: n, m rows of a query and a key tile; D, W padded widths of heads and of a value stream.
"""

import dataclasses
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
from pallas_kernels.scores import LinearBias
from pallas_kernels.strips import Meeting, dot, load, load_row, store, strip

INTERPRET = False
"""Run the kernels' Python instead of compiling them: how tests run them without a GPU."""

WIDEST = 128


def refusal(q, k, v, e, *, score_mod, **_) -> str | None:
    """Why these kernels cannot honour a call; None when they can."""
    if not isinstance(score_mod, LinearBias | None):
        return f"score_mod of kind {type(score_mod).__name__}: only LinearBias"
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


# --- Operands -------------------------------------------------------------------------------------


def _head(h):
    return h


def _by_head(x, of_program=_head, heads=None):
    """One batch row and head of (B, N, H, D), or `heads` neighbouring heads of it."""
    block = (None, x.shape[1], heads, tiles.padded(x.shape[3]))
    return pl.BlockSpec(block, lambda t, h, b: (b, 0, of_program(h), 0))


def _row_by_head(x, heads=None):
    """The same of a number per row, (B, H, N)."""
    return pl.BlockSpec((None, heads, x.shape[2]), lambda t, h, b: (b, h, 0))


def _row(x):
    """A number per row that all heads share, (B, N)."""
    return pl.BlockSpec((None, x.shape[1]), lambda t, h, b: (b, 0))


def _range(_):
    """A tile's own range, (B, T, 2)."""
    return pl.BlockSpec((None, None, 2), lambda t, h, b: (b, t, 0))


def _bias(bias, heads):
    """A bias, of whose slopes a program sees those of its query heads."""
    slopes = pl.BlockSpec((heads,), lambda t, h, b: (h,))
    return dataclasses.replace(bias.map_positions(_row), slopes=slopes)


class Inputs(NamedTuple):
    """What every kernel reads: outside as arrays, within as references to a program's blocks.

    Attributes:
      visits: the tiles on the other side that each tile has to visit; None without a `side`.
    """

    q: Any
    k: Any
    values: Any
    side: Any
    visits: Any
    bias: Any

    def blocks(self, heads: int | None) -> "Inputs":
        """Those of a program of one query head (None), or of one key head and its `heads`."""
        groups = self.q.shape[2] // self.k.shape[2]
        of_program = _head if heads else lambda h: lax.div(h, groups)
        return Inputs(
            _by_head(self.q, heads=heads),
            _by_head(self.k, of_program),
            tuple(_by_head(x, of_program) for x in self.values),
            jax.tree.map(_row, self.side),
            jax.tree.map(_range, self.visits),
            None if self.bias is None else _bias(self.bias, heads),
        )


class Cotangents(NamedTuple):
    """What the backward kernels read besides; lse and delta are (B, H, Nq)."""

    outs: Any
    lse: Any
    delta: Any

    def blocks(self, heads: int | None) -> "Cotangents":
        """As those of `Inputs`."""
        outs = tuple(_by_head(x, heads=heads) for x in self.outs)
        return Cotangents(outs, _row_by_head(self.lse, heads), _row_by_head(self.delta, heads))


class Widths(NamedTuple):
    """Channels of a head and of each value stream."""

    head: int
    values: tuple[int, ...]


# --- A tile of scores -----------------------------------------------------------------------------


def _readable(spec, side, meeting):
    """Which key of a tile each query may read."""
    q, k, of_q, of_k = meeting.q, meeting.k, meeting.of_q, meeting.of_k
    if side is not None:
        return readable(
            spec,
            of_q(load_row(side.q_order, q)),
            of_k(load_row(side.k_order, k)),
            of_q(load_row(side.q_segment, q)),
            of_k(load_row(side.k_segment, k, other=-1)),
        )
    mask = True if k.valid is None else of_k(k.valid)
    return mask & (of_q(q.index) >= of_k(k.index)) if spec.causal else mask


def _scores(spec, bias, products, meeting, *head):
    """The scores of a tile in units of base 2, from its products of queries and keys."""
    scores = products * (spec.scale * LOG2_E)
    if bias is None:
        return scores
    q_position = load_row(bias.q_positions, meeting.q).astype(jnp.float32)
    k_position = load_row(bias.k_positions, meeting.k).astype(jnp.float32)
    slope = plt.load(bias.slopes.at[head]) * LOG2_E
    return scores - slope * jnp.abs(meeting.of_q(q_position) - meeting.of_k(k_position))


def _probabilities(spec, inputs, products, lse, meeting, masked, *head):
    """The probabilities of a tile, from its products and its queries' log-sum-exps."""
    scores = _scores(spec, inputs.bias, products, meeting, *head)
    probs = jnp.exp2(scores - meeting.of_q(lse) * LOG2_E)
    return jnp.where(_readable(spec, inputs.side, meeting), probs, 0.0) if masked else probs


# --- Which tiles meet -----------------------------------------------------------------------------

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


def _forward_kernel(inputs, out_refs, lse_ref, *, spec, widths):
    tile, i = spec.tiles.forward, pl.program_id(0)
    rows = strip(i, tile.block_q, spec.n_q)
    q = load(inputs.q, rows, widths.head)

    def body(j, carry, masked):
        top, total, mixed = carry
        columns = strip(j, tile.block_k, spec.n_k if masked else None)
        meeting = Meeting(rows, columns, q_axis=0)
        k = load(inputs.k, columns, widths.head)
        scores = _scores(spec, inputs.bias, dot(q, k, trans_b=True), meeting)
        if masked:  # `top` stays finite, so what is masked weighs exp2(-inf) = 0
            scores = jnp.where(_readable(spec, inputs.side, meeting), scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=1))
        probs = jnp.exp2(scores - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(probs, axis=1)
        mixed = tuple(
            acc * shrink[:, None] + dot(probs.astype(ref.dtype), load(ref, columns, width))
            for acc, ref, width in zip(mixed, inputs.values, widths.values, strict=True)
        )
        return new_top, total, mixed

    start = (
        jnp.full((tile.block_q,), LOWEST, jnp.float32),
        jnp.zeros((tile.block_q,), jnp.float32),
        tuple(jnp.zeros((tile.block_q, ref.shape[-1]), jnp.float32) for ref in inputs.values),
    )
    top, total, mixed = _loop(_key_ranges(spec, tile, i, inputs.visits), body, start)
    safe = jnp.where(total == 0.0, 1.0, total)
    for ref, acc, width in zip(out_refs, mixed, widths.values, strict=True):
        store(ref, rows, width, acc / safe[:, None])
    lse = jnp.where(total == 0.0, LOWEST, top / LOG2_E + jnp.log(safe))
    plt.store(lse_ref.at[pl.ds(rows.start, rows.size)], lse, mask=rows.valid)


# --- Backward -------------------------------------------------------------------------------------


def _keys_kernel(inputs, cotangents, dk_ref, d_value_refs, *, spec, widths):
    """dk and the gradients of the values, one key tile; scores are (m, n): keys down."""
    tile, j = spec.tiles.keys, pl.program_id(0)
    columns = strip(j, tile.block_k, spec.n_k)
    k = load(inputs.k, columns, widths.head)
    values = [load(ref, columns, w) for ref, w in zip(inputs.values, widths.values, strict=True)]

    # What a query that is not there weighs meets zeros only; with a bias it might be infinite.
    absent = 0.0 if inputs.bias is None else jnp.inf

    def over_queries(head, carry):
        def body(i, carry, masked):
            dk, d_values = carry
            rows = strip(i, tile.block_q, spec.n_q)
            q = load(inputs.q, rows, widths.head, head)
            lse = load_row(cotangents.lse, rows, head, other=absent)
            meeting, products = Meeting(rows, columns, q_axis=1), dot(k, q, trans_b=True)
            probs = _probabilities(spec, inputs, products, lse, meeting, masked, head)
            low, d_next = probs.astype(q.dtype), []
            d_probs = -load_row(cotangents.delta, rows, head)[None]
            for ref, width, value, acc in zip(
                cotangents.outs, widths.values, values, d_values, strict=True
            ):
                d_out = load(ref, rows, width, head)
                d_next.append(acc + dot(low, d_out))
                d_probs = d_probs + dot(value, d_out, trans_b=True)
            dk += dot((probs * d_probs).astype(q.dtype), q)
            return dk, tuple(d_next)

        return _loop(_query_ranges(spec, tile, j, inputs.visits), body, carry)

    zeros = lambda ref: jnp.zeros((tile.block_k, ref.shape[-1]), jnp.float32)  # noqa: E731
    carry = zeros(inputs.k), tuple(zeros(ref) for ref in inputs.values)
    groups = inputs.q.shape[1]
    dk, d_values = lax.fori_loop(0, groups, over_queries, carry)
    store(dk_ref, columns, widths.head, dk * spec.scale)
    for ref, acc, width in zip(d_value_refs, d_values, widths.values, strict=True):
        store(ref, columns, width, acc)


def _queries_kernel(inputs, cotangents, dq_ref, *, spec, widths):
    """dq, one query tile."""
    tile, i = spec.tiles.queries, pl.program_id(0)
    rows = strip(i, tile.block_q, spec.n_q)
    q = load(inputs.q, rows, widths.head)
    d_outs = [load(ref, rows, w) for ref, w in zip(cotangents.outs, widths.values, strict=True)]
    lse, delta = load_row(cotangents.lse, rows), load_row(cotangents.delta, rows)

    def body(j, dq, masked):
        columns = strip(j, tile.block_k, spec.n_k if masked else None)
        k = load(inputs.k, columns, widths.head)
        meeting, products = Meeting(rows, columns, q_axis=0), dot(q, k, trans_b=True)
        probs = _probabilities(spec, inputs, products, lse, meeting, masked)
        d_probs = -delta[:, None]
        for ref, width, d_out in zip(inputs.values, widths.values, d_outs, strict=True):
            d_probs = d_probs + dot(d_out, load(ref, columns, width), trans_b=True)
        return dq + dot((probs * d_probs).astype(k.dtype), k)

    start = jnp.zeros((tile.block_q, inputs.q.shape[-1]), jnp.float32)
    dq = _loop(_key_ranges(spec, tile, i, inputs.visits), body, start)
    store(dq_ref, rows, widths.head, dq * spec.scale)


# --- Calls ----------------------------------------------------------------------------------------


def _visits(spec, side, tile):
    return (None, None) if side is None else visits(spec, side, tile.block_q, tile.block_k)


def _call(kernel, name, spec, grid, heads, operands, out_shape, out_specs):
    """`kernel` on operands of which a program sees the blocks of `heads`, `Inputs` first."""
    tile, inputs = getattr(spec.tiles, name), operands[0]
    widths = Widths(inputs.q.shape[3], tuple(x.shape[3] for x in inputs.values))
    return pl.pallas_call(
        functools.partial(kernel, spec=spec, widths=widths),
        grid=grid,
        in_specs=[x.blocks(heads) for x in operands],
        out_specs=out_specs,
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=spec.interpret,
        name=f"tape_attention_{name}",
    )(*operands)


def forward(spec, q, k, values, side, bias):
    """(outs, log-sum-exp (B, H, Nq)) from q (B, Nq, H, D), k (B, Nk, K, D) and value streams."""
    batch, n_q, heads, _ = q.shape
    tile = spec.tiles.forward
    visited, _ = _visits(spec, side, tile)
    outs = tuple(jax.ShapeDtypeStruct((*q.shape[:3], x.shape[3]), x.dtype) for x in values)
    lse = jax.ShapeDtypeStruct((batch, heads, n_q), jnp.float32)
    return _call(
        _forward_kernel,
        "forward",
        spec,
        grid=(pl.cdiv(n_q, tile.block_q), heads, batch),
        heads=None,
        operands=(Inputs(q, k, values, side, visited, bias),),
        out_shape=(outs, lse),
        out_specs=(tuple(map(_by_head, outs)), _row_by_head(lse)),
    )


def backward(spec, q, k, values, side, bias, d_outs, lse, delta):
    """(dq, dk, gradients of the values); lse and delta are (B, H, Nq)."""
    (batch, n_q, heads, _), (_, n_k, kv_heads, _) = q.shape, k.shape
    cotangents = Cotangents(d_outs, lse, delta)
    like = functools.partial(jax.tree.map, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    of_head = functools.partial(jax.tree.map, _by_head)

    tile = spec.tiles.keys
    _, visited = _visits(spec, side, tile)
    dk, d_values = _call(
        _keys_kernel,
        "keys",
        spec,
        grid=(pl.cdiv(n_k, tile.block_k), kv_heads, batch),
        heads=heads // kv_heads,
        operands=(Inputs(q, k, values, side, visited, bias), cotangents),
        out_shape=like((k, values)),
        out_specs=of_head((k, values)),
    )

    tile = spec.tiles.queries
    visited, _ = _visits(spec, side, tile)
    dq = _call(
        _queries_kernel,
        "queries",
        spec,
        grid=(pl.cdiv(n_q, tile.block_q), heads, batch),
        heads=None,
        operands=(Inputs(q, k, values, side, visited, bias), cotangents),
        out_shape=like(q),
        out_specs=of_head(q),
    )
    return dq, dk, d_values
