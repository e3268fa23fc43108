"""Folders that Hugging Face and the official code read: there and back, whole or not at all."""

import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from tape_jax import positions
from tape_jax.convert import (
    load_huggingface,
    save_huggingface,
)
from tape_jax.convert.encodings import read_position
from tape_jax.convert.encodings_out import write_position
from tape_jax.convert.tensor_files import DTYPES, INDEX, open_file
from tape_jax.lora import LoRA
from tests.huggingface_data import DATA, FOLDERS, assert_equal_trees, tensors_of
from tests.tiny import logits, random_params, tiny

AS_LLAMA = ["rope", "rope_dynamic2", "rope_shift37", "rope_logscale", "yarn"]
OFFICIAL = [
    *("adamlp", "adatensor", "adattention", "adavector", "adawoeq", "adayarn", "alibi", "fire"),
    *("nope", "randrope", "sincos", "t5rb", "tape_base", "tape_linear2", "tape_shift37", "xpos"),
]
"""Goldens by how their encodings are written: as a Llama's, or by the official rpe_type."""


@pytest.mark.parametrize("name", FOLDERS)
def test_there_and_back_is_exact(name, tmp_path):
    config, params = load_huggingface(DATA / name)
    save_huggingface(tmp_path / "saved", config, params, length=64)
    ours, theirs = tensors_of(tmp_path / "saved"), tensors_of(DATA / name)
    assert ours.keys() == theirs.keys()
    for tensor, want in theirs.items():
        np.testing.assert_array_equal(ours[tensor], want, tensor)
    again, reloaded = load_huggingface(tmp_path / "saved")
    settled = dataclasses.replace(config, num_kv_heads=config.kv_heads, head_dim=config.head_width)
    assert again == settled
    assert_equal_trees(reloaded, params)
    hf = json.loads((tmp_path / "saved/config.json").read_text())
    v5, v4 = (json.loads((DATA / name / f).read_text()) for f in ("config.json", "config_v4.json"))
    assert hf["rope_theta"] == v4["rope_theta"] and hf["torch_dtype"] == v4["torch_dtype"]
    assert hf["rope_parameters"].items() >= v5["rope_parameters"].items()
    assert (hf["rope_scaling"] or {}).items() >= (v4["rope_scaling"] or {}).items()


