"""What is here: `python -m tape_jax.info` prints versions, devices, and which attention runs."""

import importlib.metadata
import platform
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import IMPLEMENTATIONS, tape_attention
from pallas_kernels import implementations as attention

PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain"),
    *("jax-triton", "triton", "gguf", "tokenizers", "sentencepiece"),
)
"""Whose versions matter when something does not work."""

SHAPE = (1, 512, 2, 64)
"""Of the call that is tried: batch, tokens, heads, width; bfloat16, causal, with a state."""


def version(package: str) -> str:
    """Of an installed package, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def attention_runs(name: str) -> str:
    """ "runs", when an implementation computes forward and backward here, or why it does not."""
    if attention.platform() not in IMPLEMENTATIONS[name].platforms:
        return f"needs a {' or '.join(IMPLEMENTATIONS[name].platforms)}"

    def loss(*arrays):
        both = tape_attention(*arrays, causal=True, implementation=name)
        return sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(both))

    try:
        jax.block_until_ready(jax.jit(jax.grad(loss))(*[jnp.ones(SHAPE, jnp.bfloat16)] * 4))
    except Exception as error:  # whatever a compiler or driver raises is what was asked for
        return " ".join(str(error).split())[:200]
    return "runs"


def report() -> Iterator[str]:
    """The lines of the command."""
    yield f"tape-jax {version('tape-jax')}, Python {platform.python_version()}"
    yield ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    kinds = [f"{device.platform} ({device.device_kind})" for device in jax.devices()]
    for kind in dict.fromkeys(kinds):
        yield f"{kinds.count(kind)} x {kind}"
    yield f"attention of {SHAPE} in bfloat16, forward and backward:"
    for name in IMPLEMENTATIONS:
        yield f"  {name:<9} {attention_runs(name)}"
    preferred = attention.PREFERENCE[attention.platform()]
    yield f"implementation=None tries {', '.join(preferred)}"


if __name__ == "__main__":
    for line in report():
        print(line)
