"""The forward kernel in Triton's own language, launched by jax_triton; backward as in `gpu`.

Pallas's dialect of Triton is deprecated, this one is not. Nothing here imports Triton before a
kernel is launched. The program carries PTX, which the ptxas that JAX finds assembles on the first
run; where that one is older than Triton's ("Unsupported .version"), its path in the environment
variable TRITON_PTXAS_BLACKWELL_PATH (TRITON_PTXAS_PATH before Hopper) makes Triton write for it.

Letters: B batch, N sequence, D head dim, H query heads, K key/value heads, De width of e, T tiles.
"""

import functools
import importlib.util

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from pallas_kernels import flash, gpu, tiles
from pallas_kernels.decode import split_keys
from pallas_kernels.flash import LOG2_E, visits


def refusal(q, k, v, e, **arguments) -> str | None:
    """Why this implementation cannot honour a call; None when it can."""
    if arguments["score_mod"] is not None:
        return "score_mod (the forward kernel knows none)"
    if (reason := gpu.refusal(q, k, v, e, **arguments)) is not None:
        return reason
    if importlib.util.find_spec("jax_triton") is None:
        return 'a call without jax_triton (pip install "tape-jax[triton]")'
    return None


@split_keys
def fused(q, k, v, e, **arguments):
    """(out, mixed, log-sum-exp (B, Nq, H)) of a normalised call of `tape_attention`."""
    return flash.fused((forward, gpu.backward), gpu.INTERPRET, q, k, v, e, **arguments)


def forward(spec, q, k, values, side, bias):
    """(outs, log-sum-exp (B, H, Nq)) from q (B, Nq, H, D), k (B, Nk, K, D) and value streams."""
    del bias  # refused
    tile = spec.tiles.forward
    visited = None if side is None else visits(spec, side, tile.block_q, tile.block_k)[0]
    return _foldable(functools.partial(_forward, spec))(q, k, values, side, visited)


def _forward(spec, q, k, values, side, visited):
    """`forward` with visits, int32 (B, T, 2), beside a Side."""
    batch, n_q, heads, width = q.shape
    tile = spec.tiles.forward
    v, e = (*values, None)[:2]
    v_width, e_width = v.shape[3], 0 if e is None else e.shape[3]
    out, *mixed = [jax.ShapeDtypeStruct((*q.shape[:3], x.shape[3]), x.dtype) for x in values]
    lse = jax.ShapeDtypeStruct((batch, heads, n_q), jnp.float32)
    # A pointer that the kernel never follows still has to point: q is at hand.
    out, lse, *mixed = launch(
        q,
        k,
        v,
        q if e is None else e,
        *((q,) * 5 if side is None else (*side, visited)),
        out_shape=[out, lse, *mixed],
        grid=(-(-n_q // tile.block_q), heads, batch),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **({} if mixed else {"mixed": None}),
        SCALE=spec.scale * LOG2_E,
        CAUSAL=spec.causal,
        BY_INDEX=spec.by_index,
        N_Q=n_q,
        N_K=spec.n_k,
        HEADS=heads,
        KV_HEADS=k.shape[2],
        HEAD=width,
        HEAD_WIDE=tiles.padded(width),
        V=v_width,
        V_WIDE=tiles.padded(v_width),
        E=e_width,
        E_WIDE=tiles.padded(e_width),
        BLOCK_Q=tile.block_q,
        BLOCK_K=tile.block_k,
    )
    return (out, *mixed), lse


def launch(*arrays, out_shape, grid, num_warps, num_stages, **constants):
    """Run the kernel over `grid`: arrays, outputs and constants are its parameters in order."""
    import jax_triton  # pyrefly: ignore[missing-import]

    from pallas_kernels.triton_kernel import forward_kernel

    return jax_triton.triton_call(
        *arrays,
        kernel=forward_kernel,
        name="tape_attention_forward",
        out_shape=out_shape,
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        # Without it jax_triton asks the driver, which a machine without a GPU lacks.
        compute_capability=int(tiles.device_capability().replace(".", "")),
        **constants,
    )


def _foldable(call):
    """`call` of arrays (B, ...), which under vmap folds the mapped axis into B."""
    foldable = custom_vmap(call)

    @foldable.def_vmap
    def rule(size, mapped, *operands):
        def fold(x, mapped):
            x = x if mapped else jnp.broadcast_to(x, (size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        results = foldable(*jax.tree.map(fold, operands, tuple(mapped)))
        results = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), results)
        return results, jax.tree.map(lambda _: True, results)

    return foldable
