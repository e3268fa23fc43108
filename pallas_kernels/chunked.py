"""Attention tile by tile with an online softmax, in plain JAX: linear memory, any shape, anywhere.

The values and the position states are one value stream [v | e], so there is one score tile and one
accumulator. The backward pass recomputes each score tile once from the saved log-sum-exp.

Letters: B batch, K key/value heads, G query heads in a group, N sequence, D and W the widths of
keys and of [v | e]; a tile is (B, K, G, n, m).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.reference import LOWEST, reference
from pallas_kernels.scores import parts_of, split_channels

BLOCK_Q, BLOCK_K = 256, 256

FEW_QUERIES = 8
"""Up to so many, all scores at once are less than the copies that tiles are made from."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is static about a call: sizes, tiles, and which tiles need a mask."""

    n_q: int
    n_k: int
    block_q: int
    block_k: int
    scale: float
    causal: bool
    by_index: bool  # causality compares indices and there are no segments
    score_mod: Callable[..., Any] | None
    parts: tuple[int, ...]  # channels of each product that score_mod is given

    @property
    def tiles(self) -> tuple[int, int]:
        """Query and key tiles."""
        return -(-self.n_q // self.block_q), -(-self.n_k // self.block_k)

    def bounds(self, i):
        """(full, end): key tiles [0, full) of query tile i need no mask, [full, end) may."""
        _, tiles = self.tiles
        if not self.by_index:
            return 0, tiles
        whole = self.n_k // self.block_k
        if not self.causal:
            return whole, tiles
        first, last = i * self.block_q, (i + 1) * self.block_q - 1
        full = jnp.minimum((first + 1) // self.block_k, whole)
        return full, jnp.minimum(last // self.block_k + 1, tiles)


class Side(NamedTuple):
    """What has no gradient: which key a query may read, (1 or B, padded N), and `_open`'s fixed."""

    q_order: Any
    k_order: Any
    q_segment: Any
    k_segment: Any
    fixed: tuple[Any, ...] = ()


def refusal(q, k, v, e, *, score_mod, **_) -> str | None:
    """Why tiles cannot honour a call; None when they can."""
    if score_mod is not None and score_mod.whole_rows:
        return "score_mod of whole rows (it needs every key of a query at once)"
    return None


def chunked(q, k, v, e, *, causal, order, segment_ids, scale, score_mod):
    """(out, mixed, log-sum-exp (B, Nq, H)) of a normalised call of `tape_attention`."""
    (batch, n_q, heads, width), (_, n_k, kv_heads, _) = q.shape, k.shape
    if n_q <= FEW_QUERIES:
        return reference(
            q,
            k,
            v,
            e,
            causal=causal,
            order=order,
            segment_ids=segment_ids,
            scale=scale,
            score_mod=score_mod,
        )
    groups = heads // kv_heads
    plan = Plan(
        n_q,
        n_k,
        min(BLOCK_Q, n_q),
        min(BLOCK_K, n_k),
        scale,
        causal,
        order is None and segment_ids is None,
        None,
        parts_of(score_mod, width),
    )
    stream = v if e is None else jnp.concatenate([v, e], axis=-1)
    rows, columns = (t * b for t, b in zip(plan.tiles, (plan.block_q, plan.block_k), strict=True))
    folded = q.reshape(batch, n_q, kv_heads, groups, width).transpose(0, 2, 3, 1, 4)
    folded = _pad(folded, rows, 3)
    keys, values = (_pad(x.transpose(0, 2, 1, 3), columns, 2) for x in (k, stream))
    side = _side(plan, order, segment_ids, rows, columns)
    learned = ()
    if score_mod is not None:
        lead = (len(plan.parts),) if len(plan.parts) > 1 else ()
        example = jnp.zeros((*lead, batch, heads, plan.block_q, plan.block_k), jnp.float32)
        index_q, index_k = jnp.arange(plan.block_q), jnp.arange(plan.block_k)
        mod, learned, fixed = _open(score_mod, example, index_q, index_k)
        plan, side = dataclasses.replace(plan, score_mod=mod), side._replace(fixed=fixed)
    out, lse = _attend(plan, folded, keys, values, side, learned)
    out = out[:, :, :, :n_q].transpose(0, 3, 1, 2, 4).reshape(batch, n_q, heads, -1)
    lse = lse[..., :n_q].transpose(0, 3, 1, 2).reshape(batch, n_q, heads)
    mixed = None if e is None else out[..., v.shape[-1] :]
    return out[..., : v.shape[-1]], mixed, lse


def _open(score_mod, *examples):
    """score_mod with all it closes over as arguments: (mod, learned, fixed), floats and the rest.

    A custom gradient may not capture what belongs to a trace around it. `jax.closure_convert`
    hands out floats only, and positions are integers.
    """
    closed = jax.make_jaxpr(score_mod)(*examples)
    floats = [jnp.issubdtype(jnp.result_type(c), jnp.inexact) for c in closed.consts]
    learned = tuple(c for c, is_float in zip(closed.consts, floats, strict=True) if is_float)
    fixed = tuple(c for c, is_float in zip(closed.consts, floats, strict=True) if not is_float)

    def mod(scores, q_index, k_index, learned, fixed):
        learned, fixed = iter(learned), iter(fixed)
        consts = [next(learned if is_float else fixed) for is_float in floats]
        (changed,) = jax.core.eval_jaxpr(closed.jaxpr, consts, scores, q_index, k_index)
        return changed

    return mod, learned, fixed


def _pad(x, size, axis):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def _side(plan, order, segment_ids, rows, columns):
    q_order, k_order = order or (jnp.arange(plan.n_q)[None], jnp.arange(plan.n_k)[None])
    q_segment, k_segment = segment_ids or (jnp.zeros_like(q_order), jnp.zeros_like(k_order))
    pad = lambda x, size, value: jnp.pad(  # noqa: E731
        x, ((0, 0), (0, size - x.shape[1])), constant_values=value
    )
    return Side(
        pad(q_order, rows, 0),
        pad(k_order, columns, 0),
        pad(q_segment, rows, 0),
        pad(k_segment, columns, -1),  # a padded key is padding: nobody reads it
    )


def _tile(x, index, size, axis):
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _mask(plan, side, i, j):
    """Which keys of tile j the queries of tile i may read, (B or 1, 1, 1, n, m)."""
    q_segment = _tile(side.q_segment, i, plan.block_q, 1)
    k_segment = _tile(side.k_segment, j, plan.block_k, 1)
    mask = (q_segment[:, :, None] == k_segment[:, None, :]) & (k_segment >= 0)[:, None, :]
    if plan.causal:
        q_order = _tile(side.q_order, i, plan.block_q, 1)
        k_order = _tile(side.k_order, j, plan.block_k, 1)
        mask &= q_order[:, :, None] >= k_order[:, None, :]
    return mask[:, None, None]


def _modified(plan, side, i, j, raw, learned):
    """The scores of tile (i, j), (B, K, G, n, m), from its products, one for each of `parts`."""
    if plan.score_mod is None:
        return raw[0]
    _, batch, *_, n, m = shape = raw.shape
    raw = raw.reshape(len(plan.parts), batch, -1, n, m)
    q_index = jnp.minimum(i * plan.block_q + jnp.arange(n), plan.n_q - 1)
    k_index = jnp.minimum(j * plan.block_k + jnp.arange(m), plan.n_k - 1)
    raw = raw if len(plan.parts) > 1 else raw[0]
    return plan.score_mod(raw, q_index, k_index, learned, side.fixed).reshape(shape[1:])


def _dot(equation, a, b):
    return jnp.einsum(equation, a, b.astype(a.dtype), preferred_element_type=jnp.float32)


def _products(plan, q_tile, k_tile):
    """The scaled scores of each of `parts`, (parts, B, K, G, n, m)."""
    dot = functools.partial(_dot, "bkgnd,bkmd->bkgnm")
    pieces = map(dot, split_channels(q_tile, plan.parts), split_channels(k_tile, plan.parts))
    return plan.scale * jnp.stack(list(pieces))


def _by_parts(plan, equation, d_raw, x):
    """The gradient that `d_raw` gives one factor of the products whose other factor is x."""
    pieces = map(functools.partial(_dot, equation), d_raw, split_channels(x, plan.parts))
    return jnp.concatenate(list(pieces), axis=-1)


def _loop(plan, i, body, carry):
    """body(j, carry, masked) over the key tiles of query tile i, full tiles first."""
    full, end = plan.bounds(i)
    carry = jax.lax.fori_loop(0, full, lambda j, c: body(j, c, False), carry)
    return jax.lax.fori_loop(full, end, lambda j, c: body(j, c, True), carry)


def _forward(plan, q, k, w, side, learned):
    """(out, log-sum-exp) for all query tiles; the log-sum-exp of an empty row is LOWEST."""

    def one_tile(i):
        q_tile = _tile(q, i, plan.block_q, 3)

        def body(j, carry, masked):
            top, total, mixed = carry
            raw = _products(plan, q_tile, _tile(k, j, plan.block_k, 2))
            scores = _modified(plan, side, i, j, raw, learned)
            if masked:  # `top` stays finite, so what is masked weighs exp(-inf) = 0
                scores = jnp.where(_mask(plan, side, i, j), scores, -jnp.inf)
            new_top = jnp.maximum(top, scores.max(axis=-1))
            probs = jnp.exp(scores - new_top[..., None])
            shrink = jnp.exp(top - new_top)
            total = total * shrink + probs.sum(axis=-1)
            step = _dot("bkgnm,bkmd->bkgnd", probs.astype(w.dtype), _tile(w, j, plan.block_k, 2))
            return new_top, total, mixed * shrink[..., None] + step

        shape = q_tile.shape[:-1]
        start = (
            jnp.full(shape, LOWEST, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, w.shape[-1]), jnp.float32),
        )
        top, total, mixed = _loop(plan, i, body, start)
        safe = jnp.where(total == 0.0, 1.0, total)
        return (mixed / safe[..., None]).astype(w.dtype), top + jnp.log(safe)

    out, lse = jax.lax.map(one_tile, jnp.arange(plan.tiles[0]))
    return _join(out), _join(lse)


def _join(tiles):
    """(T, B, K, G, n, ...) -> (B, K, G, T n, ...)."""
    moved = jnp.moveaxis(tiles, 0, 3)
    return moved.reshape(*moved.shape[:3], -1, *moved.shape[5:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan, q, k, w, side, learned):
    return _forward(plan, q, k, w, side, learned)


def _attend_forward(plan, q, k, w, side, learned):
    out, lse = _forward(plan, q, k, w, side, learned)
    out, lse = checkpoint_name(out, "attention_out"), checkpoint_name(lse, "attention_lse")
    return (out, lse), (q, k, w, side, learned, out, lse)


def _attend_backward(plan, residuals, cotangents):
    q, k, w, side, learned, out, lse = residuals
    d_out, d_lse = cotangents
    # dS = P (dP - delta), and a cotangent of the log-sum-exp adds P d_lse.
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1) - d_lse

    def one_tile(carry, i):
        q_tile, d_tile = (_tile(x, i, plan.block_q, 3) for x in (q, d_out))
        lse_tile, delta_tile = (_tile(x, i, plan.block_q, 3)[..., None] for x in (lse, delta))

        def body(j, carry, masked):
            dq, dk, dw, d_learned = carry
            k_tile, w_tile = (_tile(x, j, plan.block_k, 2) for x in (k, w))
            raw = _products(plan, q_tile, k_tile)
            scores, pull = jax.vjp(
                lambda raw, learned: _modified(plan, side, i, j, raw, learned), raw, learned
            )
            probs = jnp.exp(scores - lse_tile)
            if masked:
                probs = jnp.where(_mask(plan, side, i, j), probs, 0.0)
            d_probs = _dot("bkgnd,bkmd->bkgnm", d_tile, w_tile)
            d_raw, d_step = pull(probs * (d_probs - delta_tile))
            d_raw = (d_raw * plan.scale).astype(q.dtype)
            dq += _by_parts(plan, "bkgnm,bkmd->bkgnd", d_raw, k_tile)
            dk_step = _by_parts(plan, "bkgnm,bkgnd->bkmd", d_raw, q_tile)
            dk = _add_tile(dk, dk_step, j, plan.block_k)
            dw_step = _dot("bkgnm,bkgnd->bkmd", probs.astype(w.dtype), d_tile)
            dw = _add_tile(dw, dw_step, j, plan.block_k)
            return dq, dk, dw, jax.tree.map(jnp.add, d_learned, d_step)

        dq, *rest = _loop(plan, i, body, (jnp.zeros(q_tile.shape, jnp.float32), *carry))
        return tuple(rest), dq.astype(q.dtype)

    zeros = lambda x: jnp.zeros(x.shape, jnp.float32)  # noqa: E731
    start = (zeros(k), zeros(w), jax.tree.map(jnp.zeros_like, learned))
    (dk, dw, d_learned), dq = jax.lax.scan(one_tile, start, jnp.arange(plan.tiles[0]))
    return _join(dq), dk.astype(k.dtype), dw.astype(w.dtype), None, d_learned


def _add_tile(total, step, j, size):
    sliced = jax.lax.dynamic_slice_in_dim(total, j * size, size, 2)
    return jax.lax.dynamic_update_slice_in_dim(total, sliced + step, j * size, 2)


_attend.defvjp(_attend_forward, _attend_backward)
