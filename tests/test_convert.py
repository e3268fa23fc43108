"""from_huggingface: strict about tensors and configs (its numbers are in test_golden.py)."""

import json
from pathlib import Path

import numpy as np
import pytest

from tape_jax import positions
from tape_jax.convert import from_huggingface
from tape_jax.convert.encodings import read_position

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
    config, _ = from_huggingface(hf, weights, position="nope")
    assert config.position == positions.NoPE()


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 8192


@pytest.mark.parametrize(
    ("scaling", "want"),
    [
        ({"rope_type": "default"}, positions.Scaling()),
        ({"type": "linear", "factor": 2}, positions.LinearScaling(2.0)),
        ({"type": "dynamic", "factor": 2.0}, positions.DynamicNTKScaling(2.0, 64)),
        ({"type": "yarn", "factor": 4.0}, positions.YarnScaling(4.0, 64)),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16,
             "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5},
            positions.YarnScaling(4.0, 16, 16, 2, 1.5),
        ),
        ({"rope_type": "llama3", **LLAMA3}, positions.Llama3Scaling(8.0, 8192, 1.0, 4.0)),
    ],
)  # fmt: skip
def test_every_scaling_in_the_field(scaling, want):
    hf, weights = checkpoint("rope")
    assert hf["max_position_embeddings"] == 64
    for key in ("rope_scaling", "rope_parameters"):
        config, _ = from_huggingface(hf | {key: scaling}, weights)
        assert config.position == positions.RoPE(scaling=want)


def test_what_the_official_kinds_mean():
    """YaRN's factor is ceil(max / original), xPos has S 2048, draws are from twice the length."""
    hf, _ = checkpoint("rope")
    original = {
        "original_max_position_embeddings": 24,
        "rope_scaling": {"type": "yarn", "factor": 9},
    }
    read = lambda **keys: read_position(hf | keys)  # noqa: E731
    assert read(rpe_type="yarn", **original).scaling == positions.YarnScaling(3.0, 24)
    assert read(rpe_type="xpos") == positions.XPos(scale=2048.0, center=32)
    assert read(rpe_type="randrope").max_position == 128
    assert read(rpe_type="rope", log_scale=True).log_length == hf["train_scale"]
    assert read(rpe_type="adatensor", position_size=8) == positions.Tape(
        post="scalar", zero="w1", width=8, mixing="separate"
    )
    with pytest.raises(ValueError, match="unknown rope_scaling type 'yarn'"):
        read(rpe_type="adape", **original)  # official TAPE would read it as linear


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


def plain_rope(**scaling):
    return {"rpe_type": "rope", "rope_scaling": scaling}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rpe_type": "adap"}, "unknown rpe_type 'adap'; did you mean adape"),
        ({"rope_scaling": {"type": "lineer", "factor": 2}}, "did you mean linear"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor=0.5 must be >= 1"),
        ({"model_type": "mistral"}, "model_type='mistral'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (plain_rope(type="yarn"), "type 'yarn' lacks 'factor'"),
        (plain_rope(type="yarn", factor=2.0, mscale=0.7), "with mscale is not supported"),
        (plain_rope(type="llama3", factor=8.0), "type 'llama3' lacks 'original_max"),
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


def alibi(slope):
    def change(weights):
        weights["model.layers.1.self_attn.alibi"] = (
            slope * weights["model.layers.1.self_attn.alibi"]
        )

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("alibi", alibi(2.0), r"layers\.1\.self_attn\.alibi does not hold the slopes of 4 heads"),
        ("fire", put("model.layers.0.self_attn.rotary_emb.init_L", ()), r"init_L is 0\.0"),
        (
            "adatensor",
            drop("model.layers.2.pe.up_projs.1.weight"),
            r"w1 has no tensor for layers \[2",
        ),
        ("adatensor", put("model.layers.0.pe.up_projs.2.weight", (8, 4)), r"shape: .*up_projs\.2"),
        (
            "t5rb",
            put("model.layers.0.self_attn.relative_attention_bias.weight", (8, 4)),
            r"\(8, 4\)",
        ),
    ],
)
def test_tensors_of_other_encodings_count_too(name, change, message):
    hf, weights = checkpoint(name)
    from_huggingface(hf, weights)
    change(weights)
    with pytest.raises(ValueError, match=message):
        from_huggingface(hf, weights)


def test_a_tied_head_must_be_the_embedding():
    hf, weights = checkpoint("rope")
    tied = hf | {"tie_word_embeddings": True}
    with pytest.raises(ValueError, match="lm_head"):
        from_huggingface(tied, weights)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    _, params = from_huggingface(tied, weights)
    assert "head" not in params
