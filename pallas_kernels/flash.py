"""What the tiled GPU kernels share: tiles, masks as integers, which tiles to visit, the gradient.

A kernel sees one static `Spec`, arrays in the layout of `tape_attention`, a `Side` of integers
unless causality by index says it all, and a `LinearBias` where scores have one. The position states
are a second value stream: there is one score tile and one accumulator per stream, forward and
backward.

Letters: B batch, N sequence, H query heads, K key/value heads, G query heads in a group, T tiles.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels import tiles
from pallas_kernels.scores import LinearBias
from pallas_kernels.tiles import Tiles

LOG2_E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is static about a call.

    Attributes:
      by_index: what a query may read follows from indices alone (no `Side`).
      kernels: `forward` and `backward` as in `pallas_kernels.gpu`.
      interpret: run the kernels' Python on any platform instead of compiling them.
    """

    n_q: int
    n_k: int
    scale: float
    causal: bool
    by_index: bool
    tiles: Tiles
    kernels: tuple[Callable[..., Any], Callable[..., Any]]
    interpret: bool = False


class Side(NamedTuple):
    """Which key a query may read when indices do not say it: int32, (B, Nq) and (B, Nk)."""

    q_order: Any
    k_order: Any
    q_segment: Any
    k_segment: Any


def make_side(spec: Spec, batch: int, order, segment_ids) -> Side | None:
    """The Side of a call; None when indices decide."""
    if spec.by_index:
        return None
    q_order, k_order = order or (jnp.arange(spec.n_q)[None], jnp.arange(spec.n_k)[None])
    q_segment, k_segment = segment_ids or (jnp.zeros((1, spec.n_q)), jnp.zeros((1, spec.n_k)))
    return Side(*(_integers(x, batch) for x in (q_order, k_order, q_segment, k_segment)))


def make_bias(batch: int, bias: LinearBias | None) -> LinearBias | None:
    """The bias of a call as kernels read it: positions are int32, (B, Nq) and (B, Nk)."""
    if bias is None:
        return None
    bias = bias.map_positions(functools.partial(_integers, batch=batch))
    return dataclasses.replace(bias, slopes=bias.slopes.astype(jnp.float32))


def _integers(x, batch):
    return jnp.broadcast_to(x.astype(jnp.int32), (batch, x.shape[1]))


def readable(spec: Spec, q_order, k_order, q_segment, k_segment):
    """Which key a query may read, from integers that broadcast against each other."""
    mask = (q_segment == k_segment) & (k_segment >= 0)
    if spec.causal:
        mask &= q_order >= k_order
    return mask


def visits(spec: Spec, side: Side, block_q: int, block_k: int):
    """For each tile the range of tiles on the other side that it may have to visit.

    Two tiles can meet only when their ranges of segments overlap and some query is not before some
    key. Sorted segments (packed documents) and a cache that is longer than what was written leave
    few; the range is exact for tiles, the kernel's mask decides within.

    Returns:
      int32 (B, Tq, 2) and (B, Tk, 2): [first, end) of key tiles by query tile, and the reverse.
    """

    by_query = functools.partial(_tiled, block=block_q)
    by_key = functools.partial(_tiled, block=block_k)

    def lowest(segment):  # padding reads and is read by nobody: it must not widen the range
        return jnp.where(segment < 0, jnp.iinfo(jnp.int32).max, segment).min(axis=2)

    q_segment, k_segment = by_query(side.q_segment), by_key(side.k_segment)
    meets = lowest(q_segment)[:, :, None] <= k_segment.max(axis=2)[:, None]
    meets &= q_segment.max(axis=2)[:, :, None] >= lowest(k_segment)[:, None]
    if spec.causal:
        latest, earliest = by_query(side.q_order).max(axis=2), by_key(side.k_order).min(axis=2)
        meets &= latest[:, :, None] >= earliest[:, None]

    def ranges(meets):
        first = jnp.argmax(meets, axis=2)
        end = meets.shape[2] - jnp.argmax(meets[:, :, ::-1], axis=2)
        some = meets.any(axis=2)
        return jnp.where(some[..., None], jnp.stack([first, end], axis=2), 0).astype(jnp.int32)

    return ranges(meets), ranges(meets.swapaxes(1, 2))


def _tiled(x, block):
    """(B, N) -> (B, T, block), the last tile filled with its last value."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)), mode="edge")
    return x.reshape(x.shape[0], -1, block)


def fused(kernels, interpret, q, k, v, e, *, causal, order, segment_ids, scale, score_mod):
    """(out, mixed, log-sum-exp (B, Nq, H)) of a normalised call, by (forward, backward) kernels."""
    sizes = tiles.choose(max(q.shape[3], v.shape[3]), 0 if e is None else e.shape[3], q.dtype)
    spec = Spec(
        n_q=q.shape[1],
        n_k=k.shape[1],
        scale=scale,
        causal=causal,
        by_index=order is None and segment_ids is None,
        tiles=sizes.within(q.shape[1], k.shape[1]),
        kernels=kernels,
        interpret=interpret,
    )
    side = make_side(spec, q.shape[0], order, segment_ids)
    bias = make_bias(q.shape[0], score_mod)
    outs, lse = _attend(spec, q, k, (v,) if e is None else (v, e), side, bias)
    return outs[0], None if e is None else outs[1], lse.swapaxes(1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(spec, q, k, values, side, bias):
    forward, _ = spec.kernels
    return forward(spec, q, k, values, side, bias)


def _attend_forward(spec, q, k, values, side, bias):
    forward, _ = spec.kernels  # not `_attend`: a policy would not see the names within
    outs, lse = forward(spec, q, k, values, side, bias)
    names = ("attention_out", "attention_mixed")[: len(outs)]
    outs = tuple(checkpoint_name(x, name) for x, name in zip(outs, names, strict=True))
    lse = checkpoint_name(lse, "attention_lse")
    return (outs, lse), (q, k, values, side, bias, outs, lse)


def _attend_backward(spec, residuals, cotangents):
    """dS = P (dP - delta) with delta = rowsum(P dP) = sum over streams of <d_out, out>.

    A cotangent of the log-sum-exp adds P d_lse to dS, so it is subtracted from delta.
    """
    q, k, values, side, bias, outs, lse = residuals
    d_outs, d_lse = cotangents
    delta = -d_lse
    for d_out, out in zip(d_outs, outs, strict=True):
        product = d_out.astype(jnp.float32) * out.astype(jnp.float32)
        delta += product.sum(axis=-1).swapaxes(1, 2)
    _, backward = spec.kernels
    dq, dk, d_values = backward(spec, q, k, values, side, bias, d_outs, lse, delta)
    return dq, dk, d_values, None, None


_attend.defvjp(_attend_forward, _attend_backward)
