"""ModelConfig and the model's own checks: bad input is named, with what would do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, Transformer, positions
from tests.tiny import logits, random_params, tiny, tokens


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 5}, r"hidden_size=32 .*num_heads=5: use 1, 2, 4, 8, 16, 32"),
        ({"num_kv_heads": 3}, r"num_kv_heads=3 must divide model.num_heads=4: use 1, 2, 4"),
        ({"head_dim": 7}, r"head_dim=7 must be even"),
        ({"num_layers": 0}, r"model.num_layers=0 must be >= 1"),
        ({"vocab_size": -1}, r"model.vocab_size=-1"),
        ({"remat": "ful"}, r"unknown model.remat 'ful'; did you mean full"),
        ({"attention": "refrence"}, r"unknown model.attention .* did you mean reference"),
        ({"dtype": "bf16"}, r"unknown model.dtype 'bf16'; did you mean bfloat16"),
        ({"position": "tap"}, r"did you mean tape"),
        ({"position": positions.Tape(post="ful")}, r"unknown position.post 'ful'"),
        ({"position": positions.Tape(width=0)}, r"position.width=0"),
        ({"position": positions.Tape(block=(3, 2))}, r"L=3 must divide model.head_dim=8"),
        ({"position": positions.Tape(block=(2, 3))}, r"R=3 must be even"),
        ({"position": positions.RoPE(base=0.5)}, r"position.base=0.5 must be > 1"),
    ],
)
def test_impossible_models(fields, message):
    with pytest.raises(ValueError, match=message):
        tiny(**fields)


def test_scaling_below_one():
    with pytest.raises(ValueError, match=r"scaling.factor=0.5 must be >= 1"):
        tiny(position=positions.RoPE(scaling=positions.LinearScaling(0.5)))


def test_config_is_hashable_and_replaceable():
    assert hash(tiny()) == hash(tiny())
    assert tiny(position="rope") != tiny()
    assert ModelConfig().head_width == 64


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"ids": np.zeros((2, 0), int)}, r"tokens must be \(batch, length\)"),
        ({"ids": np.zeros(5, int)}, r"tokens must be \(batch, length\)"),
        ({"ids": np.zeros((1, 4), np.float32)}, r"tokens must be integers"),
        ({"ids": np.full((1, 4), 31)}, r"\[0, model.vocab_size=31\), got 31"),
        ({"ids": np.full((1, 4), -2)}, r"got -2"),
        ({"positions": np.zeros((1, 3), int)}, r"positions must be \(1 or 1, 4\)"),
        ({"segment_ids": np.zeros((4,), int)}, r"segment_ids must be \(1 or 1, 4\)"),
    ],
)
def test_inputs_that_cannot_be_read(inputs, message):
    config = tiny()
    params = random_params(config)
    ids = inputs.pop("ids", np.zeros((1, 4), int))
    with pytest.raises(ValueError, match=message):
        Transformer(config).apply({"params": params}, ids, **inputs)


@pytest.mark.parametrize("bad", [31, 1000, -1])
def test_under_jit_an_unknown_id_is_nan_not_some_other_token(bad):
    config = tiny()
    params, ids = random_params(config), tokens(config)
    ids[0, 5] = bad
    got = logits(config, params, ids)
    assert bool(jnp.isnan(got[0, 5:]).all())
    assert bool(jnp.isfinite(got[1]).all())


@pytest.mark.parametrize("length", [1, 2, 33])
def test_any_length(length):
    config = tiny(num_kv_heads=2)
    params, ids = random_params(config), tokens(config, length=length)
    assert logits(config, params, ids).shape == (2, length, 31)


def test_packed_documents_are_separate_documents():
    config = tiny()
    params, ids = random_params(config), tokens(config, length=12)
    segments = jnp.asarray([[0] * 5 + [1] * 7] * 2)
    restarted = jnp.asarray([[*range(5), *range(7)]] * 2)
    for where in (restarted, None):  # positions restart, or run on: both are legitimate
        packed = logits(config, params, ids, positions=where, segment_ids=segments)
        np.testing.assert_allclose(packed[:, :5], logits(config, params, ids[:, :5]), atol=1e-4)
        np.testing.assert_allclose(packed[:, 5:], logits(config, params, ids[:, 5:]), atol=1e-4)


def test_tied_biased_grouped_wide_headed_model_in_bfloat16():
    config = tiny(
        tie_embeddings=True, attention_bias=True, mlp_bias=True, num_kv_heads=1, head_dim=10
    )
    params, ids = random_params(config, scale=0.1), tokens(config)
    assert "head" not in params
    want = logits(config, params, ids)
    low = logits(
        tiny(
            **{
                "tie_embeddings": True,
                "attention_bias": True,
                "mlp_bias": True,
                "num_kv_heads": 1,
                "head_dim": 10,
                "dtype": "bfloat16",
            }
        ),
        params,
        ids,
    )
    assert low.dtype == jnp.float32
    assert float(jnp.abs(low - want).max()) < 0.1 * float(jnp.abs(want).max())
    assert float(jnp.abs(low - want).max()) > 0


def test_init_gives_parameters_only_and_no_missing_axes():
    config = tiny()
    variables = Transformer(config).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    assert list(variables) == ["params"]
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(variables))
    assert {x.shape[0] for x in jax.tree.leaves(variables["params"]["layers"])} == {3}


def test_layers_are_drawn_independently():
    config = tiny()
    params = Transformer(config).init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    assert float(jnp.abs(kernel[0] - kernel[1]).min(axis=(0, 1))) >= 0
    assert float(jnp.corrcoef(kernel[0].ravel(), kernel[1].ravel())[0, 1]) < 0.1
    assert abs(float(kernel.std()) / config.initializer_range - 1) < 0.05


def test_position_norm_is_relative_to_the_start():
    config = tiny()
    params, ids = random_params(config), tokens(config)
    _, kept = Transformer(config).apply({"params": params}, ids, mutable=["metrics"])
    _, states = Transformer(config).apply({"params": params}, ids, mutable=["intermediates"])
    states = np.asarray(states["intermediates"]["position_states"], np.float64)
    want = np.sqrt((states[:-1] ** 2).mean((1, 2, 3, 4)))
    np.testing.assert_allclose(kept["metrics"]["position_norm"], want / want[0], rtol=1e-4)
