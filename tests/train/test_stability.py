"""The stability study: what a shift cannot change, what it must, and the files."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from tape_jax import positions
from tests.tiny import logits, random_params, tiny, tokens
from tests.train.small import small
from train.checkpoint import Checkpoints, keep_config
from train.data.pipeline import batches
from train.evals.stability import MOVED_BY, changes, observe, relative_change
from train.evaluate import main
from train.step import make_state

FILLER = 2


@dataclasses.dataclass(frozen=True)
class Absolute(positions.Encoding):
    """Adds a wave to the embeddings: a shift is seen by every layer."""

    name: str = "absolute"

    def embed(self, x, positions):
        return x + jnp.sin(positions[..., None] * (1.0 + jnp.arange(x.shape[-1])))


def measure(position, **fields):
    config = tiny(position=position, **fields)
    return changes(
        config, random_params(config, scale=0.2), tokens(config).astype(np.int32), FILLER
    )


@pytest.mark.parametrize("position", ["rope", positions.Tape(), positions.Tape(block=(2, 4))])
def test_a_shift_changes_nothing_for_relative_encodings(position):
    found = measure(position, scan_layers=True, remat="full")
    assert max(found["attention"]["shift"]) < 1e-5
    assert max(found["state"]["shift"]) < 1e-5


def test_without_positions_a_shift_is_no_shift_and_there_is_no_state():
    found = measure("nope")
    assert found["attention"]["shift"] == [0.0, 0.0, 0.0] and found["state"] is None
    assert min(found["attention"]["prefix"]) > 1e-2


def test_an_absolute_encoding_sees_the_shift():
    assert min(measure(Absolute())["attention"]["shift"]) > 1e-2


def test_a_prefix_changes_states_from_the_first_update_on():
    """Layer 1 reads the start, a rotated copy; later states hold what was read from the prefix."""
    assert max(measure("rope")["state"]["prefix"]) < 1e-5
    first, *later = measure("tape")["state"]["prefix"]
    assert first < 1e-5 and min(later) > 1e-3


@pytest.mark.parametrize("position", ["rope", "tape"])
def test_in_the_first_layer_a_prefix_only_takes_probability(position):
    """Among the sentence's own tokens the probabilities keep their ratios."""
    config = tiny(position=position)
    params, row = random_params(config), tokens(config, batch=1)
    longer = np.pad(row, ((0, 0), (MOVED_BY, 0)), constant_values=FILLER)
    at = jnp.arange(longer.shape[1])[None]
    still = observe(config, params, row, at[:, : row.shape[1]])["attention"][0]
    moved = observe(config, params, longer, at)["attention"][0][..., MOVED_BY:, MOVED_BY:]
    np.testing.assert_allclose(moved / moved.sum(-1, keepdims=True), still, atol=1e-5)
    assert relative_change(moved[None], still[None]) > 1e-2


def test_the_maps_are_those_of_the_model():
    """Rows of probabilities, causal; and watching changes no logits."""
    config = tiny(num_kv_heads=2)
    params, row = random_params(config), tokens(config)
    before = logits(config, params, row)
    seen = observe(config, params, row, jnp.arange(row.shape[1])[None])
    assert seen["attention"].shape == (3, 2, 4, 12, 12) and seen["state"].shape == (3, 2, 2, 12, 12)
    np.testing.assert_allclose(seen["attention"].sum(-1), 1.0, rtol=1e-5)
    assert float(jnp.triu(seen["attention"], 1).max()) == 0.0
    np.testing.assert_array_equal(logits(config, params, row), before)


def test_relative_change_by_hand():
    still = jnp.zeros((1, 1, 1, 2, 2)).at[..., 0, 0].set(3.0).at[..., 1, 1].set(4.0)
    moved = still.at[..., 0, 1].set(0.5)
    np.testing.assert_allclose(relative_change(moved, still), [[0.1]], rtol=1e-6)


def untrained(workdir, name):
    config = small()
    model = dataclasses.replace(config.model, position=positions.get(name))
    config = dataclasses.replace(config, model=model)
    keep_config(workdir, config)
    checkpoints = Checkpoints(workdir)
    checkpoints.save(0, make_state(config, 0), batches(config.task.source(0), 16))
    checkpoints.close()
    return str(workdir)


@pytest.mark.slow
@pytest.mark.multidevice
def test_the_command(tmp_path, capsys):
    runs = [untrained(tmp_path / name, name) for name in ("nope", "tape")]
    out = tmp_path / "out"
    main(["stability", "--workdirs", *runs, "--out", str(out), "--sequences", "2"])
    record = json.loads((out / "stability.json").read_text())
    nope, tape = (run["changes"] for run in record["runs"])
    assert nope["state"] is None and len(tape["state"]["prefix"]) == 2
    assert max(tape["attention"]["shift"]) < 1e-5
    assert "is not known" in record["definition"]
    assert (out / "stability.png").read_bytes()[:4] == b"\x89PNG"
    assert "relative change when the sentence is moved" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("stabilty --workdirs A", "unknown command 'stabilty'; did you mean stability"),
        ("stability --workdirs A --out B", "A holds no run"),
        ("stability --workdirs A --out B --sequences 0", "sequences=0 must be >= 1"),
        ("--workdir A", "A holds no run"),
        ("task --workdir A", "A holds no run"),
    ],
)
def test_bad_command_lines(arguments, message):
    with pytest.raises(SystemExit, match=message):
        main(arguments.split())
