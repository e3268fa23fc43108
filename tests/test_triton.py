"""The Triton kernel: compiled for a GPU that is not here, and interpreted against float64."""

import importlib
import subprocess
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from jaxlib.mlir import ir

from pallas_kernels import triton
from pallas_kernels.reference import LOWEST, attention_mask, reference
from tests.kernels_on_cpu import run_on_cpu
from tests.target import device
from tests.test_attention import relative_rms, truth
from train import targets

PLAIN = {"causal": True, "order": None, "segment_ids": None, "score_mod": None}


# --- Compiling for a GPU that is not here ---------------------------------------------------------


@pytest.fixture(scope="module")
def on_h200():
    """A sharding on one H200."""
    pytest.importorskip("jax_triton")
    return SingleDeviceSharding(device("h200"))


def lower(sharding, width, dtype, n=200, segments=False):
    """The forward kernel of a causal call, ragged and with grouped queries."""
    shape = lambda *s, dtype=dtype: jax.ShapeDtypeStruct(s, dtype, sharding=sharding)  # noqa: E731
    q, kv, ids = shape(1, n, 4, width), shape(1, n, 2, width), shape(1, n, dtype=jnp.int32)

    def f(q, k, v, e, ids):
        pair = {"segment_ids": (ids, ids)} if segments else {}
        return triton.fused(q, k, v, e, scale=0.1, **PLAIN | pair)

    return targets.lower("h200", f, q, kv, kv, kv, ids)


def ptx(lowered):
    """The assembly that the program carries for its Triton kernel."""
    found = []

    def visit(op):
        if "triton_kernel_call" in str(op.attributes.get("call_target_name", "")):
            found.append(op.attributes["backend_config"].value_bytes)
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    (config,) = found
    return zlib.decompress(config)


@pytest.mark.aot
@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_compiles_for_an_h200(on_h200, width, segments):
    lowered = lower(on_h200, width, jnp.bfloat16, segments=segments)
    assert b"wgmma.mma_async" in ptx(lowered)
    assert "triton_kernel_call" in lowered.compile().as_text()


@pytest.mark.aot
@pytest.mark.parametrize("width", [16, 32, 48, 72, 80, 96])
def test_lowers_at_every_width(on_h200, width):
    assert b"wgmma.mma_async" in ptx(lower(on_h200, width, jnp.bfloat16))


@pytest.mark.aot
def test_float32_is_not_rounded(on_h200):
    assert b"tf32" not in ptx(lower(on_h200, 32, jnp.float32))


# --- Its numbers, by Triton's interpreter ---------------------------------------------------------


@pytest.fixture
def fused(monkeypatch):
    run_on_cpu("triton", monkeypatch)
    return triton.fused


def inputs(n_q, n_k, heads=(4, 2), widths=(16, 16, 16), dtype=jnp.float32):
    """q, k, v, e of these numbers of rows, (query, key) heads and widths of head, v and e."""
    rng = np.random.default_rng(0)
    shapes = [(n_q, heads[0], widths[0]), *[(n_k, heads[1], w) for w in (widths[0], *widths[1:])]]
    return [jnp.asarray(rng.normal(size=(2, *shape)), dtype) for shape in shapes]


def exact(q, k, v, e, *, scale, causal, order, segment_ids, score_mod):
    """out, mixed and the log-sum-exp, in float64."""
    del score_mod
    mask = attention_mask(causal, order, segment_ids, q.shape[1], k.shape[1])
    mask = np.ones((1, q.shape[1], k.shape[1]), bool) if mask is None else np.asarray(mask)[:, 0]
    none = np.zeros((*q.shape[:3], 1))
    return truth(q, k, v, e, mask, scale, none, none)[0]


def packed(n, low=-1):
    """Rising segment ids, different by row; negative ones are padding."""
    ids = jnp.asarray(np.sort(np.random.default_rng(1).integers(low, 3, (2, n))), jnp.int32)
    return ids, ids


