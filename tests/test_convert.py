"""from_huggingface: strict about tensors and configs (its numbers are in test_golden.py)."""

import json
from pathlib import Path

import numpy as np
import pytest

from tape_jax import positions
from tape_jax.convert import from_huggingface

DATA = Path(__file__).parent / "data"


def checkpoint(name="tape_base"):
    golden = np.load(DATA / f"{name}.npz")
    config = json.loads(str(golden["config"]))
    return config, {key[2:]: golden[key] for key in golden.files if key.startswith("w/")}


def test_config_of_an_official_checkpoint():
    hf, weights = checkpoint()
    config, params = from_huggingface(hf, weights, scan_layers=False)
    assert config.position == positions.Tape(post="scalar", zero="w1", width=8)
    assert (config.num_layers, config.num_heads, config.head_width) == (3, 4, 16)
    assert not config.scan_layers
    post = weights["model.layers.1.post_attention_linear.weight"]
    np.testing.assert_allclose(params["layers"]["position"]["post"][1], post.sum(1), rtol=1e-6)


def test_theta_and_both_config_styles():
    hf, weights = checkpoint("rope")
    for style in (
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ):
        config, _ = from_huggingface(hf | style, weights)
        assert config.position == positions.RoPE(base=500.0, scaling=positions.LinearScaling(4.0))
    config, _ = from_huggingface(hf | {"shift": None}, weights)
    assert config.position == positions.RoPE()
    dynamic = hf | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    config, _ = from_huggingface(dynamic, weights, position="nope")
    assert config.position == positions.NoPE()


def drop(name):
    return lambda weights: weights.pop(name)


def put(name, shape):
    return lambda weights: weights.update({name: np.zeros(shape, np.float32)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop("model.norm.weight"), r"missing: nothing fills final_norm/scale"),
        (
            drop("model.layers.1.pe.x_proj.weight"),
            r"missing: layers/position/gate/kernel has no tensor for layers \[1\]",
        ),
        (put("model.layers.0.extra.weight", (2,)), r"unexpected: model\.layers\.0\.extra"),
        (put("model.layers.3.pe.up_proj.weight", (8, 4)), r"unexpected: model\.layers\.3\.pe"),
        (put("model.norm.weight", (63,)), r"shape: model\.norm\.weight gives \(63,\)"),
        (put("model.layers.0.self_attn.q_proj.bias", (64,)), r"unexpected: .*q_proj\.bias"),
        (
            lambda w: w.update({"model.rotary_emb.inv_freq": np.ones(8, np.float32)}),
            r"does not hold the frequencies of base 10000",
        ),
    ],
)
def test_every_tensor_counts(change, message):
    hf, weights = checkpoint()
    change(weights)
    with pytest.raises(ValueError, match=message):
        from_huggingface(hf, weights)


def test_all_problems_are_listed_at_once():
    hf, weights = checkpoint()
    drop("model.norm.weight")(weights), put("surplus", (1,))(weights)
    with pytest.raises(ValueError, match=r"(?s)missing: .*unexpected: surplus"):
        from_huggingface(hf, weights)


def test_frequencies_rounded_with_the_model_are_accepted():
    import ml_dtypes

    hf, weights = checkpoint()
    name = "model.rotary_emb.inv_freq"
    for dtype in (ml_dtypes.bfloat16, np.float16):
        from_huggingface(hf, weights | {name: weights[name].astype(dtype)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rpe_type": "adap"}, "unknown rpe_type 'adap'; did you mean adape"),
        ({"rope_scaling": {"type": "lineer", "factor": 2}}, "did you mean linear"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5 must be >= 1"),
        ({"model_type": "mistral"}, "model_type='mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"log_scale": True}, "log_scale"),
    ],
)
def test_configs_that_cannot_be_honoured(change, message):
    hf, weights = checkpoint()
    with pytest.raises(ValueError, match=message):
        from_huggingface(hf | change, weights)


def test_missing_config_key_and_unknown_override():
    hf, weights = checkpoint()
    with pytest.raises(ValueError, match="config lacks vocab_size"):
        from_huggingface({k: v for k, v in hf.items() if k != "vocab_size"}, weights)
    with pytest.raises(ValueError, match="unknown ModelConfig field 'scan_layer'"):
        from_huggingface(hf, weights, scan_layer=True)


def test_a_tied_head_must_be_the_embedding():
    hf, weights = checkpoint("rope")
    tied = hf | {"tie_word_embeddings": True}
    with pytest.raises(ValueError, match="lm_head"):
        from_huggingface(tied, weights)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    _, params = from_huggingface(tied, weights)
    assert "head" not in params
