"""The convert command, and the folder of a converted model."""

import dataclasses
import json
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tape_jax import positions
from tape_jax.convert import fingerprint, load_huggingface
from tape_jax.convert.start import flatten
from tape_jax.lora import LoRA, merge
from tape_jax.sharding import parameter_shardings
from tests.huggingface_data import DATA, assert_equal_trees
from tests.tiny import logits, random_params, tiny
from tests.train.vocabularies import byte_level, write
from train.convert import main
from train.mesh import MeshConfig, make_mesh
from train.model_folder import read_model, read_params, write_model
from train.tokenizer import load_tokenizer


@pytest.fixture
def checkpoint(tmp_path):
    """A Hugging Face folder with a tokenizer in it."""
    folder = Path(shutil.copytree(DATA / "hf_gqa_tied", tmp_path / "llama"))
    return write(folder, "tokenizer.json", byte_level(), eos_token="<eos>")


def test_there_and_back(checkpoint, tmp_path):
    model, back = tmp_path / "model", tmp_path / "back"
    main(["--from", str(checkpoint), "--to", str(model), "--mesh.data", "8"])
    about, (config, params) = read_model(model), load_huggingface(checkpoint)
    assert about.config == config and about.fingerprint == fingerprint(params)
    assert (about.source, about.trained_length) == ("llama", 64)
    assert "/" not in json.loads((model / "model.json").read_text())["source"]
    assert {"tokenizer.json", "tokenizer_config.json"} <= {f.name for f in model.iterdir()}

    main(["--from", str(model), "--to-huggingface", str(back)])
    assert_equal_trees(load_huggingface(back)[1], params)
    theirs, ours = (json.loads((f / "config.json").read_text()) for f in (checkpoint, back))
    same = ("max_position_embeddings", "rope_parameters", "tie_word_embeddings", "hidden_size")
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}
    # The first from config.json, the second the id of "<eos>", which tokenizer_config.json names.
    assert (ours["bos_token_id"], ours["eos_token_id"]) == (1, 258)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (back / name).exists(), name
    assert {path.name for path in tmp_path.iterdir()} == {"llama", "model", "back"}


def test_exports_in_bfloat16_with_lora_merged(tmp_path):
    config = tiny(position="rope", lora=LoRA(rank=2))
    params = random_params(config)
    write_model(tmp_path / "model", config, params, source="tiny")
    target = tmp_path / "llama"
    options = ["--to-huggingface", str(target), "--dtype", "bfloat16"]
    main(["--from", str(tmp_path / "model"), *options])
    plain, saved = load_huggingface(target)
    assert plain.lora is None and "lora_a" not in saved["layers"]["attention"]["query"]
    merged = jax.tree.map(lambda x: x.astype("bfloat16"), merge(params, config.lora))
    assert_equal_trees(saved, jax.tree.map(lambda x: x.astype("float32"), merged))


@pytest.mark.multidevice
def test_a_converted_model_is_read_onto_any_mesh(tmp_path):
    config = tiny(vocab_size=32, position=positions.Tape(width=8, block=(2, 4)))
    written, read = make_mesh(MeshConfig(data=8)), make_mesh(MeshConfig(data=1, fsdp=4, tensor=2))
    params = random_params(config)
    placed = jax.device_put(params, parameter_shardings(params, written))
    write_model(tmp_path / "model", config, placed, source="tiny", trained_length=7)
    about = read_model(tmp_path / "model")
    assert about.config == config and about.trained_length == 7
    found = read_params(tmp_path / "model", about.config, read)
    assert_equal_trees(found, params)
    planned = flatten(parameter_shardings(params, read))
    for path, x in flatten(found).items():
        assert x.sharding.is_equivalent_to(planned[path], x.ndim), path
    assert fingerprint(found) == about.fingerprint


