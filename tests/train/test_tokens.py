"""Language modelling on token files: windows, bad files, perplexity, the C4 config, a whole run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import configs
from tape_jax import Transformer, positions
from tests.tiny import logits, random_params, tiny
from tests.train.small import losses, small
from train.config import TrainConfig, from_dict, to_dict
from train.data.tokens import Tokens, TokensSource
from train.evals.runner import Scorer
from train.evals.tokens import draw_comparison
from train.loop import train
from train.mesh import MeshConfig, make_mesh
from train.optimizer import OptimizerConfig, make_schedule
from train.step import count_parameters

IDS = np.random.default_rng(0).integers(0, 31, 300)


def write(folder, name="ids.bin", ids=IDS):
    (folder / name).write_bytes(np.asarray(ids, "<u2").tobytes())
    return str(folder / name)


def task_on(folder, **fields):
    path = write(folder)
    sizes = {"sequence_length": 8, "vocab_size": 31, "eval_windows": 6, "eval_lengths": (16, 4)}
    return Tokens(**{"train_file": path, "eval_file": path} | sizes | fields)


def visited(source, epoch):
    """First tokens of the windows of a pass over ids 0, 1, 2, ..."""
    count = len(source.ids) // source.length
    return [int(source[epoch * count + i]["tokens"][0]) for i in range(count)]


def test_a_pass_visits_every_window_once_in_an_order_of_its_own():
    source = TokensSource(np.arange(1003, dtype="<u2"), 10, seed=3)
    passes = [visited(source, epoch) for epoch in range(4)]
    for starts in passes:
        covered = np.concatenate([(start + np.arange(10)) % 1003 for start in starts])
        assert len(set(covered.tolist())) == 1000
        assert np.mean(np.diff(starts) == 10) < 0.1
    assert len({min(starts) % 10 for starts in passes}) > 1  # the boundaries move
    ranks = [np.argsort(np.argsort(starts)).tolist() for starts in passes]
    assert all(ranks[0] != other for other in ranks[1:])


def test_samples_are_a_function_of_seed_and_index():
    ids = np.arange(1003, dtype="<u2")
    source, again, other = (TokensSource(ids, 10, seed) for seed in (3, 3, 4))
    for index in (0, 999, 10**9):
        sample = source[index]
        np.testing.assert_array_equal(sample["targets"], (sample["tokens"] + 1) % 1003)
        np.testing.assert_array_equal(sample["tokens"], again[index]["tokens"])
        assert sample["tokens"].dtype == sample["targets"].dtype == np.int32
        assert sample["weights"].tolist() == [1.0] * 10
    assert visited(source, 0) != visited(other, 0)


def test_every_token_is_scored_once_at_every_length(tmp_path):
    task = task_on(tmp_path)
    assert task.lengths == [4, 8, 16]
    for length in task.lengths:
        samples = list(task.held_out(length))
        tokens, targets = (
            np.concatenate([s[key] for s in samples]) for key in ("tokens", "targets")
        )
        np.testing.assert_array_equal(tokens, IDS[:48])
        np.testing.assert_array_equal(targets, IDS[1:49])
    rows = task.probe(0, 5)
    scored = {tuple(IDS[i : i + 8]) for i in range(41)}
    assert rows.shape == (5, 8) and set(map(tuple, rows)) <= scored


def test_exact_sizes_are_enough(tmp_path):
    task_on(tmp_path, eval_file=write(tmp_path, "eval.bin", IDS[:49])).validate()
    task_on(tmp_path, train_file=write(tmp_path, "train.bin", IDS[:9])).validate()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sequence_length": 0}, "task.sequence_length=0 must be >= 1"),
        ({"eval_windows": 0}, "task.eval_windows=0 must be >= 1"),
        ({"vocab_size": 0}, r"task.vocab_size=0 must lie in \[1, 2147483647\]"),
        ({"vocab_size": 70_000}, r"task.train_file=.* uint16 and task.vocab_size=70000.*\.npy"),
        ({"filler": 31}, "task.filler=31 must lie in .*task.vocab_size=31"),
        ({"eval_lengths": (16, 7)}, r"task.eval_lengths=\(16, 7\): 7 must divide .*=48"),
        ({"eval_lengths": (0,)}, r"task.eval_lengths=\(0,\): 0 must divide"),
        ({"train_file": "nowhere.bin"}, "task.train_file='nowhere.bin' is not a file: .*uint16"),
        ({"eval_file": ""}, "task.eval_file='' is not a file"),
        ({"sequence_length": 300, "eval_lengths": ()}, "300 tokens and 301 are needed.*lower task"),
        ({"eval_windows": 38}, "300 tokens and 305 are needed: .*lower task.eval_windows=38"),
        ({"vocab_size": 30}, "task.train_file=.* holds token id 30, but task.vocab_size=30"),
    ],
)
def test_what_cannot_work_is_named(tmp_path, fields, message):
    with pytest.raises(ValueError, match=message):
        task_on(tmp_path, **fields).validate()


def test_files_that_hold_no_ids(tmp_path):
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"\0" * 101)
    with pytest.raises(ValueError, match=r"task.train_file=.*odd number of bytes, 101"):
        task_on(tmp_path, train_file=str(odd)).validate()
    with pytest.raises(ValueError, match=r"task.eval_file=.*holds 0 tokens and 49 are needed"):
        task_on(tmp_path, eval_file=write(tmp_path, "empty.bin", [])).validate()


def test_arrays_hold_ids_beyond_uint16(tmp_path):
    path = str(tmp_path / "ids.npy")
    ids = IDS.astype("<u4") + 100_000
    np.save(path, ids)
    task = task_on(tmp_path, train_file=path, eval_file=path, vocab_size=128_256)
    task.validate()
    first = next(task.held_out(8))
    np.testing.assert_array_equal(first["tokens"], ids[:8])
    np.testing.assert_array_equal(first["targets"], ids[1:9])
    assert first["tokens"].dtype == np.int32
    with pytest.raises(ValueError, match=r"token id 100030, but task.vocab_size=100030"):
        dataclasses.replace(task, vocab_size=100_030).validate()


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (IDS, r"int64 of shape \(300,\): write one row of unsigned integers"),
        (IDS.astype("u2").reshape(3, 100), r"uint16 of shape \(3, 100\)"),
        (np.float32([1.0]), "float32"),
    ],
)
def test_arrays_that_hold_no_ids(tmp_path, array, message):
    path = tmp_path / "ids.npy"
    np.save(path, array)
    with pytest.raises(ValueError, match=f"task.train_file=.*ids.npy' holds {message}"):
        task_on(tmp_path, train_file=str(path)).validate()
    path.write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match=r"task.train_file=.* is not an array as NumPy writes"):
        task_on(tmp_path, train_file=str(path)).validate()


def test_perplexity_is_counted_by_hand(tmp_path):
    config = tiny()
    params, mesh, task = random_params(config), make_mesh(MeshConfig()), task_on(tmp_path)
    with jax.set_mesh(mesh):
        scorer = Scorer(Transformer(config), params, mesh, tokens_per_device=32)
        summary = task.evaluate(scorer, 0, tmp_path)
    record = json.loads((tmp_path / "loss.json").read_text())
    assert list(summary) == ["perplexity", "perplexity_4", "perplexity_16"]
    for name, length in zip(summary, (8, 4, 16), strict=True):
        tokens, targets = IDS[:48].reshape(-1, length), IDS[1:49].reshape(-1, length)
        scores = jax.nn.log_softmax(logits(config, params, tokens))
        expected = -np.take_along_axis(np.asarray(scores), targets[..., None], -1)[..., 0]
        np.testing.assert_allclose(
            record["by_position"][str(length)], expected.mean(axis=0), atol=1e-4
        )
        np.testing.assert_allclose(record["loss"][str(length)], expected.mean(), rtol=1e-5)
        np.testing.assert_allclose(summary[name], np.exp(expected.mean()), rtol=1e-4)
    assert record["train_length"] == 8 and record["scored_tokens"] == 48
    assert (tmp_path / "loss.png").read_bytes()[:4] == b"\x89PNG"
    figure = draw_comparison({"rope": [tmp_path, tmp_path], "tape": [tmp_path]})
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert {"rope", "tape"} <= set(labels)


def test_scorer_gives_nothing_for_what_is_not_scored():
    config = tiny()
    row = {"tokens": IDS[:8], "targets": IDS[1:9], "weights": np.float32([0, 1] * 4)}
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        scorer = Scorer(Transformer(config), random_params(config), mesh, tokens_per_device=32)
        found = scorer.losses([row], 1)
    scores = logits(config, random_params(config), IDS[None, :8])
    expected = optax.softmax_cross_entropy_with_integer_labels(scores, IDS[None, 1:9])
    np.testing.assert_allclose(found, expected * row["weights"], rtol=1e-4)


# --- The paper's C4 run ---------------------------------------------------------------------------


def c4(encoding):
    config = configs.get("c4-155m")
    model = dataclasses.replace(config.model, position=positions.get(encoding))
    return dataclasses.replace(config, model=model)


@pytest.mark.parametrize("encoding", [*positions.ENCODINGS, *positions.VARIANTS])
def test_c4_takes_every_encoding(encoding):
    config = c4(encoding)
    assert from_dict(TrainConfig, to_dict(config)) == config
    longest = config.task.lengths[-1]
    assert config.model.position.default_positions(longest).shape == (1, longest)


def test_c4_is_the_papers():
    config = configs.get("c4-155m")
    assert config.batch_size * config.task.length * config.steps == 5_242_880_000
    rate = make_schedule(config.optimizer, config.steps)
    for step, expected in ((0, 0.0), (200, 1e-4), (5_100, (1e-4 + 1e-7) / 2), (10_000, 1e-7)):
        np.testing.assert_allclose(rate(step), expected, rtol=1e-4)
    tokens = jnp.zeros((1, 1), jnp.int32)
    rope, tape = (
        count_parameters(
            jax.eval_shape(Transformer(c4(name).model).init, jax.random.key(0), tokens)
        )
        for name in ("rope", "tape")
    )
    assert (rope, tape - rope) == (162_417_408, 457_920)


def test_c4_without_its_files():
    missing = "task.train_file='data/c4/nothing.bin' is not a file"
    config = configs.get("c4-155m")
    task = dataclasses.replace(config.task, train_file="data/c4/nothing.bin")
    with pytest.raises(ValueError, match=missing):
        dataclasses.replace(config, task=task).validate()


# --- A whole run ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.multidevice
def test_a_repeating_text_is_learned_and_a_run_resumes_exactly(tmp_path):
    """Two thirds of the way and then the rest are, bit for bit, the whole way."""
    path = write(tmp_path, ids=np.resize(IDS[:7], 20_000))
    config = small(
        model=tiny(num_layers=2),
        task=task_on(
            tmp_path, train_file=path, eval_file=path, sequence_length=16, eval_lengths=(32,)
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, schedule="constant"),
        steps=60,
        save_every=20,
    )
    train(config, tmp_path / "whole")
    train(dataclasses.replace(config, steps=40), tmp_path / "parts")
    train(config, tmp_path / "parts", allow_config_change=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    by_step = [loss for _, loss in losses(tmp_path / "whole")]
    assert by_step[0] > 3.0 and by_step[-1] < 1.0
    folder = tmp_path / "whole/eval/step-00000060"
    record = json.loads((folder / "loss.json").read_text())
    assert 1.0 <= record["perplexity"] < 3.0
    assert (folder / "loss.png").exists() and (tmp_path / "whole/report.md").exists()
