"""The contract: position-aware attention in plain jnp, one line per equation. Memory is O(N^2)."""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.scores import parts_of, split_channels

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


def probabilities(q, k, *, causal, order, segment_ids, scale, score_mod):
    """(softmax (B, H, Nq, Nk), log-sum-exp (B, Nq, H)) of a normalised call, both float32."""
    batch, n_q, heads, width = q.shape
    n_k, kv_heads = k.shape[1], k.shape[2]
    grouped = q.reshape(batch, n_q, kv_heads, heads // kv_heads, width)

    def product(q, k):
        scores = jnp.einsum("bnkgd,bmkd->bkgnm", q, k, preferred_element_type=jnp.float32)
        return scores.reshape(batch, heads, n_q, n_k) * scale

    parts = parts_of(score_mod, width)
    products = list(map(product, split_channels(grouped, parts), split_channels(k, parts)))
    mask = attention_mask(causal, order, segment_ids, n_q, n_k)
    scores = products[0] if len(products) == 1 else jnp.stack(products)
    if score_mod is not None:
        if score_mod.whole_rows and mask is not None:
            scores = jnp.where(mask, scores, LOWEST)
        scores = score_mod(scores, jnp.arange(n_q), jnp.arange(n_k))
    probs, lse = masked_softmax(scores, mask)
    return probs, lse.swapaxes(1, 2)


def reference(q, k, v, e, **arguments):
    """(out, mixed, log-sum-exp (B, Nq, H)) of a normalised call of `tape_attention`."""
    (batch, n_q, heads, _), kv_heads = q.shape, k.shape[2]
    probs, lse = probabilities(q, k, **arguments)
    probs = probs.reshape(batch, kv_heads, heads // kv_heads, n_q, -1)

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
    return out, mixed, lse
