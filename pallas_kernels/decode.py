"""Few queries over many keys: parts of the cache in parallel, merged by their log-sum-exps.

A kernel that walks all keys for one tile of queries leaves a GPU idle when there is one such tile.
Here the parts of the keys are rows of the batch and the queries of a group are rows of one tile, so
the kernel is the one that trains (flash-decoding, arXiv 2311.01282). What a tile of keys holds that
no query may read, such as the empty end of a cache, is not visited. A linear bias differs by head,
so with one heads stay heads.
"""

import functools

import jax.numpy as jnp

from pallas_kernels.scores import LinearBias

MOST_ROWS = 64
"""Queries times heads of a group up to which keys are split."""

FEWEST_KEYS = 256
"""Keys of a part at least."""

PROGRAMS = 264
"""Programs to aim at: two for each multiprocessor of an H100."""


def split_keys(attend):
    """`attend` of a normalised call, with the keys of few queries split into parts."""

    @functools.wraps(attend)
    def split(q, k, v, e, *, causal, order, segment_ids, scale, score_mod):
        parts = _parts(q, k)
        rest = {"causal": causal, "scale": scale}
        if parts == 1:
            return attend(
                q, k, v, e, order=order, segment_ids=segment_ids, score_mod=score_mod, **rest
            )
        heads = k.shape[2] if score_mod is None else q.shape[2]
        shape = (*q.shape[:2], heads, q.shape[2] // heads)
        if causal and order is None:
            order = jnp.arange(q.shape[1])[None], jnp.arange(k.shape[1])[None]
        out, mixed, lse = attend(
            _rows(q, parts, shape),
            *(None if x is None else _keys(x, parts) for x in (k, v, e)),
            order=order and _integers(order, parts, shape),
            segment_ids=segment_ids and _integers(segment_ids, parts, shape),
            score_mod=score_mod and _bias(score_mod, parts, shape),
            **rest,
        )
        return _merge(out, lse, shape), None if e is None else _merge(mixed, lse, shape), None

    return split


def _parts(q, k) -> int:
    """The most parts of equal length that are worth their merging."""
    (batch, n_q, heads, _), (_, n_k, kv_heads, _) = q.shape, k.shape
    if n_q * (heads // kv_heads) > MOST_ROWS:
        return 1
    most = max(1, min(n_k // FEWEST_KEYS, -(-PROGRAMS // (batch * kv_heads))))
    return next(parts for parts in range(most, 0, -1) if n_k % parts == 0)


def _rows(q, parts, shape):
    """(B, N, K G, D) -> (B parts, N G, K, D), where G is the heads that are rows of one tile."""
    batch, n_q, kv_heads, groups = shape
    q = q.reshape(batch, n_q, kv_heads, groups, -1).swapaxes(2, 3)
    q = jnp.broadcast_to(q[:, None], (batch, parts, *q.shape[1:]))
    return q.reshape(batch * parts, n_q * groups, kv_heads, -1)


def _keys(x, parts):
    """(B, N, ...) -> (B parts, N / parts, ...)."""
    return x.reshape(x.shape[0] * parts, x.shape[1] // parts, *x.shape[2:])


def _integers(pair, parts, shape):
    batch, _, _, groups = shape
    of_q, of_k = (jnp.broadcast_to(x, (batch, x.shape[1])) for x in pair)
    return jnp.repeat(jnp.repeat(of_q, groups, axis=1), parts, axis=0), _keys(of_k, parts)


def _bias(bias, parts, shape):
    positions = _integers((bias.q_positions, bias.k_positions), parts, shape)
    return LinearBias(bias.slopes, *positions)


def _merge(out, lse, shape):
    """Sum of the parts' outputs, weighted by their shares of the whole softmax."""
    batch, n_q, kv_heads, groups = shape
    lse = lse.reshape(batch, -1, n_q, groups, kv_heads, 1)
    weights = jnp.exp(lse - lse.max(axis=1, keepdims=True))
    out = out.reshape(*lse.shape[:-1], -1)
    mean = (weights * out).sum(axis=1) / weights.sum(axis=1)
    return mean.swapaxes(2, 3).reshape(batch, n_q, kv_heads * groups, -1).astype(out.dtype)
