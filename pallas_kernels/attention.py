"""`tape_attention`: the one entry to every implementation, and the checks they share.

Letters: B batch, N sequence, D head dim, H query heads, K key/value heads, G = H / K,
De width of e.
"""

from jaxtyping import Array, Float, Int

from pallas_kernels.implementations import (
    IMPLEMENTATIONS,
    PREFERENCE,
    first_that_compiles,
    platform,
)
from pallas_kernels.scores import LinearBias, ScoreMod

SMALL = 64 * 64
"""Scores per head up to which writing them out is no slower than tiling them."""

FEW = 8
"""Queries up to which the scores are smaller than the keys: written out, they cost nothing."""


def tape_attention(
    q: Float[Array, "B Nq H D"],
    k: Float[Array, "B Nk K D"],
    v: Float[Array, "B Nk K D"],
    e: Float[Array, "B Nk K De"] | None = None,
    *,
    causal: bool = True,
    segment_ids: Int[Array, "B N"] | tuple[Int[Array, "B Nq"], Int[Array, "B Nk"]] | None = None,
    positions: Int[Array, "B N"] | tuple[Int[Array, "B Nq"], Int[Array, "B Nk"]] | None = None,
    scale: float | None = None,
    score_mod: ScoreMod | LinearBias | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Nq H D"], Float[Array, "B Nq H De"] | None]:
    """Mix token values and position states with the same probabilities (paper Eqs. 6 and 7).

    out = P v and mixed = P e with P = softmax(scale * q k^T); query head h reads key/value head
    h // G. q and k are already rotated. With e = None this is ordinary attention.

    Args:
      causal: a query reads keys whose order is not after its own.
      segment_ids: a query reads only keys of its own segment; a negative id is padding, read by
        nobody. One (B, N) array, or a (query, key) pair.
      positions: the order `causal` compares; the indices when None. One array or a pair.
      scale: multiplies q k^T; D ** -0.5 when None.
      score_mod: changes the scaled scores before the mask (an additive encoding): by a function of
        theirs and of indices, or by a bias that fused kernels know.
      implementation: a name in `IMPLEMENTATIONS`, which then honours every argument or raises.
        None takes what suits the platform and these arguments (`PREFERENCE`).

    Returns:
      out and mixed, in the dtype of v and e. A row with nothing to read is exactly zero.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown implementation, or one that cannot
        honour an argument; names the argument.
    """
    _check(q, k, v, e)
    if isinstance(score_mod, LinearBias):
        _check_bias(score_mod, q, k)
    arguments = {
        "causal": causal,
        "order": _pair("positions", positions, q, k),
        "segment_ids": _pair("segment_ids", segment_ids, q, k),
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "score_mod": score_mod,
    }
    if implementation is None:
        implementation = _choose((q, k, v, e), arguments)
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is unknown; known: {', '.join(IMPLEMENTATIONS)}"
        )
    chosen = IMPLEMENTATIONS[implementation]
    if (reason := chosen.refusal(q, k, v, e, **arguments)) is not None:
        raise ValueError(
            f"implementation={implementation!r} cannot honour {reason}; with implementation=None"
            " one that can is taken"
        )
    out, mixed, _ = chosen.attend(q, k, v, e, **arguments)
    return out, mixed


def _choose(arrays, arguments):
    """What suits the platform and can honour every argument."""
    here = platform()
    n_q, n_k = arrays[0].shape[1], arrays[1].shape[1]
    if n_q * n_k <= SMALL or (n_q <= FEW and here != "gpu"):
        return "reference"
    return first_that_compiles(PREFERENCE.get(here, ("xla",)), arrays, arguments)


def _check(q, k, v, e):
    named = {"q": q, "k": k, "v": v} | ({} if e is None else {"e": e})
    for name, x in named.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, sequence, heads, width), got {x.shape}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q {q.dtype}: cast them to one dtype")
        if 0 in x.shape:
            raise ValueError(f"{name} {x.shape} is empty")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape} and k {k.shape} must agree in batch and width")
    for name in named.keys() - {"q", "k"}:
        if named[name].shape[:3] != k.shape[:3]:
            raise ValueError(
                f"{name} {named[name].shape} and k {k.shape} must agree in all but the width"
            )
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"the query heads ({q.shape[2]}) must be a multiple of the key/value heads"
            f" ({k.shape[2]})"
        )


def _check_bias(bias, q, k):
    if bias.slopes.shape != (q.shape[2],):
        raise ValueError(
            f"score_mod.slopes must be one for each of {q.shape[2]} query heads,"
            f" got {bias.slopes.shape}"
        )
    _pair("score_mod positions", (bias.q_positions, bias.k_positions), q, k)


def _pair(name, value, q, k):
    if value is None:
        return None
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    batch = q.shape[0]
    for side, x, n in zip(("query", "key"), pair, (q.shape[1], k.shape[1]), strict=True):
        if x.shape not in ((batch, n), (1, n)):
            raise ValueError(f"{name} ({side} side) must be ({batch} or 1, {n}), got {x.shape}")
    return pair
