"""Adapters know their base; PEFT's have its names and shapes."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tape_jax import positions
from tape_jax.convert import fingerprint, load_adapter, save_adapter, save_peft
from tape_jax.convert.start import flatten
from tape_jax.lora import LoRA, merge
from tape_jax.saved import from_dict, to_dict
from tape_jax.sharding import parameter_shardings
from tests.tiny import random_params, tiny
from train.mesh import MeshConfig, make_mesh

# --- Fingerprints ---------------------------------------------------------------------------------


def change_one(x):
    return x.at[0, 1, 2].multiply(1 + 1e-6)


CHANGES = {
    "one number, a little": change_one,
    "all signs": lambda x: -x,
    "two rows": lambda x: x[:, ::-1],
    "two layers": lambda x: x[::-1],
    "two numbers": lambda x: x.at[0, 0, 0].set(x[0, 0, 1]).at[0, 0, 1].set(x[0, 0, 0]),
    "a sign": lambda x: x.at[1, 3, 3].multiply(-1),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_every_change_shows(change):
    params = random_params(tiny())
    before = fingerprint(params)
    assert before == fingerprint(random_params(tiny())) and len(before) == 64
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    params["layers"]["mlp"]["up"]["kernel"] = change(kernel)
    assert fingerprint(params) != before


def test_paths_and_shapes_count():
    x = np.zeros((2, 3), np.float32)
    trees = [{"a": x}, {"b": x}, {"a": x.T}, {"a": {"b": x}}, {"a": x, "b": x}]
    assert len({fingerprint(tree) for tree in trees}) == len(trees)


@pytest.mark.multidevice
def test_the_devices_do_not_count():
    params = random_params(tiny(vocab_size=32))
    want = fingerprint(params)
    for sizes in (MeshConfig(data=1, fsdp=4, tensor=2), MeshConfig(data=2, tensor=4)):
        mesh = make_mesh(sizes)
        assert fingerprint(jax.device_put(params, parameter_shardings(params, mesh))) == want


# --- Our adapters ---------------------------------------------------------------------------------


def adapter(tmp_path, base="0" * 64):
    config = tiny(position=positions.Tape(width=8, scaling=positions.LinearScaling(2.0)))
    position = random_params(config)["layers"]["position"]
    file = tmp_path / "adapter.safetensors"
    save_adapter(file, config, {"layers": {"position": position}}, base)
    return file, config, position


def test_adapter_there_and_back(tmp_path):
    file, config, position = adapter(tmp_path)
    found, params = load_adapter(file, base="0" * 64)
    assert found == config
    got = flatten(params)
    assert set(got) == {f"layers/position/{path}" for path in flatten(position)}
    for path, x in flatten(position).items():
        np.testing.assert_array_equal(got[f"layers/position/{path}"], x)
    assert load_file(file).keys() == got.keys()  # the library reads it too
    assert file.stat().st_size < 20_000


def test_adapter_for_another_base(tmp_path):
    file, _, _ = adapter(tmp_path, base="a" * 64)
    with pytest.raises(ValueError, match=r"adapter\.safetensors is an adapter for another base"):
        load_adapter(file, base="b" * 64)


def test_adapters_that_cannot_be_read_or_written(tmp_path):
    file, config, _ = adapter(tmp_path)
    with pytest.raises(FileExistsError, match=r"adapter\.safetensors exists already"):
        adapter(tmp_path)
    other = tmp_path / "other.safetensors"
    save_file({"x": np.zeros(2, np.float32)}, other)
    with pytest.raises(ValueError, match=r"other\.safetensors is no adapter"):
        load_adapter(other)
    with pytest.raises(ValueError, match=r"layers/position/w1 has shape \(3, 2\), the model has"):
        wrong = {"layers": {"position": {"w1": np.zeros((3, 2))}}}
        save_adapter(tmp_path / "wrong.safetensors", config, wrong, "0")
    with pytest.raises(ValueError, match=r"extra has shape .*no such parameter"):
        save_adapter(tmp_path / "wrong.safetensors", config, {"extra": np.zeros(2)}, "0")
    assert {path.name for path in tmp_path.iterdir()} == {file.name, other.name}


@pytest.mark.parametrize(
    "config",
    [
        tiny(),
        tiny(position=positions.Tape(block=(2, 4))),
        tiny(position=positions.Randomized(inner=positions.ALiBi()), num_kv_heads=2),
        tiny(position="rope", lora=LoRA(rank=2, targets=("q_proj", "up_proj"))),
        tiny(position=positions.get("tape-fourier")),
    ],
)
def test_configs_as_json(config):
    assert from_dict(type(config), json.loads(json.dumps(to_dict(config)))) == config


# --- PEFT -----------------------------------------------------------------------------------------

TARGETS = {"q_proj": (32, 32), "v_proj": (16, 32), "down_proj": (32, 48)}


def with_lora(**fields):
    lora = LoRA(rank=2, alpha=6.0, targets=tuple(TARGETS))
    config = tiny(position="rope", num_kv_heads=2, lora=lora, **fields)
    return config, random_params(config)


def test_names_shapes_and_numbers_of_peft(tmp_path):
    config, params = with_lora()
    trained = ["embedding/embedding", "final_norm/scale", "layers/mlp_norm/scale"]
    save_peft(tmp_path / "peft", config, params, "some/base", trained=trained)
    about = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert (about["peft_type"], about["task_type"]) == ("LORA", "CAUSAL_LM")
    assert (about["r"], about["lora_alpha"], about["bias"]) == (2, 6.0, "none")
    assert about["base_model_name_or_path"] == "some/base"
    assert about["target_modules"] == list(TARGETS)
    whole = ["model.embed_tokens", "model.norm", "post_attention_layernorm"]
    assert about["modules_to_save"] == whole
    tensors = load_file(tmp_path / "peft/adapter_model.safetensors")
    merged = flatten(merge(params, config.lora))
    for target, (out, inner) in TARGETS.items():
        block, path = ("mlp", "mlp/down") if "down" in target else ("self_attn", None)
        path = path or {"q_proj": "attention/query", "v_proj": "attention/value"}[target]
        for layer in range(3):
            name = f"base_model.model.model.layers.{layer}.{block}.{target}"
            a, b = (tensors.pop(f"{name}.lora_{x}.weight") for x in "AB")
            assert a.shape == (2, inner) and b.shape == (out, 2)
            kernel = np.asarray(flatten(params)[f"layers/{path}/kernel"][layer])
            want = kernel.T + about["lora_alpha"] / about["r"] * (b @ a)
            got = np.asarray(merged[f"layers/{path}/kernel"][layer]).T
            np.testing.assert_allclose(got, want, atol=1e-5)
    norms = {f"model.layers.{i}.post_attention_layernorm" for i in range(3)}
    modules = {"model.embed_tokens", "model.norm"} | norms
    assert set(tensors) == {f"base_model.model.{module}.weight" for module in modules}


def test_a_tied_head_goes_with_the_trained_embedding(tmp_path):
    config, params = with_lora(tie_embeddings=True)
    save_peft(tmp_path / "peft", config, params, "base", trained=["embedding/embedding"])
    tensors = load_file(tmp_path / "peft/adapter_model.safetensors")
    about = json.loads((tmp_path / "peft/adapter_config.json").read_text())
    assert about["modules_to_save"] == ["lm_head", "model.embed_tokens"]
    head = tensors["base_model.model.lm_head.weight"]
    np.testing.assert_array_equal(head, params["embedding"]["embedding"])


def test_what_peft_cannot_hold(tmp_path):
    config, params = with_lora()
    with pytest.raises(ValueError, match=r"model\.lora is None"):
        save_peft(tmp_path / "peft", dataclasses.replace(config, lora=None), params, "base")
    tape = dataclasses.replace(config, position=positions.Tape(post="scalar"), num_kv_heads=4)
    with pytest.raises(ValueError, match=r"'tape' is not in transformers.*use save_adapter"):
        save_peft(tmp_path / "peft", tape, random_params(tape), "base")
    (tmp_path / "peft").mkdir()
    with pytest.raises(FileExistsError, match="peft exists already"):
        save_peft(tmp_path / "peft", config, params, "base")
