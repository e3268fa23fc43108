"""What a model costs, counted and not run: parameters, operations, position state, memory.

Programs are lowered for the CPU, whatever this machine has, and their figures taken from the
compiler's own analyses; the caller compiles, with `OPTIONS`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels import IMPLEMENTATIONS
from pallas_kernels.implementations import Implementation, registered
from tape_jax import ModelConfig, Transformer

OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Compiler options for a program that nobody runs: LLVM's share is least, the figures the same."""


@functools.cache
def _parameters(config):
    """Shapes, which no length changes."""
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    return jax.eval_shape(Transformer(config).init, jax.random.key(0), token)


def _abstract(config, length):
    """A model, with the shapes of its parameters and of one row of tokens."""
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    return Transformer(config), _parameters(config), tokens


def _lowered(function, *arguments) -> jax.stages.Lowered:
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(function).lower(*arguments)


def parameters(config: ModelConfig) -> int:
    """Numbers the model learns."""
    return sum(leaf.size for leaf in jax.tree.leaves(_parameters(config)))


def forward(config: ModelConfig, length: int) -> jax.stages.Lowered:
    """The forward pass of one sequence, unrolled.

    With `config.attention="reference"` every product is written out, so that the cost analysis
    counts it; a loop over tiles would count once.
    """
    model, params, tokens = _abstract(dataclasses.replace(config, scan_layers=False), length)
    return _lowered(model.apply, params, tokens)


def backward(config: ModelConfig, length: int) -> jax.stages.Lowered:
    """The gradient of the sum of all logits of one sequence, unrolled."""
    model, params, tokens = _abstract(dataclasses.replace(config, scan_layers=False), length)
    total = lambda params, tokens: model.apply(params, tokens).sum()  # noqa: E731
    return _lowered(jax.grad(total), params, tokens)


def state(config: ModelConfig, length: int) -> jax.ShapeDtypeStruct | None:
    """The position state of one sequence between two layers; None where there is none."""
    model, params, tokens = _abstract(dataclasses.replace(config, num_layers=1), length)

    def kept(params, tokens):
        return model.apply(params, tokens, mutable=["intermediates"])[1]["intermediates"]

    states = jax.eval_shape(kept, params, tokens).get("position_states")
    return None if states is None else jax.ShapeDtypeStruct(states.shape[1:], states.dtype)


def state_bytes(config: ModelConfig) -> int:
    """Bytes of position state that a token carries from layer to layer."""
    found = state(config, 1)
    return 0 if found is None else found.size * found.dtype.itemsize


def implementations(config: ModelConfig) -> list[str]:
    """The attention implementations that refuse none of the model's calls in bfloat16."""
    able = dict(IMPLEMENTATIONS)
    written_out = able["reference"]

    def attend(*arrays, **arguments):
        for name, one in IMPLEMENTATIONS.items():
            if one.refusal(*arrays, **arguments) is not None:
                able.pop(name, None)
        return written_out.attend(*arrays, **arguments)

    with registered("reference", Implementation(attend)):
        config = dataclasses.replace(config, attention="reference", dtype="bfloat16")
        model, params, tokens = _abstract(dataclasses.replace(config, num_layers=2), 256)
        jax.eval_shape(model.apply, params, tokens)
    return list(able)
