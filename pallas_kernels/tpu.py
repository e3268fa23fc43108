"""Position-aware attention on TPUs: JAX's splash attention with [v | e] as its values.

Splash attention takes values of another width than its keys, so both streams share one score tile.
It wants whole blocks of rows; what is added is padding, in a segment of its own.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as splash,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)

INTERPRET = False
"""Run the kernels' Python instead of compiling them: how tests run them without a TPU."""

LANES = 128
BLOCK = 512
"""Rows of a tile, of queries and of keys; fewer for shorter sequences."""

Q_PADDING, K_PADDING = -1, -2  # two segments: padding reads nothing, padding included


def refusal(q, k, v, e, *, order, segment_ids, score_mod, **_) -> str | None:
    """Why splash attention cannot honour a call without an N x N mask; None when it can."""
    reasons = {
        "score_mod": score_mod is not None,
        "positions": order is not None,
        "segment_ids that differ between queries and keys": segment_ids is not None
        and segment_ids[0] is not segment_ids[1],
        f"dtype {q.dtype}: float32 or bfloat16": q.dtype not in (jnp.float32, jnp.bfloat16),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def splashed(q, k, v, e, *, causal, order, segment_ids, scale, score_mod):
    """(out, mixed, None): splash attention keeps its log-sum-exp for its own backward pass."""
    del order, score_mod  # refused
    n_q, n_k = q.shape[1], k.shape[1]
    rows, columns = (-(-n // LANES) * LANES for n in (n_q, n_k))
    stream = v if e is None else jnp.concatenate([v, e], axis=-1)
    out = jax.vmap(_kernel(q.shape[2], rows, columns, causal))(
        _by_head(q * jnp.asarray(scale, q.dtype), rows),
        _by_head(k, columns),
        _by_head(stream, columns),
        _segments(q.shape[0], n_q, n_k, rows, columns, causal, segment_ids),
    )
    out = jnp.asarray(out).swapaxes(1, 2)[:, :n_q]
    if segment_ids is not None:  # a row of padding averages everything there; ours reads nothing
        out = jnp.where((segment_ids[0] >= 0)[:, :, None, None], out, 0)
    return out[..., : v.shape[3]], None if e is None else out[..., v.shape[3] :], None


def _kernel(heads, rows, columns, causal):
    mask = (masks.CausalMask if causal else masks.FullMask)((rows, columns))
    block_q, block_k = (_block(n) for n in (rows, columns))
    sizes = splash.BlockSizes(
        block_q=block_q,
        block_kv=block_k,
        block_kv_compute=block_k,
        block_q_dkv=block_q,
        block_kv_dkv=block_k,
        block_kv_dkv_compute=block_k,
        block_q_dq=block_q,
        block_kv_dq=block_k,
    )
    return splash.make_splash_mha(
        mask=masks.MultiHeadMask([mask] * heads),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="attention_out",  # of the outputs and of the log-sum-exp
        interpret=INTERPRET,
    )


def _block(length):
    """The largest block of whole lanes that divides the length."""
    return max(b for b in range(LANES, BLOCK + 1, LANES) if length % b == 0)


def _by_head(x, length):
    return jnp.pad(x, ((0, 0), (0, length - x.shape[1]), (0, 0), (0, 0))).swapaxes(1, 2)


def _segments(batch, n_q, n_k, rows, columns, causal, segment_ids):
    """Segments that keep padding apart; None when nothing has to be kept apart."""
    if segment_ids is None:
        if columns == n_k or (causal and n_q <= n_k):  # causality hides what comes after the end
            return None
        segment_ids = jnp.zeros((1, n_q), jnp.int32), jnp.zeros((1, n_k), jnp.int32)

    def side(ids, length, padding):
        ids = jnp.where(ids < 0, padding, ids).astype(jnp.int32)
        ids = jnp.pad(ids, ((0, 0), (0, length - ids.shape[1])), constant_values=padding)
        return jnp.broadcast_to(ids, (batch, length))

    return splash.SegmentIds(
        side(segment_ids[0], rows, Q_PADDING), side(segment_ids[1], columns, K_PADDING)
    )
