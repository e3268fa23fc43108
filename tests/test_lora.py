"""Low-rank updates: nothing at the start, one more product of matrices after that."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import ModelConfig, Transformer
from tape_jax.lora import PROJECTIONS, LoRA, merge
from tests.tiny import logits, random_params, tiny, tokens, without_adapters


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), tuple(PROJECTIONS)])
@pytest.mark.parametrize("scan", [True, False])
def test_an_adapted_model_is_the_merged_one(targets, scan):
    config = tiny(lora=LoRA(3, 5.0, targets), scan_layers=scan, attention_bias=True, mlp_bias=True)
    # Small weights: at larger ones the softmax and norms amplify the order of float32 sums.
    params, ids = random_params(config, scale=0.1), tokens(config)
    plain = dataclasses.replace(config, lora=None)
    merged = merge(params, config.lora)
    like = random_params(plain)
    assert jax.tree.map(jnp.shape, merged) == jax.tree.map(jnp.shape, like)
    for theirs, path in PROJECTIONS.items():
        part, layer = path.split("/")
        own, new = params["layers"][part][layer], merged["layers"][part][layer]["kernel"]
        want = np.asarray(own["kernel"], np.float64)
        if theirs in targets:
            a, b = (np.asarray(own[name], np.float64) for name in ("lora_a", "lora_b"))
            want = want + 5.0 / 3 * a @ b
        np.testing.assert_allclose(new, want, atol=1e-6)
    both = logits(config, params, ids), logits(plain, merged, ids)
    unmerged = logits(plain, without_adapters(params), ids)
    assert float(jnp.abs(both[1] - unmerged).max()) > 0.1
    np.testing.assert_allclose(*both, atol=1e-5)


def test_a_new_adapter_changes_nothing():
    plain = tiny()
    config = dataclasses.replace(plain, lora=LoRA(2, targets=("up_proj",)))
    ids = tokens(config)
    params = jax.jit(Transformer(config).init)(jax.random.key(0), ids)["params"]
    a, b = (params["layers"]["mlp"]["up"][name] for name in ("lora_a", "lora_b"))
    assert a.shape == (3, 32, 2) and b.shape == (3, 2, 48)
    assert 0.5 < float(jnp.abs(a).max()) * 32**0.5 <= 1.0 and not b.any()
    assert "lora_a" not in params["layers"]["mlp"]["gate"]
    without = merge(params, config.lora)
    np.testing.assert_array_equal(logits(config, params, ids), logits(plain, without, ids))


def test_llama_2_counts():
    """r 8 on q, k, v, o of Llama-2-7B: 4 * 2 * 4096 * 8 in each of 32 layers."""
    config = ModelConfig(
        hidden_size=4096, intermediate_size=11008, num_layers=32, num_heads=32, lora=LoRA()
    )
    shapes = jax.eval_shape(
        Transformer(config).init, jax.random.key(0), jnp.zeros((1, 2), jnp.int32)
    )["params"]
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    count = sum(x.size for path, x in leaves if path[-1].key.startswith("lora_"))
    assert count == 8_388_608


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "lora.rank=0"),
        ({"alpha": 0.0}, "lora.alpha=0.0 must be > 0"),
        ({"targets": ()}, "lora.targets is empty"),
        ({"targets": ("q_prj",)}, "'q_prj'; did you mean q_proj"),
    ],
)
def test_adapters_that_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        LoRA(**fields)
