"""The implementations of position-aware attention by name, and the choice among them."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array

from pallas_kernels import chunked, cudnn, gpu, reference, tpu, triton


@dataclasses.dataclass(frozen=True)
class Implementation:
    """One way to compute attention.

    Attributes:
      attend: (q, k, v, e, *, causal, order, segment_ids, scale, score_mod) -> (out, mixed, lse),
        where order and segment_ids are (query, key) pairs or None, and lse, the log-sum-exp
        (B, Nq, H), is None where a library keeps it to itself.
      platforms: JAX platforms it runs on.
      refusal: the same arguments -> what it cannot honour, or None.
    """

    attend: Callable[..., tuple[Array, Array | None, Array | None]]
    platforms: Sequence[str] = ("cpu", "gpu", "tpu")
    refusal: Callable[..., str | None] = lambda *_, **__: None


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "reference": Implementation(reference.reference),
    "xla": Implementation(chunked.chunked, refusal=chunked.refusal),
    "pallas": Implementation(gpu.fused, ("gpu",), gpu.refusal),
    "triton": Implementation(triton.fused, ("gpu",), triton.refusal),
    "cudnn": Implementation(cudnn.one_call, ("gpu",), cudnn.refusal),
    "tpu": Implementation(tpu.splashed, ("tpu",), tpu.refusal),
}
"""Every implementation by name.

reference: the contract, in plain jnp; memory grows with the square of the length.
xla: tile by tile, linear memory, any shape and platform, any score_mod but those of whole rows.
pallas: our kernels for NVIDIA GPUs, forward and backward.
triton: the same forward in Triton's own language, through jax-triton.
cudnn: one call of cuDNN's attention; no segments.
tpu: JAX's splash attention.
"""


@contextlib.contextmanager
def registered(name: str, implementation: Implementation) -> Iterator[str]:
    """While the context lasts, one implementation more, or in place of another; gives its name.

    For measurements: what was traced within keeps it.
    """
    every = cast(dict[str, Implementation], IMPLEMENTATIONS)
    before = every.get(name)
    every[name] = implementation
    try:
        yield name
    finally:
        if before is None:
            del every[name]
        else:
            every[name] = before


PREFERENCE = {"gpu": ("pallas", "xla"), "tpu": ("tpu", "xla"), "cpu": ("xla",)}
"""What implementation=None tries, in order; what they all refuse is left to "reference"."""


def platform() -> str:
    """Where JAX computes unless told otherwise: "cpu", "gpu" or "tpu"."""
    # A device, its platform's name, or None.
    device = getattr(jax.config, "jax_default_device", None)
    return getattr(device, "platform", device) or jax.default_backend()


def first_that_compiles(names: Sequence[str], arrays, arguments) -> str:
    """The first of `names` that honours the call and compiles here, forward and backward.

    The last of those that honour it is taken on trust, and "reference" where none does. A failure
    is logged, once per implementation and signature.
    """
    able = [n for n in names if IMPLEMENTATIONS[n].refusal(*arrays, **arguments) is None]
    for name in able[:-1]:
        if _compiles(name, _signature(arrays, arguments)):
            return name
    return able[-1] if able else "reference"


def _signature(arrays, arguments):
    """What the compilation of a call depends on, hashable."""
    shapes = tuple(None if x is None else (x.shape, x.dtype.name) for x in arrays)
    given = tuple(
        (name, tuple(x.shape for x in arguments[name]), arguments[name][0] is arguments[name][1])
        for name in ("order", "segment_ids")
        if arguments[name] is not None
    )
    # What kernels know by its kind is a tree of arrays; they refuse other score modifiers.
    mod = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments["score_mod"])
    return shapes, given, mod, arguments["causal"], arguments["scale"]


@functools.cache
def _compiles(name, signature) -> bool:
    # In a thread of its own: the caller may be within a trace, a mesh or a shard_map.
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        try:
            pool.submit(_compile, IMPLEMENTATIONS[name].attend, *signature).result()
        except Exception as error:  # whatever the compiler raises, there is another way
            logging.getLogger(__name__).warning(
                "attention implementation %r does not compile here, taking the next: %s",
                name,
                error,
            )
            return False
    return True


def _compile(attend, shapes, given, score_mod, causal, scale) -> None:
    """Compiles forward and backward of a call with this signature, for the default device."""
    arrays: list[Any] = [None if x is None else jax.ShapeDtypeStruct(*x) for x in shapes]
    pairs = {
        name: [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (sides[:1] if one else sides)]
        for name, sides, one in given
    }

    def loss(arrays, pairs, score_mod):
        both = {name: (sides[0], sides[-1]) for name, sides in pairs.items()}
        out, mixed, _ = attend(
            *arrays,
            **{"order": None, "segment_ids": None, "causal": causal, "scale": scale} | both,
            score_mod=score_mod,
        )
        return sum(x.astype(jnp.float32).sum() for x in (out, mixed) if x is not None)

    jax.jit(jax.grad(loss)).lower(arrays, pairs, score_mod).compile()
