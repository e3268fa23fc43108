# A kernel is written in Triton's language, which is not quite Python.
# pyrefly: ignore-errors
"""The forward kernel of position-aware attention in Triton's own language.

It imports Triton alone, so that Triton's interpreter can run it on a CPU. Arrays are contiguous
(batch, sequence, heads, width); every number but a pointer is a constant of the compiled kernel,
whose strides are then known to be aligned.

Letters: n, m rows of a query and a key tile; W the power of two that holds a width.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.4028234663852886e38)  # of float32
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _exist(index, LENGTH: tl.constexpr, SURE: tl.constexpr):
    """Which indices are below LENGTH; a constant, which costs nothing, when SURE that all are."""
    return tl.full(index.shape, True, tl.int1) if SURE else index < LENGTH


@triton.jit
def _place(at, rows, exist, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    """Addresses of the (rows, W) tile of one head at `at`, and which of them hold a number."""
    columns = tl.arange(0, WIDE)
    exist = exist[:, None] & _exist(columns, WIDTH, WIDTH == WIDE)[None, :]
    return at + rows[:, None] * (HEADS * WIDTH) + columns[None, :], exist


@triton.jit
def _load(at, rows, exist, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    place, exist = _place(at, rows, exist, HEADS, WIDTH, WIDE)
    return tl.load(place, mask=exist, other=0.0)


@triton.jit
def _store(tile, at, rows, exist, HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr):
    place, exist = _place(at, rows, exist, HEADS, WIDTH, WIDE)
    tl.store(place, tile.to(at.dtype.element_ty), mask=exist)


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    e,
    q_order,
    k_order,
    q_segment,
    k_segment,
    visits,
    out,
    lse,
    mixed,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BY_INDEX: tl.constexpr,
    N_Q: tl.constexpr,
    N_K: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_WIDE: tl.constexpr,
    V: tl.constexpr,
    V_WIDE: tl.constexpr,
    E: tl.constexpr,
    E_WIDE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out = P v and mixed = P e for one query tile of one head.

    Args:
      q, k, v, e: (B, N_Q, HEADS, HEAD), (B, N_K, KV_HEADS, HEAD), and V and E instead of HEAD; with
        E = 0 there are no states, and neither e nor mixed is touched.
      q_order, k_order, q_segment, k_segment: int32 (B, N_Q) or (B, N_K), untouched when BY_INDEX.
      visits: int32 (B, T, 2), the range of key tiles of a query tile; untouched when BY_INDEX.
      out, lse, mixed: (B, N_Q, HEADS, V), float32 (B, HEADS, N_Q), (B, N_Q, HEADS, E).
    """
    i = tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)  # offsets of whole arrays may pass 2^31
    kv_head = head // (HEADS // KV_HEADS)
    row = batch * N_Q + i * BLOCK_Q
    at_row = row * HEADS + head

    n = tl.arange(0, BLOCK_Q)
    m = tl.arange(0, BLOCK_K)
    rows = i * BLOCK_Q + n
    row_exists = _exist(rows, N_Q, N_Q % BLOCK_Q == 0)
    q_tile = _load(q + at_row * HEAD, n, row_exists, HEADS, HEAD, HEAD_WIDE)

    whole: tl.constexpr = N_K // BLOCK_K
    tiles: tl.constexpr = (N_K + BLOCK_K - 1) // BLOCK_K
    if BY_INDEX:
        start = 0
        full = whole
        end = tiles
        last = tl.full((BLOCK_Q,), N_K - 1, tl.int32)
        if CAUSAL:
            full = tl.minimum((i * BLOCK_Q + 1) // BLOCK_K, whole)
            end = tl.minimum(((i + 1) * BLOCK_Q - 1) // BLOCK_K + 1, tiles)
            last = tl.minimum(rows, N_K - 1)
    else:
        visit = visits + (batch * tl.num_programs(0) + i) * 2
        start = tl.load(visit)
        full = start
        end = tl.load(visit + 1)
        row_order = tl.load(q_order + row + n, mask=row_exists, other=0)
        row_segment = tl.load(q_segment + row + n, mask=row_exists, other=0)

    top = tl.full((BLOCK_Q,), LOWEST, tl.float32)
    total = tl.full((BLOCK_Q,), 0.0, tl.float32)
    v_sum = tl.full((BLOCK_Q, V_WIDE), 0.0, tl.float32)
    e_sum = tl.full((BLOCK_Q, E_WIDE), 0.0, tl.float32)

    # Two loops of one text: over the tiles with a mask, then over those that are read whole.
    for unmasked in tl.static_range(0, 2 if BY_INDEX else 1):
        for j in range(start if unmasked else full, full if unmasked else end):
            keys = j * BLOCK_K + m
            key_exists = _exist(keys, N_K, unmasked or N_K % BLOCK_K == 0)
            key = batch * N_K + j * BLOCK_K
            at_key = key * KV_HEADS + kv_head
            k_tile = _load(k + at_key * HEAD, m, key_exists, KV_HEADS, HEAD, HEAD_WIDE)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * SCALE
            if not unmasked:
                if BY_INDEX:
                    readable = keys[None, :] <= last[:, None]
                else:
                    segment = tl.load(k_segment + key + m, mask=key_exists, other=-1)[None, :]
                    readable = (row_segment[:, None] == segment) & (segment >= 0)
                    if CAUSAL:
                        order = tl.load(k_order + key + m, mask=key_exists, other=0)
                        readable &= row_order[:, None] >= order[None, :]
                # `top` stays finite, so what is masked weighs exp2(-inf) = 0.
                scores = tl.where(readable, scores, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            probs = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total = total * shrink + tl.sum(probs, axis=1)
            v_tile = _load(v + at_key * V, m, key_exists, KV_HEADS, V, V_WIDE)
            v_sum = tl.dot(
                probs.to(v_tile.dtype), v_tile, v_sum * shrink[:, None], input_precision="ieee"
            )
            if E > 0:
                e_tile = _load(e + at_key * E, m, key_exists, KV_HEADS, E, E_WIDE)
                e_sum = tl.dot(
                    probs.to(e_tile.dtype), e_tile, e_sum * shrink[:, None], input_precision="ieee"
                )
            top = new_top

    empty = total == 0.0
    safe = tl.where(empty, 1.0, total)
    _store(v_sum / safe[:, None], out + at_row * V, n, row_exists, HEADS, V, V_WIDE)
    if E > 0:
        _store(e_sum / safe[:, None], mixed + at_row * E, n, row_exists, HEADS, E, E_WIDE)
    log_sum = tl.where(empty, LOWEST, top / LOG2_E + tl.log(safe))
    tl.store(lse + (batch * HEADS + head) * N_Q + rows, log_sum, mask=row_exists)
