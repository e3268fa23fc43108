"""The parts of a Llama block that know nothing of positions."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tape_jax.config import ModelConfig
from tape_jax.lora import AdaptedDense
from tape_jax.sharding import constrain


def norm(config: ModelConfig, name: str) -> nn.RMSNorm:
    """x / rms(x) * scale, in float32 inside."""
    return nn.RMSNorm(epsilon=config.norm_eps, dtype=jnp.dtype(config.dtype), name=name)


def linear(
    config: ModelConfig, features: int, name: str, *, bias: bool = False, **fields
) -> nn.Dense:
    """A projection: kernel (in, out), N(0, initializer_range^2), in the compute dtype.

    With `config.lora` those that it targets have its update.
    """
    kind = nn.Dense
    if config.lora is not None and config.lora.adapts(name):
        kind = functools.partial(AdaptedDense, lora=config.lora)
    return kind(
        features,
        use_bias=bias,
        dtype=jnp.dtype(config.dtype),
        kernel_init=nn.initializers.normal(config.initializer_range),
        name=name,
        **fields,
    )


class MLP(nn.Module):
    """down(silu(gate x) * up x)."""

    config: ModelConfig

    @nn.compact
    def __call__(self, x: Float[Array, "B N C"]) -> Float[Array, "B N C"]:
        """Applies the gated MLP to every token."""
        config, bias = self.config, self.config.mlp_bias
        gate = linear(config, config.intermediate_size, "gate", bias=bias)(x)
        up = linear(config, config.intermediate_size, "up", bias=bias)(x)
        inner = constrain(jax.nn.silu(gate) * up, "batch", "length", "mlp")
        return linear(config, config.hidden_size, "down", bias=bias)(inner)
