"""The optimizer step: accumulation, schedules, what decays, what is logged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import configs
from tape_jax import Transformer, positions
from tests.tiny import random_params, tiny, tokens
from train.optimizer import OptimizerConfig, make_optimizer, make_schedule
from train.step import make_state, mean_gradients, train_step, with_positions


def unequal_batch(config, batch=8, length=10):
    """Rows with very different numbers of scored tokens, some with none."""
    ids = tokens(config, batch, length + 1).astype(np.int32)
    weights = np.zeros((batch, length), np.float32)
    for i in range(batch):
        weights[i, : (i * 5) % (length + 1)] = 1
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:], "weights": weights}


@pytest.mark.parametrize("accumulation", [2, 4, 8])
def test_accumulated_is_the_whole_batch(accumulation):
    config = tiny()
    params, batch = random_params(config, scale=0.1), unequal_batch(config)
    model = Transformer(config)

    def gradients(a):
        return jax.jit(lambda p, b: mean_gradients(p, model, b, a))(params, batch)

    loss, grads, (weight, hits, norms) = gradients(1)
    loss_a, grads_a, (weight_a, hits_a, norms_a) = gradients(accumulation)
    np.testing.assert_allclose(loss_a, loss, rtol=1e-6)
    assert (weight_a, hits_a) == (weight, hits) == (batch["weights"].sum(), hits)
    for got, want in zip(jax.tree.leaves(grads_a), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * float(jnp.abs(want).max()) + 1e-7)
    assert norms["position_norm"].shape == norms_a["position_norm"].shape == (3,)


def test_loss_is_the_mean_over_scored_tokens():
    config = tiny()
    params, batch, model = random_params(config), unequal_batch(config), Transformer(config)
    loss, _, _ = mean_gradients(params, model, jax.tree.map(jnp.asarray, batch), 1)
    logits = np.asarray(model.apply({"params": params}, batch["tokens"]), np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_p, batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, (nll * batch["weights"]).sum() / batch["weights"].sum(), 1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules(schedule):
    config = OptimizerConfig(
        learning_rate=2.0, schedule=schedule, warmup_steps=10, final_fraction=0.1
    )
    rate = make_schedule(config, 110)
    np.testing.assert_allclose([rate(0), rate(5), rate(10)], [0.0, 1.0, 2.0], rtol=1e-6)
    middle, end = {
        "cosine": (0.2 + 1.8 * 0.5, 0.2),
        "linear": (1.1, 0.2),
        "constant": (2.0, 2.0),
    }[schedule]
    np.testing.assert_allclose([rate(60), rate(110)], [middle, end], rtol=1e-5)


def test_norms_and_biases_do_not_decay():
    config = tiny(attention_bias=True, position="dape")
    params = random_params(config)
    tx = make_optimizer(OptimizerConfig(warmup_steps=0, weight_decay=0.5, learning_rate=0.1), 10)
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, _ = tx.update(zero, tx.init(params), params)
    for path, update in jax.tree_util.tree_flatten_with_path(updates)[0]:
        moved = bool(jnp.abs(update).max() > 0)
        assert moved == (path[-1].key not in ("scale", "bias", "bias1", "bias2")), path


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learning_rate": 0.0}, "optimizer.learning_rate=0.0"),
        ({"warmup_steps": 10}, r"optimizer.warmup_steps=10 must lie in \[0, steps=10\)"),
        ({"clip_norm": -1.0}, "optimizer.clip_norm=-1.0"),
    ],
)
def test_optimizers_that_cannot_work(fields, message):
    with pytest.raises(ValueError, match=message):
        OptimizerConfig(**{"warmup_steps": 1} | fields).validate(10)


def test_a_step_learns_and_reports():
    config = configs.get("addition-demo")
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, hidden_size=32, intermediate_size=32),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=0, schedule="constant"),
    )
    state = make_state(config, 0)
    source = config.task.source(0)
    batch = jax.tree.map(lambda *rows: jnp.stack(rows), *[source[i] for i in range(16)])
    step = jax.jit(lambda s, b: train_step(s, b, config))
    first = last = None
    for _ in range(40):
        state, last = step(state, batch)
        first = last if first is None else first
    assert float(last["loss"]) < 0.6 * float(first["loss"])
    assert int(state.step) == 40
    assert {*last} == {
        "loss",
        "accuracy",
        "scored_tokens",
        "learning_rate",
        "gradient_norm",
        "update_norm",
        "position_norm",
    }
    np.testing.assert_allclose(first["position_norm"], 1.0, rtol=1e-5)  # RoPE at the start


@dataclasses.dataclass(frozen=True)
class Scattered(positions.RoPE):
    """Draws increasing positions for training."""

    def training_positions(self, key, batch, length):
        return jnp.sort(jax.random.randint(key, (batch, length), 0, 100), axis=-1)


def scattered(**fields):
    model = tiny(position=Scattered(), vocab_size=19)
    return dataclasses.replace(configs.get("addition-demo"), model=model, **fields)


def test_positions_are_drawn_by_seed_and_step():
    batch = {"tokens": jnp.zeros((4, 10), jnp.int32)}

    def drawn(seed, step):
        return np.asarray(with_positions(batch, scattered(seed=seed), jnp.int32(step))["positions"])

    np.testing.assert_array_equal(drawn(0, 5), drawn(0, 5))
    assert (drawn(0, 5) != drawn(0, 6)).any() and (drawn(0, 5) != drawn(1, 5)).any()
    assert len({tuple(row) for row in drawn(0, 5)}) == 4  # every sequence its own
    assert with_positions(batch, configs.get("addition-demo"), jnp.int32(5)) is batch


def test_a_step_trains_on_the_drawn_positions():
    """Its loss is that of the model given them, whole or in micro-batches."""
    config = scattered()
    state, batch = make_state(config, 0), unequal_batch(config.model)
    batch = jax.tree.map(jnp.asarray, batch)
    drawn = with_positions(batch, config, state.step)
    want, _, _ = mean_gradients(state.params, Transformer(config.model), drawn, 1)
    norms = []
    for accumulation in (1, 2):
        config = scattered(accumulation=accumulation)
        _, figures = jax.jit(lambda s, b, c=config: train_step(s, b, c))(state, batch)
        np.testing.assert_allclose(figures["loss"], want, rtol=1e-6)
        norms.append(float(figures["gradient_norm"]))
    np.testing.assert_allclose(norms[0], norms[1], rtol=1e-5)
    plain, _, _ = mean_gradients(state.params, Transformer(config.model), batch, 1)
    assert abs(plain - want) > 1e-6
