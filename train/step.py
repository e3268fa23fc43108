"""The training state and the jitted step: loss as a sum and a weight, divided once."""

import math
from collections.abc import Callable

import flax
import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from tape_jax import Transformer
from tape_jax.sharding import constrain, parameter_shardings
from train.config import TrainConfig
from train.optimizer import make_optimizer, make_schedule

Batch = dict[str, jax.Array]
FROZEN: dict = {}
"""Where every parameter is trained."""


@flax.struct.dataclass
class TrainState:
    """Everything that changes from step to step but the data iterator.

    `params` are those that the config's method trains; the others are no part of the state.
    """

    step: jax.Array
    params: dict
    opt_state: optax.OptState


def split(config: TrainConfig, params: dict) -> tuple[dict, dict]:
    """(trained, frozen) parts of a model's parameters, as the config's method has it."""
    parts = ({}, {})
    for path, leaf in flatten_dict(params, sep="/").items():
        parts[not config.method.trains(path)][path] = leaf
    trained, frozen = (unflatten_dict(part, sep="/") for part in parts)
    return trained, frozen


def join(trained: dict, frozen: dict) -> dict:
    """The parameters of the model from their two parts."""
    return unflatten_dict(flatten_dict(trained) | flatten_dict(frozen))


def init_params(config: TrainConfig, seed: int) -> dict:
    """All parameters of the model, from the seed alone."""
    tokens = jnp.zeros((1, min(config.task.length, 8)), jnp.int32)
    return Transformer(config.model).init(jax.random.key(seed), tokens)["params"]


def start_state(config: TrainConfig, trained: dict) -> TrainState:
    """The state before the first step."""
    tx = make_optimizer(config.optimizer, config.steps)
    return TrainState(jnp.zeros((), jnp.int32), trained, tx.init(trained))


def make_state(config: TrainConfig, seed: int) -> TrainState:
    """A new state: parameters and optimizer, from the seed alone."""
    return start_state(config, split(config, init_params(config, seed))[0])


def abstract_params(config: TrainConfig, mesh: jax.sharding.Mesh) -> dict:
    """Shapes of all parameters of the model, each with its sharding on this mesh."""
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    return _placed(shapes, parameter_shardings(shapes, mesh))


def abstract_state(config: TrainConfig, mesh: jax.sharding.Mesh) -> TrainState:
    """The state's shapes and dtypes, each with the sharding its array has on this mesh."""
    shapes = jax.eval_shape(lambda: make_state(config, 0))
    params = parameter_shardings(shapes.params, mesh)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    tx = make_optimizer(config.optimizer, config.steps)
    opt_state = optax.tree_map_params(
        tx, lambda _, s: s, shapes.opt_state, params, transform_non_params=lambda _: whole
    )
    return _placed(shapes, TrainState(whole, params, opt_state))


def _placed(shapes, shardings):
    def one(x, sharding):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(one, shapes, shardings)


def count_parameters(params) -> int:
    """Numbers in a tree of arrays or shapes."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(params))


def shardings_of(state: TrainState) -> TrainState:
    """Where each array of an (abstract) state lives."""
    return jax.tree.map(lambda x: x.sharding, state)


def loss_sums(params, model: Transformer, batch: Batch, frozen: dict = FROZEN):
    """Summed cross entropy of the scored targets, and (weight, hits, position norms)."""
    logits, collected = model.apply(
        {"params": join(params, frozen)},
        batch["tokens"],
        batch.get("positions"),
        mutable=["metrics"],
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    hits = (logits.argmax(-1) == batch["targets"]) * batch["weights"]
    norms = collected.get("metrics", {})
    return (losses * batch["weights"]).sum(), (batch["weights"].sum(), hits.sum(), norms)


def mean_gradients(
    params, model: Transformer, batch: Batch, accumulation: int, frozen: dict = FROZEN
):
    """Mean loss over all scored targets of the batch, its gradient, and (weight, hits, norms).

    The gradient is that of `params`; `frozen` are the model's other parameters. Sums are
    accumulated over the micro-batches and divided once: micro-batches with different numbers of
    scored targets weigh as one batch would.
    """
    grad = jax.value_and_grad(loss_sums, has_aux=True)
    if accumulation == 1:
        (loss, (weight, hits, norms)), grads = grad(params, model, batch, frozen)
    else:
        # Micro-batch i takes rows i, i + A, ...: each is spread over all devices as the batch is.
        micro = jax.tree.map(
            lambda x: x.reshape(-1, accumulation, *x.shape[1:]).swapaxes(0, 1), batch
        )
        first = jax.tree.map(lambda x: x[0], micro)
        like = jax.eval_shape(lambda b: grad(params, model, b, frozen), first)
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), like)

        def add(total, one):
            return jax.tree.map(jnp.add, total, grad(params, model, one, frozen)), None

        ((loss, (weight, hits, norms)), grads), _ = jax.lax.scan(add, zeros, micro)
        norms = jax.tree.map(lambda x: x / accumulation, norms)
    return loss / weight, jax.tree.map(lambda g: g / weight, grads), (weight, hits, norms)


def with_positions(batch: Batch, config: TrainConfig, step: jax.Array) -> Batch:
    """The batch with the positions its encoding draws for training, if it draws any.

    One draw a step, of a sequence of positions for every row. It depends on the seed and the step
    alone, so a run that is continued draws what it would have drawn.
    """
    key = jax.random.fold_in(jax.random.key(config.seed), step)
    rows, length = batch["tokens"].shape
    drawn = config.model.position.training_positions(key, rows, length)
    return batch if drawn is None else batch | {"positions": constrain(drawn, "batch", "length")}


def train_step(state: TrainState, batch: Batch, config: TrainConfig, frozen: dict = FROZEN):
    """One optimizer step: the new state, and the figures of the step it took."""
    model = Transformer(config.method.training_model(config.model))
    batch = with_positions(batch, config, state.step)
    loss, grads, (weight, hits, norms) = mean_gradients(
        state.params, model, batch, config.accumulation, frozen
    )
    tx = make_optimizer(config.optimizer, config.steps)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    figures = {
        "loss": loss,
        "accuracy": hits / weight,
        "scored_tokens": weight,
        "learning_rate": make_schedule(config.optimizer, config.steps)(state.step),
        "gradient_norm": optax.tree.norm(grads),
        "update_norm": optax.tree.norm(updates),
        **norms,
    }
    params = optax.apply_updates(state.params, updates)
    return TrainState(state.step + 1, params, opt_state), figures


def jit_train_step(config: TrainConfig, state: TrainState) -> Callable:
    """step(state, batch, frozen={}): its new state lives where this one does, in its memory."""

    def step(state, batch, frozen=FROZEN):
        return train_step(state, batch, config, frozen)

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings_of(state), None))
