"""Position-aware attention as one call of cuDNN's fused attention.

cuDNN wants values as wide as keys, so q and k are padded with zeros to the width of [v | e]: zeros
add nothing to the scores, and one call mixes both streams. That is a third more arithmetic than two
streams need, on cuDNN's schedule.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

library = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
"""The call itself; tests put JAX's plain implementation in its place."""

DTYPES = ("bfloat16", "float16")

WIDEST = 256  # of [v | e], by cuDNN's support matrix for compute capability 9.0 and 10.0


def refusal(q, k, v, e, *, causal, order, segment_ids, score_mod, **_) -> str | None:
    """Why cuDNN cannot honour a call without an N x N mask; None when it can."""
    wide = v.shape[3] + (0 if e is None else e.shape[3])
    reasons = {
        "score_mod": score_mod is not None,
        "positions": order is not None,
        "segment_ids": segment_ids is not None,
        f"dtype {q.dtype}: {' or '.join(DTYPES)}": q.dtype.name not in DTYPES,
        f"widths of v and e that add up to {wide}: a multiple of 8 up to {WIDEST}": wide > WIDEST
        or wide % 8,
        f"heads of width {q.shape[3]} beside narrower values ({wide})": q.shape[3] > wide,
        f"causal with {q.shape[1]} queries and {k.shape[1]} keys": causal
        and q.shape[1] != k.shape[1],
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def one_call(q, k, v, e, *, causal, order, segment_ids, scale, score_mod):
    """(out, mixed, None): cuDNN keeps its log-sum-exp to itself when gradients are asked for."""
    del order, segment_ids, score_mod  # refused
    stream = v if e is None else jnp.concatenate([v, e], axis=-1)
    q, k = (jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, stream.shape[3] - x.shape[3]))) for x in (q, k))
    out = library(q, k, stream, scale=scale, is_causal=causal)
    out = checkpoint_name(out, "attention_out")
    return out[..., : v.shape[3]], None if e is None else out[..., v.shape[3] :], None
