"""What methods make of a model, which weights they train, and what a step costs then."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from configs.llama import LLAMA2_7B
from tape_jax import Transformer, positions
from tests.tiny import mostly_slow, random_params, tiny, tokens
from tests.train.small import small
from train import methods
from train.config import TrainConfig, from_dict, to_dict
from train.step import (
    count_parameters,
    init_params,
    join,
    mean_gradients,
    split,
    start_state,
    train_step,
)

EVERY = [*methods.METHODS, *methods.VARIANTS]
ROPE = tiny(position="rope", num_kv_heads=2)


def run_of(method, base=ROPE, **fields) -> TrainConfig:
    method = methods.get(method) if isinstance(method, str) else method
    model = method.adapt(base)
    return small(model=model, method=method, **fields)


def batch(rows=4, length=16):
    ids = tokens(ROPE, rows, length + 1).astype(np.int32)
    return {
        "tokens": ids[:, :-1],
        "targets": ids[:, 1:],
        "weights": np.ones((rows, length), np.float32),
    }


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        # The TAPE paper's Llama-2-7B: P = 128, so 128*32 + 4096*128 + 32*128 in each of 32 layers.
        (methods.TapeMethod(), 17_039_360 + 32 * 32 * 32),  # and the (K, H) matrices
        # The published script: position MLP, embeddings, norms.
        (methods.TapeMethod(reading="official"), 17_039_360 + 32_000 * 4096 + 65 * 4096),
        (methods.LoraMethod(), 8_388_608),
        (methods.get("longlora"), 8_388_608 + 32_000 * 4096 + 65 * 4096),
        (methods.get("yarn"), 8_388_608),
        (methods.Full(), 6_738_415_616),
    ],
)
def test_trained_numbers_of_llama_2_7b(method, expected):
    config = run_of(method, LLAMA2_7B)
    shapes = jax.eval_shape(lambda: init_params(config, 0))
    trained, frozen = split(config, shapes)
    assert count_parameters(trained) == expected
    assert count_parameters(frozen) == count_parameters(shapes) - expected
    optimizer = jax.eval_shape(lambda p: start_state(config, p), trained).opt_state
    moments = [x for x in jax.tree.leaves(optimizer) if x.ndim > 0]
    assert sum(x.size * x.dtype.itemsize for x in moments) == 2 * 4 * expected


def test_position_mlp_of_the_paper():
    """17,039,360 without the matrices after the attention (papers.md 1.2)."""
    config = run_of(methods.TapeMethod(), LLAMA2_7B)
    own = jax.eval_shape(lambda: init_params(config, 0))["layers"]["position"]
    assert own["w1"].shape == (32, 128, 32) and own["gate"]["kernel"].shape == (32, 4096, 128)
    mlp = {"w1": own["w1"], "w2": own["w2"], "gate": own["gate"]}
    assert count_parameters(mlp) == 17_039_360


@pytest.mark.parametrize("name", mostly_slow(EVERY, quick=["tape", "longlora"]))
def test_only_trained_weights_move(name):
    config = run_of(name)
    params = random_params(config.model, scale=0.2)
    trained, frozen = split(config, params)
    step = jax.jit(lambda s, b, f: train_step(s, b, config, f))
    state, figures = step(start_state(config, trained), batch(), frozen)
    state, figures = step(state, batch(), frozen)  # the first has a learning rate of zero
    assert np.isfinite(float(figures["loss"]))
    assert jax.tree.structure(state.params) == jax.tree.structure(trained)
    for path, (new, old) in jax.tree_util.tree_leaves_with_path(
        jax.tree.map(lambda a, b: (a, b), state.params, trained), is_leaf=lambda x: type(x) is tuple
    ):
        assert np.abs(new - old).max() > 0, path
    whole = join(state.params, frozen)
    assert jax.tree.structure(whole) == jax.tree.structure(params)


@pytest.mark.parametrize("name", EVERY)
def test_the_optimizer_keeps_two_numbers_for_each_trained_one(name):
    config = run_of(name)
    trained, frozen = split(config, jax.eval_shape(lambda: init_params(config, 0)))
    assert bool(jax.tree.leaves(frozen)) == (name not in ("full", "scratch"))
    state = jax.eval_shape(functools.partial(start_state, config), trained)
    kept, weights = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree) if x.ndim)
        for tree in (state.opt_state, trained)
    )
    assert kept == 2 * weights > 0


@pytest.mark.parametrize("name", mostly_slow(["tape", "lora", "longlora"], quick=["tape"]))
def test_gradients_are_those_of_the_whole_model(name):
    """The trained part of the full gradient, though the rest is never computed."""
    config = run_of(name)
    params = random_params(config.model, scale=0.2)
    trained, frozen = split(config, params)
    model = Transformer(config.method.training_model(config.model))
    whole, _ = split(config, mean_gradients(params, model, batch(), 1)[1])
    grads = mean_gradients(trained, model, batch(), 2, frozen)[1]
    for got, want in zip(jax.tree.leaves(grads), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(np.abs(want).max()) + 1e-7)


@pytest.mark.parametrize(("scan", "remat"), [(True, "none"), (False, "none"), (True, "full")])
@pytest.mark.parametrize("name", ["tape", "lora"])
def test_no_gradient_of_a_frozen_weight_is_computed(name, scan, remat):
    """No product in the compiled program has a frozen weight's shape, where full training has it.

    A weight's gradient is a product over batch and length with the weight's shape; sizes are chosen
    so that no activation has it.
    """
    base = tiny(position="rope", intermediate_size=56, vocab_size=29, scan_layers=scan, remat=remat)

    def products(config):
        params = jax.eval_shape(lambda: init_params(config, 0))
        trained, frozen = split(config, params)
        model = Transformer(config.model)
        grad = jax.jit(lambda p, b, f: mean_gradients(p, model, b, 1, f)[1])
        text = grad.lower(trained, batch(3, 11), frozen).compile().as_text()
        shapes = re.findall(r"f32\[([\d,]+)\]\S* dot\(", text)
        return {tuple(sorted(int(n) for n in shape.split(","))) for shape in shapes}

    weights = {(32, 32), (32, 56)}
    assert products(run_of("full", base)) >= weights
    assert not products(run_of(name, base)) & weights


@pytest.mark.parametrize("name", EVERY)
def test_methods_survive_json(name):
    config = run_of(name)
    assert from_dict(TrainConfig, to_dict(config)) == config


def test_what_methods_make_of_positions():
    long = positions.LinearScaling(4.0)
    stretched = dataclasses.replace(ROPE, position=positions.RoPE(base=5e5, scaling=long))
    adapt = lambda method, base=ROPE: method.adapt(base).position  # noqa: E731
    assert adapt(methods.get("theta")) == positions.RoPE(base=1e6)
    assert adapt(methods.get("pi")) == positions.RoPE(scaling=positions.LinearScaling(2.0))
    assert adapt(methods.Full(), stretched) == stretched.position
    tape = adapt(methods.TapeMethod(), stretched)
    assert tape == positions.Tape(base=5e5, scaling=long)
    official = adapt(methods.TapeMethod(reading="official", width=6))
    assert (official.post, official.zero, official.width) == ("scalar", "w1", 6)
    again = dataclasses.replace(ROPE, position=official)
    assert adapt(methods.TapeMethod(), again) == official
    theta = methods.get("theta-linear")
    assert adapt(theta) == positions.RoPE(base=1e6, scaling=positions.LinearScaling(2.0))
    assert methods.LoraMethod().stretched_like(theta) == methods.LoraMethod(
        base=1e6, scaling=positions.LinearScaling(2.0)
    )
    assert methods.get("yarn").stretched_like(theta) == methods.get("yarn")
    assert methods.get("longlora").training_model(ROPE).shifted_groups == 4
    assert methods.get("longlora").adapt(ROPE).shifted_groups is None


@pytest.mark.parametrize(
    ("method", "base", "message"),
    [
        (methods.get("pi"), {"position": positions.RoPE(scaling=positions.LinearScaling(3.0))},
         "would replace the scaling 'linear'"),
        (methods.get("theta"), {"position": "alibi"}, "changes rotations, .* 'alibi'"),
        (methods.TapeMethod(), {"position": "fire"}, "changes rotations, .* 'fire'"),
        (methods.TapeMethod(), {"position": "xpos"}, "starts from plain rotations .* 'xpos'"),
        (methods.TapeMethod(width=3), {"position": positions.Tape(width=5)}, "method.width=3"),
        (methods.LoraMethod(), {"lora": methods.LoRA()}, "already has low-rank updates"),
        (methods.LoraMethod(also=("head",)), {"tie_embeddings": True}, "use 'embeddings'"),
    ],
)  # fmt: skip
def test_models_that_a_method_cannot_change(method, base, message):
    with pytest.raises(ValueError, match=message):
        method.adapt(dataclasses.replace(ROPE, **base))


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (methods.LoraMethod(rank=0), "lora.rank=0"),
        (methods.LoraMethod(also=("embedings",)), "did you mean embeddings"),
        (methods.Method(base=3.0), "'scratch' changes nothing"),
        (methods.TapeMethod(reading="papers"), "did you mean paper"),
    ],
)
def test_methods_that_cannot_be(method, message):
    with pytest.raises(ValueError, match=message):
        method.validate(16)


def test_rows_that_groups_do_not_fit():
    config = run_of("longlora")
    with pytest.raises(
        ValueError, match=r"method.groups=4 .* rows of \d+ tokens: use rows of a mu"
    ):
        dataclasses.replace(config, task=small().task).validate()


def test_names_of_methods():
    with pytest.raises(ValueError, match="did you mean longlora or lora"):
        methods.get("longlra")
