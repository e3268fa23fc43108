"""The contract: position-aware attention in plain jnp, one line per equation. Memory is O(N^2)."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

LOWEST = float(jnp.finfo(jnp.float32).min)
"""Log-sum-exp of a row with nothing to read: finite, so that nothing it meets becomes NaN."""


def attention_mask(causal, order, segment_ids, n_q, n_k):
    """Which key each query may read: bool, broadcastable to (B, 1, Nq, Nk), or None for all.

    order and segment_ids are (query, key) pairs of (B or 1, N) int32, or None.
    """
    mask = None
    if causal:
        q_order, k_order = order or (jnp.arange(n_q)[None], jnp.arange(n_k)[None])
        mask = q_order[:, :, None] >= k_order[:, None, :]
    if segment_ids is not None:
        q_segment, k_segment = segment_ids
        same = q_segment[:, :, None] == k_segment[:, None, :]
        same &= (k_segment >= 0)[:, None, :]
        mask = same if mask is None else mask & same
    return None if mask is None else mask[:, None]


def masked_softmax(scores, mask):
    """(softmax, log-sum-exp) over the last axis; a row with nothing to read is zero, `LOWEST`."""
    if mask is not None:
        scores = jnp.where(mask, scores, LOWEST)
    lse = jax.nn.logsumexp(scores, axis=-1)
    probs = jax.nn.softmax(scores, axis=-1)
    if mask is not None:
        probs = jnp.where(mask.any(axis=-1, keepdims=True), probs, 0.0)
    return probs, lse


def reference(q, k, v, e, *, causal, order, segment_ids, scale, score_mod):
    """(out, mixed, log-sum-exp (B, Nq, H)) of a normalised call of `tape_attention`."""
    batch, n_q, heads, width = q.shape
    n_k, kv_heads = k.shape[1], k.shape[2]
    groups = heads // kv_heads
    grouped = q.reshape(batch, n_q, kv_heads, groups, width)
    scores = jnp.einsum("bnkgd,bmkd->bkgnm", grouped, k, preferred_element_type=jnp.float32)
    scores = scores.reshape(batch, heads, n_q, n_k) * scale
    if score_mod is not None:
        scores = score_mod(scores, jnp.arange(n_q), jnp.arange(n_k))
    probs, lse = masked_softmax(scores, attention_mask(causal, order, segment_ids, n_q, n_k))
    probs = probs.reshape(batch, kv_heads, groups, n_q, n_k)

    def read(values):
        mixed = jnp.einsum(
            "bkgnm,bmkd->bnkgd",
            probs.astype(values.dtype),
            values,
            preferred_element_type=jnp.float32,
        )
        return mixed.reshape(batch, n_q, heads, -1).astype(values.dtype)

    out, mixed = checkpoint_name(read(v), "attention_out"), None
    if e is not None:
        mixed = checkpoint_name(read(e), "attention_mixed")
    return out, mixed, lse.swapaxes(1, 2)
