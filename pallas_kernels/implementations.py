"""The implementations of position-aware attention by name, and the choice among them."""

import concurrent.futures
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels import chunked, cudnn, gpu, reference, tpu, triton

ScoreMod = Callable[[Float[Array, "B H Nq Nk"], Int[Array, " Nq"], Int[Array, " Nk"]], Array]
"""Maps scaled scores to scores, given the query and key *indices* the tile covers."""


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
    "xla": Implementation(chunked.chunked),
    "pallas": Implementation(gpu.fused, ("gpu",), gpu.refusal),
    "triton": Implementation(triton.fused, ("gpu",), triton.refusal),
    "cudnn": Implementation(cudnn.one_call, ("gpu",), cudnn.refusal),
    "tpu": Implementation(tpu.splashed, ("tpu",), tpu.refusal),
}
"""Every implementation by name.

reference: the contract, in plain jnp; memory grows with the square of the length.
xla: tile by tile, linear memory, any shape and platform; the only tiled one that takes a score_mod.
pallas: our kernels for NVIDIA GPUs, forward and backward.
triton: the same forward in Triton's own language, through jax-triton.
cudnn: one call of cuDNN's attention; no segments.
tpu: JAX's splash attention.
"""

PREFERENCE = {"gpu": ("pallas", "xla"), "tpu": ("tpu", "xla"), "cpu": ("xla",)}
"""What implementation=None tries, in order; the last of each honours everything."""


def platform() -> str:
    """Where JAX computes unless told otherwise: "cpu", "gpu" or "tpu"."""
    # A device, its platform's name, or None.
    device = getattr(jax.config, "jax_default_device", None)
    return getattr(device, "platform", device) or jax.default_backend()


def first_that_compiles(names: Sequence[str], arrays, arguments) -> str:
    """The first of `names` that honours the call and compiles here, forward and backward.

    The last is taken on trust. A failure is logged, once per implementation and signature.
    """
    for name in names[:-1]:
        if IMPLEMENTATIONS[name].refusal(*arrays, **arguments) is None and _compiles(
            name, _signature(arrays, arguments)
        ):
            return name
    return names[-1]


def _signature(arrays, arguments):
    """What the compilation of a call depends on, hashable."""
    shapes = tuple(None if x is None else (x.shape, x.dtype.name) for x in arrays)
    given = tuple(
        (name, tuple(x.shape for x in arguments[name]), arguments[name][0] is arguments[name][1])
        for name in ("order", "segment_ids")
        if arguments[name] is not None
    )
    return shapes, given, arguments["causal"], arguments["scale"]


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


def _compile(attend, shapes, given, causal, scale) -> None:
    """Compiles forward and backward of a call with this signature, for the default device."""
    arrays: list[Any] = [None if x is None else jax.ShapeDtypeStruct(*x) for x in shapes]
    pairs = {
        name: [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in (sides[:1] if one else sides)]
        for name, sides, one in given
    }

    def loss(arrays, pairs):
        both = {name: (sides[0], sides[-1]) for name, sides in pairs.items()}
        out, mixed, _ = attend(
            *arrays,
            **{"order": None, "segment_ids": None, "causal": causal, "scale": scale} | both,
            score_mod=None,
        )
        return sum(x.astype(jnp.float32).sum() for x in (out, mixed) if x is not None)

    jax.jit(jax.grad(loss)).lower(arrays, pairs).compile()
