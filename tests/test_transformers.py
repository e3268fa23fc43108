"""What we write, read by transformers and PEFT themselves: the same logits from the same tokens."""

import dataclasses

import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from tape_jax import positions
from tape_jax.convert import load_huggingface, save_huggingface, save_peft
from tape_jax.lora import LoRA
from tests.tiny import logits, random_params, tiny, tokens, without_adapters

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LENGTH = 24
IDS = tokens(tiny(), length=LENGTH)
SCALINGS = {
    "none": positions.Scaling(),
    "linear": positions.LinearScaling(2.0),
    "dynamic": positions.DynamicNTKScaling(2.0, 16),
    "yarn": positions.YarnScaling(4.0, 16),
    "llama3": positions.Llama3Scaling(8.0, 16),
}


def llama(**fields):
    fields = {"position": positions.RoPE(), "num_kv_heads": 2} | fields
    config = tiny(**fields)
    return config, random_params(config, scale=0.2)


def open_llama(folder, **how):
    how = {"dtype": torch.float32} | how
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **how).eval()


def theirs(model, ids=IDS):
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.float().numpy()


def check(model, config, params, atol=2e-5):
    want = theirs(model)
    assert want.std() > 0.1
    np.testing.assert_allclose(logits(config, params, IDS), want, atol=atol, rtol=0)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_every_scaling(scaling, tmp_path):
    """Also past the length that the model was trained on, where scalings act."""
    rope = positions.RoPE(base=500.0, scaling=SCALINGS[scaling])
    config, params = llama(position=rope)
    save_huggingface(tmp_path / "llama", config, params, length=LENGTH if scaling == "none" else 16)
    check(open_llama(tmp_path / "llama"), config, params)


@pytest.mark.parametrize(
    "fields",
    [
        {"tie_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 16, "num_kv_heads": 1},
        {"scan_layers": True, "norm_eps": 1e-3},
    ],
)
def test_every_shape(fields, tmp_path):
    config, params = llama(**fields)
    save_huggingface(tmp_path / "llama", config, params)
    model = open_llama(tmp_path / "llama")
    assert isinstance(model, transformers.LlamaForCausalLM)
    check(model, config, params)


def test_in_bfloat16_the_weights_are_rounded_once(tmp_path):
    config, params = llama()
    save_huggingface(tmp_path / "llama", config, params, dtype="bfloat16")
    rounded = load_huggingface(tmp_path / "llama")
    check(open_llama(tmp_path / "llama"), *rounded)
    assert open_llama(tmp_path / "llama", dtype="auto").dtype == torch.bfloat16


def test_what_transformers_saves_is_read(tmp_path):
    scaled = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
    about = transformers.LlamaConfig(
        vocab_size=31,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        rope_parameters=scaled,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(about).eval()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    check(model, *load_huggingface(tmp_path / "theirs"))


@pytest.mark.parametrize("tied", [False, True])
def test_low_rank_updates_in_peft(tied, tmp_path):
    """On the base they were trained on, with an embedding and norms that were trained whole."""
    peft = pytest.importorskip("peft")
    lora = LoRA(rank=2, alpha=6.0, targets=("q_proj", "v_proj", "down_proj"))
    config, params = llama(lora=lora, tie_embeddings=tied)
    plain = dataclasses.replace(config, lora=None)
    save_huggingface(tmp_path / "base", plain, without_adapters(params))
    trained = ["embedding/embedding", "final_norm/scale", "layers/mlp_norm/scale"]
    flat = flatten_dict(params, sep="/")
    tuned = unflatten_dict(flat | {path: 1.5 * flat[path] for path in trained}, sep="/")
    save_peft(tmp_path / "peft", config, tuned, "base", trained=trained)
    base = open_llama(tmp_path / "base")
    check(base, plain, without_adapters(params))
    check(peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval(), config, tuned)
