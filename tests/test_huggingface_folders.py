"""Checkpoints of Hugging Face on disk: loaded or refused, against transformers' logits."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tape_jax import Transformer, positions
from tape_jax.convert import (
    fill,
    load_huggingface,
    save_huggingface,
    start_missing,
    with_rotations_of,
)
from tape_jax.convert.start import flatten
from tape_jax.convert.tensor_files import INDEX, open_file
from tape_jax.lora import LoRA
from tape_jax.sharding import parameter_shardings
from tests.huggingface_data import DATA, FOLDERS, assert_equal_trees, check_logits
from tests.tiny import logits, random_params, tiny
from train.mesh import MeshConfig, make_mesh


@pytest.fixture
def copy(tmp_path):
    """A copy of a folder of the data, to be damaged."""

    def make(name):
        return Path(shutil.copytree(DATA / name, tmp_path / name))

    return make


# --- Loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["config.json", "config_v4.json"])
@pytest.mark.parametrize("name", FOLDERS)
def test_logits_are_those_of_transformers(name, style, copy):
    folder = copy(name)
    (folder / style).replace(folder / "config.json")
    config, params = load_huggingface(folder)
    assert ("head" in params) == (name != "hf_gqa_tied")
    check_logits(config, params, np.load(folder / "golden.npz"))


def test_interleaved_rows_of_queries_and_keys_are_noticed(copy):
    """A mutant: the pairs of a head interleaved, as llama.cpp keeps them."""
    folder = copy("hf_plain")
    tensors = load_file(folder / "model.safetensors")
    for name, x in tensors.items():
        if "q_proj" in name or "k_proj" in name:
            heads = x.reshape(4, 2, -1, x.shape[-1])
            tensors[name] = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(x.shape)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(AssertionError):
        check_logits(*load_huggingface(folder), np.load(folder / "golden.npz"), atol=0.1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_dtypes_become_float32(dtype, copy):
    folder = copy("hf_plain")
    held = {name: x.astype(dtype) for name, x in load_file(folder / "model.safetensors").items()}
    save_file(held, folder / "model.safetensors")
    _, params = load_huggingface(folder)
    want = held["model.layers.1.mlp.up_proj.weight"].astype(np.float32).T
    np.testing.assert_array_equal(params["layers"]["mlp"]["up"]["kernel"][1], want)


@pytest.mark.multidevice
@pytest.mark.parametrize(
    "mesh", [MeshConfig(data=1, fsdp=4, tensor=2), MeshConfig(data=4, fsdp=2), MeshConfig(data=8)]
)
def test_parameters_land_where_they_are_planned(mesh):
    mesh = make_mesh(mesh)
    config, params = load_huggingface(DATA / "hf_sharded", mesh=mesh, position="tape")
    planned = parameter_shardings(params, mesh)
    for path, x in flatten(params).items():
        assert x.sharding.is_equivalent_to(flatten(planned)[path], x.ndim), path
    assert_equal_trees(params, load_huggingface(DATA / "hf_sharded", position="tape")[1])
    with jax.set_mesh(mesh):
        check_logits(config, params, np.load(DATA / "hf_sharded/golden.npz"))


@pytest.mark.multidevice
def test_tensors_are_cut_before_they_are_on_the_devices(monkeypatch):
    """A matrix reaches each device as its own eighth, turned where the parameter is, and stays."""
    mesh, put, found = make_mesh(MeshConfig(data=1, fsdp=4, tensor=2)), fill._put, {}

    def recorded(step, target):
        raw = put(step, target)
        write = fill._writer(target.sharding, step.conversion)
        index = tuple(map(np.int32, step.index))
        compiled = write.lower(target, raw, index).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        moved = re.findall(r"all-\w+|collective-permute", compiled.as_text())
        found[step.path] = (raw.sharding.shard_shape(raw.shape), temporary, moved)
        return raw

    monkeypatch.setattr(fill, "_put", recorded)
    load_huggingface(DATA / "hf_sharded", mesh=mesh)
    assert found["layers/attention/query/kernel"] == ((16, 8), 0, [])
    assert found["layers/attention/out/kernel"] == ((8, 16), 0, [])
    assert found["layers/mlp/down/kernel"] == ((8, 32), 0, [])
    assert found["embedding/embedding"] == ((97, 8), 0, [])  # 97 does not divide over tensor


def test_parts_of_a_stored_tensor(tmp_path):
    """Any slices of any tensor, also those of more rows than are read at once."""
    x = np.arange(3_000 * 1_000, dtype=np.float32).reshape(3_000, 1_000)
    save_file({"x": x, "scalar": np.array(3.5, np.float32)}, tmp_path / "x.safetensors")
    stored, _ = open_file(tmp_path / "x.safetensors")
    for cut in ((), (slice(1, 2_999),), (slice(5, 2_900), slice(3, 77)), (slice(0, 0),)):
        np.testing.assert_array_equal(stored["x"].read(cut), x[cut])
    assert stored["scalar"].read() == 3.5 and stored["scalar"].shape == ()


# --- What a checkpoint does not have --------------------------------------------------------------


@pytest.mark.parametrize("name", ["hf_plain", "hf_gqa_tied", "hf_linear"])
@pytest.mark.parametrize("kind", ["tape", "tape-official", "tape-unit"])
def test_tape_in_a_llama_changes_nothing_at_first(name, kind):
    ids = np.load(DATA / name / "golden.npz")["input_ids"]
    base = load_huggingface(DATA / name)
    config, params = load_huggingface(DATA / name, position=kind)
    assert config.position.base == base[0].position.base
    assert config.position.scaling == base[0].position.scaling
    if kind == "tape-unit":  # divides by |z|, which rounds
        np.testing.assert_allclose(
            logits(config, params, ids), logits(*base, ids), atol=5e-5, rtol=0
        )
    else:
        np.testing.assert_array_equal(logits(config, params, ids), logits(*base, ids))


def test_an_encoding_given_as_such_is_taken_as_it_is():
    config, params = load_huggingface(DATA / "hf_plain", position=positions.Tape(), seed=3)
    other = load_huggingface(DATA / "hf_plain", position=positions.Tape(), seed=4)[1]
    gate = "layers/position/gate/kernel"
    assert config.position == positions.Tape()
    assert not np.array_equal(flatten(params)[gate], flatten(other)[gate])
    ids = np.load(DATA / "hf_plain/golden.npz")["input_ids"]
    base = load_huggingface(DATA / "hf_plain")
    np.testing.assert_array_equal(logits(config, params, ids), logits(*base, ids))


def test_rotations_are_carried_over_between_rotary_encodings_only():
    rope = positions.RoPE(base=5e5, scaling=positions.LinearScaling(2.0), shift=3)
    tape = with_rotations_of(rope, positions.Tape(width=8))
    assert tape == positions.Tape(width=8, base=5e5, scaling=rope.scaling, shift=3)
    assert with_rotations_of(positions.NoPE(), tape) == tape
    assert with_rotations_of(rope, positions.ALiBi()) == positions.ALiBi()


def test_adapters_start_beside_their_kernels():
    config, params = load_huggingface(DATA / "hf_plain", lora=LoRA(rank=2, targets=("q_proj",)))
    query = params["layers"]["attention"]["query"]
    assert query["lora_a"].shape == (2, 32, 2) and not query["lora_b"].any()
    check_logits(config, params, np.load(DATA / "hf_plain/golden.npz"))


def test_started_parameters_are_those_of_a_new_model():
    config = tiny()
    paths = ["layers/position/w1", "head/kernel"]
    found = start_missing(config, paths, seed=5)
    new = Transformer(config).init(jax.random.key(5), jnp.zeros((1, 1), jnp.int32))["params"]
    assert set(found) == set(paths)
    for path in paths:
        np.testing.assert_allclose(found[path], flatten(new)[path], rtol=1e-6)
    with pytest.raises(ValueError, match="'layers/position/w3' is none of this model's"):
        start_missing(config, ["layers/position/w3"])


# --- Bad input ------------------------------------------------------------------------------------


def edit(change):
    """Changes the tensors of model.safetensors."""

    def damage(folder):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return damage


def configure(**keys):
    def damage(folder):
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return damage


def cut(file, size):
    return lambda folder: os.truncate(folder / file, size)


def unindex(folder):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["model.extra.weight"] = "model-00002-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))


UP = "model.layers.1.mlp.up_proj.weight"
THIRD = "model-00003-of-00003.safetensors"


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("hf_plain", edit(lambda t: t.pop(UP)), r"hf_plain: (?s:.*)mlp/up/kernel.*layers \[1\]"),
        (
            "hf_plain",
            edit(lambda t: t.update({"model.extra.weight": np.zeros(2, np.float32)})),
            r"hf_plain: (?s:.*)unexpected: model\.extra\.weight",
        ),
        (
            "hf_plain",
            edit(lambda t: t.update({UP: np.zeros((32, 64), np.float32)})),
            r"layers\.1\.mlp\.up_proj\.weight gives \(32, 64\).*expected \(64, 32\)",
        ),
        ("hf_plain", configure(attention_bias=True), r"missing: nothing fills .*query/bias"),
        (
            "hf_plain",
            cut("model.safetensors", 60_000),
            r"model\.safetensors is cut off: model\..* ends at byte",
        ),
        ("hf_plain", cut("model.safetensors", 100), r"is cut off.*its header would end at"),
        ("hf_plain", cut("model.safetensors", 3), r"is cut off"),
        ("hf_plain", configure(model_type="gpt2"), r"model_type='gpt2' is not supported"),
        (
            "hf_plain",
            configure(rope_parameters={"rope_type": "longrope"}),
            r"unknown rope_scaling type 'longrope'",
        ),
        ("hf_plain", lambda f: (f / "config.json").write_text("{"), r"config\.json is not JSON"),
        ("hf_plain", lambda f: (f / "config.json").write_text("[]"), r"config\.json is no JSON"),
        ("hf_plain", configure(num_hidden_layers="2"), r"num_hidden_layers='2' is not supported"),
        ("hf_plain", lambda f: (f / "config.json").unlink(), r"config\.json is missing"),
        (
            "hf_plain",
            lambda f: (f / "model.safetensors").unlink(),
            r"neither.*save_pretrained",
        ),
        (
            "hf_sharded",
            lambda f: (f / THIRD).unlink(),
            r"model-00003.*is missing: .*index\.json expects 6 tensors in it, lm_head\.weight",
        ),
        ("hf_sharded", unindex, r"model-00002.*lacks model\.extra\.weight, which .*index\.json"),
    ],
)
def test_damaged_folders(name, damage, message, copy):
    folder = copy(name)
    damage(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        load_huggingface(folder)


def test_nothing_is_read_before_everything_fits(copy, monkeypatch):
    folder = copy("hf_plain")
    edit(lambda t: t.pop(UP))(folder)
    monkeypatch.setattr("tape_jax.convert.tensor_files.Stored.read", None)
    with pytest.raises(ValueError, match="missing"):
        load_huggingface(folder)


# --- Memory ---------------------------------------------------------------------------------------

MEASURE = """
import sys
import jax
from tape_jax.convert import load_huggingface

def memory(kind):
    lines = open("/proc/self/status").read().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))

load_huggingface(sys.argv[1])  # what loading takes beside the numbers
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
before = memory("VmRSS")
jax.block_until_ready(load_huggingface(sys.argv[2]))
print(memory("VmHWM") - before)
"""


def zeros(folder, vocab_size):
    """A float32 folder; the bytes of the embedding and of the head, its largest tensors."""
    config = tiny(position="rope", vocab_size=vocab_size, hidden_size=512, intermediate_size=1024)
    save_huggingface(folder, config, random_params(config, scale=0.0))
    return 4 * 512 * vocab_size


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self")
def test_memory_of_loading_is_the_model_and_one_tensor(tmp_path):
    """On a CPU, where the parameters are in the same memory: two tensors of 128 MB, and 28 MB."""
    zeros(tmp_path / "small", 64)
    largest = zeros(tmp_path / "large", 65_536)
    command = [sys.executable, "-c", MEASURE, tmp_path / "small", tmp_path / "large"]
    grown = int(subprocess.run(command, check=True, capture_output=True).stdout)
    total = (tmp_path / "large/model.safetensors").stat().st_size
    assert total < grown <= total + 1.3 * largest