def test_shards_and_their_index(tmp_path):
    config, params = load_huggingface(DATA / "hf_plain")
    save_huggingface(tmp_path / "saved", config, params, shard_bytes=40_000)
    files = sorted(tmp_path.glob("saved/*.safetensors"))
    assert [f.name for f in files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    index = json.loads((tmp_path / "saved" / INDEX).read_text())
    total = 0
    for file in files:
        with safe_open(file, "numpy") as opened:  # the library's own check of the file
            assert opened.metadata() == {"format": "pt"}
            names = [name for name, home in index["weight_map"].items() if home == file.name]
            assert set(opened.keys()) == set(names)
            sizes = [opened.get_tensor(name).nbytes for name in names]
        assert sum(sizes) <= 40_000
        total += sum(sizes)
    assert index["metadata"]["total_size"] == total
    assert_equal_trees(load_huggingface(tmp_path / "saved")[1], params)


def test_saved_in_bfloat16(tmp_path):
    config, params = load_huggingface(DATA / "hf_plain")
    save_huggingface(tmp_path / "saved", config, params, dtype="bfloat16")
    name, want = "lm_head.weight", np.asarray(params["head"]["kernel"]).T
    stored = open_file(tmp_path / "saved/model.safetensors")[0][name]
    assert stored.dtype == DTYPES["BF16"]
    np.testing.assert_array_equal(stored.read(), want.astype(ml_dtypes.bfloat16))
    assert json.loads((tmp_path / "saved/config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("name", ["tape_base", "adatensor", "fire", "t5rb"])
def test_official_checkpoints_there_and_back(name, tmp_path):
    """Their names, and their tensors but for post_attention_linear, which acts by its row sums."""
    from tests.test_golden import load

    golden, config, params = load(name)
    save_huggingface(tmp_path / "saved", config, params, length=64)
    again, reloaded = load_huggingface(tmp_path / "saved")
    assert again.position == config.position
    assert_equal_trees(reloaded, params)
    want = {key[2:]: golden[key] for key in golden.files if key.startswith("w/")}
    ours, constants = tensors_of(tmp_path / "saved"), ("inv_freq", "init_L")
    assert ours.keys() == {key for key in want if not key.endswith(constants)}
    for tensor, x in ours.items():
        if "post_attention_linear" in tensor:
            np.testing.assert_array_equal(x, np.diag(np.diagonal(x)))
            np.testing.assert_allclose(np.diagonal(x), want[tensor].sum(1), rtol=1e-6)
        else:
            np.testing.assert_array_equal(x, want[tensor], tensor)
    check = logits(again, reloaded, golden["input_ids"])
    np.testing.assert_allclose(check, golden["logits"], atol=5e-5, rtol=0)


@pytest.mark.parametrize("name", [*AS_LLAMA, *OFFICIAL])
def test_every_encoding_that_is_read_is_written(name):
    hf = json.loads(str(np.load(DATA / f"{name}.npz")["config"]))
    encoding = read_position(hf)
    keys = write_position(tiny(position=encoding))
    assert read_position(keys) == encoding
    if name in OFFICIAL:
        assert keys["rpe_type"] == hf["rpe_type"]


@pytest.mark.parametrize(
    "scaling",
    [
        positions.LinearScaling(3.0),
        positions.DynamicNTKScaling(2.0, 128),
        positions.YarnScaling(4.0, 64),
        positions.YarnScaling(4.0, 64, 16.0, 2.0, 1.5),
        positions.Llama3Scaling(8.0, 8192, 1.0, 4.0),
    ],
)
def test_every_scaling_in_both_styles(scaling):
    rope = positions.RoPE(base=500.0, scaling=scaling)
    keys = write_position(tiny(position=rope))
    for other in ("rope_scaling", "rope_parameters"):
        assert read_position({key: x for key, x in keys.items() if key != other}) == rope


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position": positions.Tape()}, r"position\.post='full', only 'scalar'"),
        (
            {"position": positions.Tape(post="scalar", gate="hidden", unit=True)},
            r"position\.gate='hidden', only 'mlp'; position\.unit=True, only False",
        ),
        ({"position": positions.get("tape-fourier", post="scalar")}, r"position\.start="),
        (
            {"position": positions.Tape(post="scalar"), "num_kv_heads": 2},
            r"num_kv_heads=2: the official TAPE needs one per query head, 4",
        ),
        ({"position": positions.Kerple()}, r"position\.name='kerple' has no place.*these have"),
        (
            {"position": positions.RoPE(scaling=positions.NTKScaling(2.0))},
            r"position\.scaling\.name='ntk' has no place.*linear",
        ),
        ({"position": positions.Fire(width=8)}, r"position\.width=8, only 32"),
        ({"position": positions.RoPE(), "lora": LoRA()}, r"model\.lora has no place"),
    ],
)
def test_what_their_format_cannot_say(fields, message, tmp_path):
    config = tiny(**fields)
    with pytest.raises(ValueError, match=message):
        save_huggingface(tmp_path / "saved", config, random_params(config))
    assert not list(tmp_path.iterdir())


def test_whose_length_is_written():
    dynamic = positions.RoPE(scaling=positions.DynamicNTKScaling(2.0, 128))
    assert write_position(tiny(position=dynamic), 64)["max_position_embeddings"] == 128
    assert write_position(tiny(position="rope"), 64)["max_position_embeddings"] == 64


# --- Whole or not at all --------------------------------------------------------------------------


def test_a_target_that_exists_is_left_alone(tmp_path):
    config, params = load_huggingface(DATA / "hf_plain")
    (tmp_path / "saved").mkdir()
    with pytest.raises(FileExistsError, match="saved exists already"):
        save_huggingface(tmp_path / "saved", config, params)
    assert not list((tmp_path / "saved").iterdir())


def test_an_error_while_writing_leaves_nothing(tmp_path):
    config, params = load_huggingface(DATA / "hf_plain")

    def broken(names):
        yield from names[:5]
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        save_huggingface(tmp_path / "saved", config, params, track=broken)
    with pytest.raises(FileNotFoundError, match="tokenizer"):
        save_huggingface(tmp_path / "a", config, params, extra_files=[tmp_path / "tokenizer.json"])
    assert not list(tmp_path.iterdir())
