"""Folders of Hugging Face in tests/data, and what to compare with them."""

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from tape_jax.convert.start import flatten
from tests.tiny import logits

DATA = Path(__file__).parent / "data"
FOLDERS = ["hf_plain", "hf_sharded", "hf_gqa_tied", "hf_bias", "hf_linear", "hf_yarn"]


def tensors_of(folder):
    every = {}
    for file in sorted(folder.glob("*.safetensors")):
        every |= load_file(file)
    return every


def check_logits(config, params, golden, atol=5e-5):
    for ids, want in (("input_ids", "logits"), ("input_ids_long", "logits_long")):
        got = logits(config, params, golden[ids])
        np.testing.assert_allclose(got, golden[want], atol=atol, rtol=0)


def assert_equal_trees(ours, theirs):
    assert flatten(ours).keys() == flatten(theirs).keys()
    for path, x in flatten(ours).items():
        np.testing.assert_array_equal(np.asarray(x), np.asarray(flatten(theirs)[path]), path)
