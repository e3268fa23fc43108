"""`tape_attention`: the one entry to every implementation, and the checks they share.

Letters: B batch, N sequence, D head dim, H query heads, K key/value heads, G = H / K,
De width of e.
"""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from pallas_kernels.chunked import chunked
from pallas_kernels.reference import reference

ScoreMod = Callable[[Float[Array, "B H Nq Nk"], Int[Array, " Nq"], Int[Array, " Nk"]], Array]
"""Maps scaled scores to scores, given the query and key *indices* the tile covers."""

IMPLEMENTATIONS = {"reference": reference, "xla": chunked}
"""Every implementation by name; all take what `reference` takes.

reference: the contract, in plain jnp; memory grows with the square of the length.
xla: tile by tile, linear memory, any shape and platform.
"""

SMALL = 64 * 64
"""Scores per head up to which writing them out is no slower than tiling them."""


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
    score_mod: ScoreMod | None = None,
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
      score_mod: changes the scaled scores before the mask, from indices (an additive encoding).
      implementation: a name in `IMPLEMENTATIONS`; None takes "reference" for short sequences and
        "xla" for others.

    Returns:
      out and mixed, in the dtypes of v and e. A row with nothing to read is exactly zero.

    Raises:
      ValueError: shapes that do not fit, or an unknown implementation; names the argument.
    """
    _check(q, k, v, e)
    n_q, n_k = q.shape[1], k.shape[1]
    if implementation is None:
        implementation = "reference" if n_q * n_k <= SMALL else "xla"
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation={implementation!r} is unknown; known: {', '.join(IMPLEMENTATIONS)}"
        )
    return IMPLEMENTATIONS[implementation](
        q,
        k,
        v,
        e,
        causal=causal,
        order=_pair("positions", positions, n_q, n_k),
        segment_ids=_pair("segment_ids", segment_ids, n_q, n_k),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        score_mod=score_mod,
    )


def _check(q, k, v, e):
    named = {"q": q, "k": k, "v": v} | ({} if e is None else {"e": e})
    for name, x in named.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, sequence, heads, width), got {x.shape}")
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


def _pair(name, value, n_q, n_k):
    if value is None:
        return None
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    for side, x, n in zip(("query", "key"), pair, (n_q, n_k), strict=True):
        if x.ndim != 2 or x.shape[1] != n:
            raise ValueError(f"{name} ({side} side) must be (batch, {n}), got {x.shape}")
    return pair
