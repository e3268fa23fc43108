"""The official code's numbers, reproduced from its weights."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

from tape_jax import positions
from tape_jax.convert import from_huggingface
from tape_jax.model import Block
from tests.tiny import logits as run_logits
from tests.tiny import mostly_slow, run

DATA = Path(__file__).parent / "data"
TAPE = ["tape_base", "tape_linear2", "tape_shift37", "tape_zeroed"]
ROPE = ["rope", "rope_linear2", "rope_long80", "rope_shift37", "rope_gqa2"]
ABLATIONS = ["adamlp", "adattention", "adatensor", "adavector", "adawoeq", "adayarn"]
OTHERS = [
    *("alibi", "alibi_long80", "fire", "sincos", "t5rb", "t5rb_long80", "xpos"),
    *("rope_dynamic2", "rope_logscale", "yarn", "yarn_max80"),
]


def load(name, **overrides):
    """The file, and our config and parameters from its weights."""
    golden = np.load(DATA / f"{name}.npz")
    config = json.loads(str(golden["config"]))
    source = np.load(DATA / config["weights_from"]) if "weights_from" in config else golden
    weights = {key[2:]: source[key] for key in source.files if key.startswith("w/")}
    if name == "tape_zeroed":  # as its note says
        for key in weights:
            if "pe.up_proj" in key or "post_attention_linear" in key:
                weights[key] = np.zeros_like(weights[key])
    return golden, *from_huggingface(config, weights, **overrides)


def mean_loss(config, params, ids):
    logits = run_logits(config, params, ids)[:, :-1]
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:]).mean()


CASES = [
    *((name, scan) for name in (*TAPE, *ROPE, "nope") for scan in (True, False)),
    *((name, False) for name in (*ABLATIONS, *OTHERS)),
]


@pytest.mark.parametrize(("name", "scan"), CASES)
def test_forward(name, scan):
    golden, config, params = load(name, scan_layers=scan)
    ids = golden["input_ids"]
    logits, hidden, states = run(config, params, ids)
    np.testing.assert_allclose(logits, golden["logits"], atol=5e-5, rtol=0)
    if "hidden_states" in golden:
        np.testing.assert_allclose(hidden, golden["hidden_states"], atol=5e-5, rtol=0)
    if "pos_cos" in golden:
        cos, sin = np.split(np.asarray(states).transpose(0, 1, 3, 2, 4), 2, axis=-1)
        for ours, theirs in ((cos, golden["pos_cos"]), (sin, golden["pos_sin"])):
            if ours.shape[-1] < theirs.shape[-1]:  # our complex form: their halves are equal
                ours = np.concatenate([ours, ours], axis=-1)
            np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
    if "loss" in golden:
        np.testing.assert_allclose(mean_loss(config, params, ids), golden["loss"], atol=1e-5)
    plain = run_logits(config, params, ids)
    np.testing.assert_allclose(plain, golden["logits"], atol=5e-5, rtol=0)


def test_float64_logits():
    golden, config, params = load("tape_base")
    want = np.load(DATA / "tape_base_f64.npz")["logits_f64"]
    logits = run_logits(config, params, golden["input_ids"])
    np.testing.assert_allclose(logits, want, atol=5e-5, rtol=0)


@pytest.mark.parametrize(
    ("remat", "scan", "attention"),
    [
        ("none", True, "reference"),
        ("none", False, "xla"),
        ("full", True, "xla"),
        ("attention", False, "reference"),
        ("attention", True, "xla"),
        ("dots", True, "reference"),
    ],
)
def test_every_gradient_of_tape_base(remat, scan, attention):
    golden, config, params = load("tape_base", scan_layers=scan, remat=remat, attention=attention)
    ids = jnp.asarray(golden["input_ids"])
    ours = jax.jit(jax.grad(lambda p: mean_loss(config, p, ids)))(params)
    names = [key[5:] for key in golden.files if key.startswith("grad/")]
    theirs = {name: golden[f"grad/{name}"] for name in names if "inv_freq" not in name}

    # The gradient of a row sum is the same in every column of the row.
    post = {n: g for n, g in theirs.items() if "post_attention_linear" in n}
    for gradient in post.values():
        np.testing.assert_allclose(gradient, gradient[:, :1] + 0 * gradient, atol=1e-7)
    summed = theirs | {n: g / g.shape[1] for n, g in post.items()}
    frequencies = {"model.rotary_emb.inv_freq": golden["w/model.rotary_emb.inv_freq"]}
    _, want = from_huggingface(json.loads(str(golden["config"])), summed | frequencies)

    compared = jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5, rtol=0), ours, want
    )
    assert len(jax.tree.leaves(ours)) == len(jax.tree.leaves(want))
    assert compared is not None
    assert float(jnp.abs(ours["layers"]["position"]["w1"][:-1]).max()) > 1e-3


@pytest.mark.parametrize(
    "name", mostly_slow([*ABLATIONS, "fire", "t5rb"], quick=["adavector", "fire"])
)
def test_gradients_of_what_encodings_learn(name):
    """Every small gradient of the file: position parameters and norms."""
    golden, config, params = load(name)
    ids = jnp.asarray(golden["input_ids"])
    ours = jax.jit(jax.grad(lambda p: mean_loss(config, p, ids)))(params)

    hf, skipped = json.loads(str(golden["config"])), "inv_freq"
    weights = {key[2:]: golden[key] for key in golden.files if key.startswith("w/")}
    theirs = {name: golden[f"grad/{name}"] for name in weights if f"grad/{name}" in golden.files}
    theirs = {
        # The gradient of a row sum is the same in every column of the row.
        name: g / g.shape[1] if "post_attention_linear" in name else g
        for name, g in theirs.items()
        if skipped not in name
    }
    marked = {name: np.full_like(w, np.nan) for name, w in weights.items()}
    constants = {n: w for n, w in weights.items() if skipped in n or "init_L" in n}
    _, want = from_huggingface(hf, marked | constants | theirs)
    compared = 0
    for path, expected in jax.tree_util.tree_leaves_with_path(want):
        known = ~np.isnan(np.asarray(expected))  # what the file has: rows of the last layer lack
        got = functools.reduce(lambda tree, key: tree[key.key], path, ours)
        np.testing.assert_allclose(np.asarray(got)[known], expected[known], atol=1e-5, rtol=0)
        compared += known.sum() * ("position" in str(path))
    assert compared >= 12


def test_official_rope_ignores_theta():
    golden, config, params = load("rope_theta500k", position=positions.RoPE())
    np.testing.assert_allclose(
        run_logits(config, params, golden["input_ids"]), golden["logits"], atol=5e-5, rtol=0
    )


def test_randomized_with_its_stored_positions():
    """The official code draws positions anew in every layer; here each block is given its own."""
    golden, config, params = load("randrope")
    encoding, x = config.position, jnp.asarray(golden["hidden_states"][0])
    for layer, where in enumerate(golden["positions"]):
        where = jnp.asarray(where)[None]
        own = jax.tree.map(lambda p, layer=layer: p[layer], params["layers"])
        state = encoding.initial_state(where, config)
        x, _, _ = jax.jit(Block(config).apply)({"params": own}, x, state, where, None)
        np.testing.assert_allclose(x, golden["hidden_states"][layer + 1], atol=5e-5, rtol=0)
    drawn = golden["positions"]
    assert drawn.max() < encoding.max_position and (np.diff(drawn, axis=1) > 0).all()


@pytest.mark.parametrize("style", ["config.json", "config_v4.json"])
def test_yarn_is_hugging_faces(style):
    folder = DATA / "hf_yarn"
    golden = np.load(folder / "golden.npz")
    config, params = from_huggingface(
        json.loads((folder / style).read_text()), load_file(folder / "model.safetensors")
    )
    for ids, want in (("input_ids", "logits"), ("input_ids_long", "logits_long")):
        got = run_logits(config, params, golden[ids])
        np.testing.assert_allclose(got, golden[want], atol=5e-5, rtol=0)


def test_zero_start_is_rope_exactly():
    golden, config, params = load("tape_zeroed")
    _, rope_config, _ = load("rope")
    rope_params = jax.tree.map(lambda x: x, params)
    del rope_params["layers"]["position"]
    ids = golden["input_ids"]
    tape = run_logits(config, params, ids)
    rope = run_logits(rope_config, rope_params, ids)
    np.testing.assert_array_equal(tape, rope)


@pytest.mark.parametrize("name", ["tape_base", "rope_gqa2", "nope"])
def test_left_padding_changes_nothing_real(name):
    golden, config, params = load(name)
    ids, pad = golden["input_ids"], 5
    alone, hidden, states = run(config, params, ids)
    padded = np.concatenate([np.full((len(ids), pad), 96), ids], axis=1)
    segments = np.where(np.arange(padded.shape[1]) < pad, -1, 0)[None].repeat(len(ids), 0)
    logits, hidden_padded, states_padded = run(
        config, params, padded, segment_ids=jnp.asarray(segments)
    )
    np.testing.assert_allclose(logits[:, pad:], alone, atol=5e-5, rtol=0)
    np.testing.assert_allclose(hidden_padded[:, :, pad:], hidden, atol=5e-5, rtol=0)
    # Positions can restart after the padding; then the states are the unpadded ones too.
    positions = jnp.maximum(jnp.arange(padded.shape[1]) - pad, 0)[None].repeat(len(ids), 0)
    logits, _, states_padded = run(
        config, params, padded, segment_ids=jnp.asarray(segments), positions=positions
    )
    np.testing.assert_allclose(logits[:, pad:], alone, atol=5e-5, rtol=0)
    if states is not None and name == "tape_base":
        np.testing.assert_allclose(states_padded[:, :, pad:], states, atol=1e-4, rtol=0)
