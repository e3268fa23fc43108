"""Small models with weights in general position, for tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from tape_jax import ModelConfig, Transformer


def mostly_slow(values, quick):
    """Parameters, of which only some run in a quick round."""

    def param(x):
        marks = () if x in quick else pytest.mark.slow
        return pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=marks)

    return [param(x) for x in values]


def tiny(**fields) -> ModelConfig:
    sizes = {
        "vocab_size": 31,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": 3,
        "num_heads": 4,
    }
    return ModelConfig(**sizes | {"position": "tape"} | fields)


@functools.cache
def _shapes(config: ModelConfig):
    init, ids = Transformer(config).init, jnp.zeros((1, 2), jnp.int32)
    return jax.eval_shape(init, jax.random.key(0), ids)["params"]


def random_params(config: ModelConfig, seed: int = 0, scale: float = 0.3):
    """Every parameter drawn anew: what starts at zero must not hide a fault."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        center = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(rng.normal(center, scale, leaf.shape), jnp.float32)

    return jax.tree_util.tree_map_with_path(draw, _shapes(config))


def without_adapters(params):
    """The parameters less LoRA's."""
    flat = flatten_dict(params)
    return unflatten_dict({k: x for k, x in flat.items() if not k[-1].startswith("lora_")})


def tokens(config: ModelConfig, batch: int = 2, length: int = 12, seed: int = 0):
    return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, length))


@functools.partial(jax.jit, static_argnames="config")
def logits(config, params, ids, **inputs):
    """Logits of one call."""
    return Transformer(config).apply({"params": params}, ids, **inputs)


@functools.partial(jax.jit, static_argnames="config")
def run(config, params, ids, **inputs):
    """Logits, hidden states (L+1, B, N, C) and position states (L+1, B, N, K, S) of one call."""
    logits, kept = Transformer(config).apply(
        {"params": params}, ids, mutable=["intermediates"], **inputs
    )
    kept = kept["intermediates"]
    return logits, kept["hidden_states"], kept.get("position_states")
