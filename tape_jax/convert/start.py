"""New values for some of a model's parameters."""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import unflatten_dict
from jaxtyping import Array

from tape_jax.config import ModelConfig
from tape_jax.model import Transformer
from tape_jax.sharding import parameter_shardings


def flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    """Slash-separated path -> leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


def parameter_shapes(config: ModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Slash-separated path -> shape and dtype, of every parameter."""
    return jax.eval_shape(lambda: _init(config, 0))


def start_missing(
    config: ModelConfig,
    paths: Collection[str],
    *,
    mesh: jax.sharding.Mesh | None = None,
    seed: int = 0,
) -> dict[str, Array]:
    """The parameters at these slash-separated paths as a new model of this seed has them.

    Nothing else of the model is computed or held. With a mesh they lie as `parameter_shardings`
    plans; the values do not depend on it.

    Raises:
      ValueError: a path that the model does not have.
    """
    shapes = parameter_shapes(config)
    for path in paths:
        if path not in shapes:
            raise ValueError(f"parameter {path!r} is none of this model's")
    if not paths:
        return {}
    shardings = plan_shardings({path: shapes[path] for path in paths}, mesh)

    def start():
        every = _init(config, seed)
        return {path: every[path] for path in paths}

    return jax.jit(start, out_shardings=shardings)()


def plan_shardings(shapes: dict, mesh: jax.sharding.Mesh | None) -> dict | None:
    """`parameter_shardings` of a flat dictionary of parameters; None without a mesh."""
    if mesh is None:
        return None
    return flatten(parameter_shardings(unflatten_dict(shapes, sep="/"), mesh))


def _init(config, seed):
    tokens = jnp.zeros((1, 1), jnp.int32)
    return flatten(Transformer(config).init(jax.random.key(seed), tokens)["params"])
