"""Running the Triton kernel on a CPU: Triton's interpreter, on torch tensors, as a JAX callback."""

import functools
import importlib.util
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import triton

torch = pytest.importorskip("torch")
pytest.importorskip("jax_triton")
tl = pytest.importorskip("triton.language")
knobs = pytest.importorskip("triton.knobs")
interpreter = pytest.importorskip("triton.runtime.interpreter")

MARGIN = 1 << 14
"""Poisoned elements before and after every array: more than a small tile can stray."""


def install(monkeypatch):
    """Makes implementation "triton" run its kernel here."""
    monkeypatch.setattr(triton, "launch", launch)


def launch(*arrays, out_shape, grid, num_warps, num_stages, **constants):
    """What `pallas_kernels.triton.launch` does, by interpretation."""
    del num_warps, num_stages

    def run(*arrays):
        inputs = [_poisoned(np.asarray(x)) for x in arrays]
        outputs = [_poisoned(np.full(x.shape, np.nan, x.dtype)) for x in out_shape]
        builder = interpreter.InterpreterBuilder
        with mock.patch.multiple(tl, **REDUCTIONS), mock.patch.multiple(builder, **REPAIRS):
            _kernel()[grid](*(inside for _, inside in (*inputs, *outputs)), **constants)
        for whole, _ in outputs:
            assert whole[:MARGIN].isnan().all() and whole[-MARGIN:].isnan().all()
        return [_numpy(inside, x.dtype) for (_, inside), x in zip(outputs, out_shape, strict=True)]

    return jax.pure_callback(run, out_shape, *arrays)


@functools.cache
def _kernel():
    """A second copy of the kernel's module, interpreted, beside the one that compiles."""
    name = "pallas_kernels.triton_kernel"
    spec = importlib.util.spec_from_file_location(name, importlib.util.find_spec(name).origin)
    module = importlib.util.module_from_spec(spec)
    with knobs.runtime.scope():
        knobs.runtime.interpret = True
        spec.loader.exec_module(module)
    # As plain Python: called its own way, each would patch all of Triton's language once more.
    for part in ("_exist", "_place", "_load", "_store"):
        setattr(module, part, getattr(module, part).rewrite())
    return module.forward_kernel


def _reduction(combine):
    return lambda x, axis: tl.reduce(x, axis, combine)


# Triton's own library was compiled, not interpreted, when it was imported.
REDUCTIONS = {
    "max": _reduction(tl.standard._elementwise_max),
    "sum": _reduction(tl.standard._sum_combine),
}


def _numbers(handle):
    """The array behind a handle; the interpreter keeps bfloat16 as its bits."""
    return handle.data.view(jnp.bfloat16) if handle.dtype.scalar == tl.bfloat16 else handle.data


def _dot(self, a, b, total, *_):
    a, b = (_numbers(x).astype(np.float32) for x in (a, b))
    return interpreter.TensorHandle(a @ b + total.data, tl.float32)


def _cast(self, x, to):
    """Rounds to the nearest bfloat16 as a GPU does, where the interpreter would cut bits off."""
    bits = to.scalar == tl.bfloat16
    data = _numbers(x).astype(jnp.bfloat16 if bits else interpreter._get_np_dtype(to))
    return interpreter.TensorHandle(data.view(np.uint16) if bits else data, to.scalar)


REPAIRS = {"create_dot": _dot, "cast_impl": _cast}


def _poisoned(x):
    """A flat tensor and, among what must never be read, the part of it that holds x."""
    dtype = getattr(torch, x.dtype.name)
    poison = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    whole = torch.full((x.size + 2 * MARGIN,), poison, dtype=dtype)
    inside = whole[MARGIN : MARGIN + x.size]
    inside.copy_(torch.from_numpy(x.reshape(-1).view(np.uint8).copy()).view(dtype))
    return whole, inside.view(x.shape)


def _numpy(tensor, dtype):
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    return flat.numpy().view(dtype).reshape(tensor.shape)
