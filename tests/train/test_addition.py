"""The addition task: samples by index, the scored places, and the evaluation's one-pass trick."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import Transformer
from tests.tiny import logits, random_params, tiny
from train.data.addition import END, PAD, Addition, decode, encode, row, row_length
from train.data.pipeline import HostRows, batches, to_device
from train.evals.addition import summarise
from train.evals.runner import Interrupted, Scorer
from train.mesh import MeshConfig, make_mesh

TASK = Addition(max_digits=3, eval_digits=4, eval_examples=3)


def read(sample, reverse=True):
    """(a, b, c) of a row."""
    text = decode(sample["tokens"]).rstrip("?")
    left, right = text.split("=")
    turn = (lambda s: s[::-1]) if reverse else (lambda s: s)
    return tuple(int(turn(s)) for s in (*left.split("+"), right))


def test_tokens_are_the_official_ones():
    assert encode("0123456789+-x= ") == list(range(4, 19))
    sample = row(12, 345, 15, reverse=True)
    # 21+543=753, its end mark, and the scored places: c and the end mark.
    assert decode(sample["tokens"]) == "21+543=753"
    assert sample["tokens"].tolist()[:10] == encode("21+543=753")
    assert sample["tokens"][10] == END and (sample["tokens"][11:] == PAD).all()
    scored = sample["targets"][sample["weights"] == 1].tolist()
    assert scored == [*encode("753"), END]
    np.testing.assert_array_equal(sample["tokens"][1:], sample["targets"][:-1])
    assert decode(row(12, 345, 15, reverse=False)["tokens"]) == "12+345=357"


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("sampling", ["bucket", "uniform"])
def test_samples_are_right_and_cover_every_length(reverse, sampling):
    source = Addition(max_digits=3, length_sampling=sampling, reverse=reverse).source(seed=5)
    seen = {}
    for index in range(18 * 9):
        sample = source[index]
        a, b, c = read(sample, reverse)
        assert a + b == c and a > 0 and b > 0
        assert sample["tokens"].shape == (row_length(3),)
        pair = (len(str(a)), len(str(b)))
        seen[pair] = seen.get(pair, 0) + 1
    assert set(seen) == {(i, j) for i in (1, 2, 3) for j in (1, 2, 3)}
    if sampling == "bucket":
        assert set(seen.values()) == {18}


def test_longest_sum_fits():
    sample = row(999, 999, row_length(3), reverse=True)
    assert sample["targets"][-1] == END and sample["weights"][-1] == 1
    assert decode(sample["targets"]) == "99+999=8991"


def test_sample_i_is_the_same_for_everyone():
    first, again = TASK.source(1), TASK.source(1)
    for i in (0, 7, 10**9):
        np.testing.assert_array_equal(first[i]["tokens"], again[i]["tokens"])
    other = TASK.source(2)
    assert any((first[i]["tokens"] != other[i]["tokens"]).any() for i in range(5))
    assert len({tuple(first[i]["tokens"]) for i in range(200)}) > 150


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_global_batches_do_not_depend_on_the_hosts(processes):
    source = TASK.source(0)
    hosts = [HostRows(source, 8, p, processes) for p in range(processes)]
    local = 8 // processes
    for step in range(3):
        rows = [h[step * local + r]["tokens"] for h in hosts for r in range(local)]
        want = [source[step * 8 + r]["tokens"] for r in range(8)]
        np.testing.assert_array_equal(rows, want)


def test_iterator_state_is_exact():
    iterator = batches(TASK.source(0), 4)
    for _ in range(3):
        next(iterator)
    state, want = iterator.get_state(), [next(iterator)["tokens"] for _ in range(3)]
    again = batches(TASK.source(0), 4)
    again.set_state(state)
    np.testing.assert_array_equal([next(again)["tokens"] for _ in range(3)], want)


def test_ids_beyond_the_vocabulary_are_refused_on_the_host():
    batch = next(batches(TASK.source(0), 8))
    with pytest.raises(ValueError, match=r"token id 17, but model.vocab_size=10"):
        to_device(batch, make_mesh(MeshConfig()), 10)


@pytest.mark.parametrize("field", ["max_digits", "eval_digits", "eval_examples"])
def test_no_digits(field):
    with pytest.raises(ValueError, match=rf"task.{field}=0 must be >= 1"):
        Addition(**{field: 0}).validate()


def greedy_exact_match(config, params, sample):
    """Decode token by token from the prompt, as a user would, and compare."""
    scored = np.flatnonzero(sample["weights"])
    ids = list(sample["tokens"][: scored[0] + 1])
    answer = []
    for _ in scored:
        padded = np.zeros((1, len(sample["tokens"]) + 1), np.int32)
        padded[0, : len(ids)] = ids
        token = int(logits(config, params, padded)[0, len(ids) - 1].argmax())
        ids.append(token)
        answer.append(token)
    return answer == sample["targets"][scored].tolist()


def test_one_pass_exact_match_is_greedy_decoding():
    """On a model that gets some right: biased towards the answers by its head."""
    config = tiny(vocab_size=19, hidden_size=16, num_heads=2, num_layers=1)
    task = Addition(max_digits=1, eval_digits=1, eval_examples=60)
    samples = list(task.cell(1, 1, seed=0))
    params = random_params(config, seed=3)
    params = _fit(config, params, samples[:30])
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        scorer = Scorer(Transformer(config), params, mesh, tokens_per_device=32)
        got = scorer.exact_matches(samples, len(samples))
    want = [greedy_exact_match(config, params, s) for s in samples]
    np.testing.assert_array_equal(got, want)
    assert 0 < sum(want) < len(want)


def _fit(config, params, samples):
    """A few steps on the samples, so that some answers are right and some are not."""
    import optax

    from train.step import loss_sums

    batch = jax.tree.map(lambda *rows: jnp.asarray(np.stack(rows)), *samples)
    tx = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda p: loss_sums(p, Transformer(config), batch)[0])(params)
        updates, state = tx.update(grads, state)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for _ in range(60):
        params, state = step(params, state)
    return params


def test_an_evaluation_can_be_stopped():
    config = tiny(vocab_size=19)
    mesh = make_mesh(MeshConfig())
    scorer = Scorer(Transformer(config), random_params(config), mesh, stop=lambda: True)
    with pytest.raises(Interrupted):
        scorer.exact_matches(TASK.cell(1, 1, 0), 3)


def test_grid_files(tmp_path):
    config = tiny(vocab_size=19)
    mesh = make_mesh(MeshConfig())
    done = []
    with jax.set_mesh(mesh):
        scorer = Scorer(
            Transformer(config),
            random_params(config),
            mesh,
            tokens_per_device=64,
            progress=lambda *seen: done.append(seen),
        )
        summary = TASK.evaluate(scorer, 0, tmp_path)
    record = json.loads((tmp_path / "grid.json").read_text())
    assert np.shape(record["grid"]) == (4, 4) and record["train_digits"] == 3
    assert record["mean"] == summary["mean"] and done[-1] == (48, 48)
    assert (tmp_path / "grid.png").read_bytes()[:4] == b"\x89PNG"


def test_averages():
    grid = np.zeros((4, 4))
    grid[:2, :2], grid[3, 3] = 0.5, 1.0
    assert summarise(grid, 2) == {"in_range": 0.5, "beyond": 1 / 12, "mean": 3 / 16}
    assert summarise(grid, 4) == {"in_range": 3 / 16, "mean": 3 / 16}