def test_gguf_keeps_its_logits(tmp_path):
    pytest.importorskip("gguf", reason='needs the "convert" extra')
    from tests.test_gguf import write_gguf

    vocabulary = [
        ("add_tokenizer_model", "gpt2"),
        ("add_tokenizer_pre", "gpt-2"),
        ("add_token_list", ["a", "b", "ab"]),
        ("add_token_merges", ["a b"]),
        ("add_add_bos_token", False),
    ]
    file = write_gguf(tmp_path / "model.gguf", "hf_plain", keys=vocabulary)
    main(["--from", str(file), "--to-huggingface", str(tmp_path / "llama")])
    assert load_tokenizer(tmp_path / "llama").encode("abba") == [2, 1, 0]
    golden = np.load(DATA / "hf_plain/golden.npz")
    got = logits(*load_huggingface(tmp_path / "llama"), golden["input_ids"])
    np.testing.assert_allclose(got, golden["logits"], atol=5e-5, rtol=0)


def test_model_folders_that_cannot_be_used(tmp_path):
    config = tiny()
    params = random_params(config)
    write_model(tmp_path / "model", config, params, source="tiny")
    with pytest.raises(FileExistsError, match="model exists already"):
        write_model(tmp_path / "model", config, params, source="tiny")
    with pytest.raises(FileNotFoundError, match=r"nothing holds no converted model: .*model\.json"):
        read_model(tmp_path / "nothing")
    other = dataclasses.replace(config, position=positions.RoPE())
    mesh = make_mesh(MeshConfig())
    with pytest.raises(ValueError, match="parameters of another model"):
        read_params(tmp_path / "model", other, mesh)
    shutil.rmtree(tmp_path / "model/params/d")
    with pytest.raises(ValueError, match="params cannot be read: convert it again"):
        read_params(tmp_path / "model", config, mesh)
    shutil.rmtree(tmp_path / "model/params")
    with pytest.raises(FileNotFoundError, match="params is missing"):
        read_params(tmp_path / "model", config, mesh)
    (tmp_path / "model/model.json").write_text('{"format": "2"}')
    with pytest.raises(ValueError, match=r"model\.json has format '2', expected"):
        read_model(tmp_path / "model")
    (tmp_path / "model/model.json").write_text("{")
    with pytest.raises(ValueError, match=r"model\.json is not JSON"):
        read_model(tmp_path / "model")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "error: name a target: --to, --to-huggingface"),
        (["--to", "{llama}"], "error: .*llama exists already"),
        (["--to", "{new}", "--step", "3"], "error: step=3"),
        (["--to", "{new}", "--mesh.tensor", "3"], "error: .*must multiply"),
        (["--to", "{new}", "--adapter", "{llama}"], "error: .*llama"),
    ],
)
def test_errors_of_the_command(options, message, checkpoint, tmp_path):
    paths = {"llama": checkpoint, "new": tmp_path / "new"}
    with pytest.raises(SystemExit, match=message):
        main(["--from", str(checkpoint), *(option.format(**paths) for option in options)])
    assert {path.name for path in tmp_path.iterdir()} == {"llama"}


def test_a_damaged_checkpoint_leaves_nothing(checkpoint, tmp_path):
    (checkpoint / "model.safetensors").write_bytes(b"12345678")
    with pytest.raises(SystemExit, match=r"error: .*model\.safetensors is cut off"):
        main(["--from", str(checkpoint), "--to", str(tmp_path / "new")])
    with pytest.raises(SystemExit, match=r"error: .*nothing"):
        main(["--from", str(tmp_path / "nothing"), "--to", str(tmp_path / "new")])
    assert {path.name for path in tmp_path.iterdir()} == {"llama"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_writing(number, checkpoint, tmp_path, monkeypatch, capsys):
    """Orbax writes in threads of its own; what is not whole must not stay."""
    save = ocp.StandardCheckpointer.save

    def interrupted(self, *arguments, **how):
        save(self, *arguments, **how)
        signal.raise_signal(number)

    monkeypatch.setattr(ocp.StandardCheckpointer, "save", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(SystemExit) as ending:
            main(["--from", str(checkpoint), "--to", str(tmp_path / "new")])
    finally:
        signal.signal(signal.SIGINT, before)
    assert ending.value.code == 130 and "interrupted" in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if "new" in path.name]