def cache(n_q, n_k):
    """Pairs of positions: the last queries of a cache filled in part, one before every key."""
    q = np.arange(n_q)[None] + np.array([[n_k // 2], [3]])
    q[:, 1] = -1
    return jnp.asarray(q, jnp.int32), jnp.asarray(np.arange(n_k)[None].repeat(2, 0), jnp.int32)


CASES = {
    "whole tiles": (inputs(64, 64), {}),
    "ragged": (inputs(65, 65), {}),
    "one": (inputs(1, 1), {}),
    "more keys, not causal": (inputs(7, 70), {"causal": False}),
    "more queries": (inputs(70, 20), {}),
    "segments": (inputs(70, 70), {"segment_ids": packed(70)}),
    "segments, not causal": (inputs(70, 70), {"segment_ids": packed(70), "causal": False}),
    "cache": (inputs(5, 90), {"order": cache(5, 90)}),
    "one key head": (inputs(40, 40, heads=(3, 1)), {}),
    "padded widths": (inputs(40, 40, widths=(24, 40, 8)), {}),
    "padded widths, segments": (
        inputs(40, 40, widths=(24, 40, 8)),
        {"segment_ids": packed(40, low=0)},
    ),
    "bfloat16": (inputs(65, 65, dtype=jnp.bfloat16), {}),
    "float16": (inputs(65, 65, dtype=jnp.float16), {"segment_ids": packed(65)}),
}


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernel(fused, case):
    arrays, given = CASES[case]
    arguments = PLAIN | {"scale": 0.3} | given
    want = exact(*arrays, **arguments)
    got = jax.jit(lambda *a: fused(*a, **arguments))(*arrays)
    limit = 2e-6 if arrays[0].dtype == jnp.float32 else 5e-3
    read = want[2] > LOWEST
    np.testing.assert_array_equal(np.asarray(got[2])[~read], LOWEST)
    assert relative_rms(np.asarray(got[2])[read], want[2][read]) < 2e-6
    for ours, theirs in zip(got[:2], want[:2], strict=True):
        assert ours.dtype == arrays[0].dtype
        assert relative_rms(ours, theirs) < limit
        assert (np.asarray(ours)[~read] == 0.0).all()


def test_without_states(fused):
    q, k, v, _ = inputs(40, 40)
    out, mixed, lse = fused(q, k, v, None, scale=0.3, **PLAIN)
    want = reference(q, k, v, None, scale=0.3, **PLAIN)[0]
    assert mixed is None and np.isfinite(lse).all()
    assert relative_rms(out, np.asarray(want, np.float64)) < 2e-6


def test_a_mapped_axis_folds_into_the_batch(fused):
    """Of queries and segments, or of queries alone: what does not vary is repeated."""
    q, k, v, e = inputs(20, 20, heads=(2, 1))
    many = jnp.stack([q, 2 * q])
    ids = jnp.stack([packed(20)[0], packed(20, low=0)[0]])

    def one(q, ids):
        return fused(q, k, v, e, scale=0.3, **PLAIN | {"segment_ids": (ids, ids)})

    for axis, all_ids in ((0, ids), (None, ids[1])):
        mapped = jax.vmap(one, in_axes=(0, axis))(many, all_ids)
        alone = [one(x, all_ids if axis is None else all_ids[i]) for i, x in enumerate(many)]
        for got, want in zip(mapped, zip(*alone, strict=True), strict=True):
            np.testing.assert_array_equal(got, np.stack(want))


# --- Without the packages -------------------------------------------------------------------------


def test_the_package_imports_none_of_them():
    code = "import pallas_kernels, sys; print({'triton', 'jax_triton', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax_triton", None)
    reason = triton.refusal(*inputs(4, 4), scale=0.3, **PLAIN)
    assert 'pip install "tape-jax[triton]"' in reason
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    assert triton.refusal(*inputs(4, 4), scale=0.3, **PLAIN) is None
