"""Comparisons: what is trained, what is repeated, what is reported."""

import dataclasses
import json
import math
import signal

import pytest

from tape_jax import positions
from tests.train.small import losses, small
from train import compare as command
from train.checkpoint import ConfigChangedError
from train.compare import compare, main, plan
from train.loop import NonFiniteError

pytestmark = [pytest.mark.multidevice, pytest.mark.slow]


def comparison(workdir):
    record = json.loads((workdir / "comparison.json").read_text())
    return record, {row["encoding"]: row for row in record["encodings"]}


def report(workdir):
    return (workdir / "report.md").read_text()


def tiny_run(**fields):
    return small(**{"steps": 3, "log_every": 1} | fields)


def test_every_encoding_with_every_seed_and_nothing_twice(tmp_path):
    config = tiny_run()
    compare(config, ["rope", "tape"], [0, 1], tmp_path)
    record, rows = comparison(tmp_path)
    for run in record["runs"]:
        grid = f"{run['encoding']}/seed-{run['seed']}/eval/step-00000003/grid.json"
        assert run["scores"]["mean"] == json.loads((tmp_path / grid).read_text())["mean"]
    assert len(record["runs"]) == 4
    for name, row in rows.items():
        means = [r["scores"]["mean"] for r in record["runs"] if r["encoding"] == name]
        assert row["scores"]["mean"]["mean"] == pytest.approx(sum(means) / 2)
        assert (row["scores"]["mean"]["min"], row["scores"]["mean"]["max"]) == (
            min(means),
            max(means),
        )
    # post (2 x 2), the position MLP's two factors (8 x 2) and its gate (16 x 8), in both layers.
    assert rows["tape"]["parameters"] - rows["rope"]["parameters"] == 2 * (4 + 2 * 16 + 128)
    assert "position" not in record["config"]["model"] and "All 4 runs" in report(tmp_path)
    assert str(tmp_path) not in report(tmp_path)
    for picture in ("evaluations.png", "losses.png"):
        assert (tmp_path / picture).read_bytes()[:4] == b"\x89PNG"
    assert losses(tmp_path / "rope/seed-0") != losses(tmp_path / "rope/seed-1")

    before = {run: losses(tmp_path / run) for run in ("rope/seed-0", "tape/seed-1")}
    (tmp_path / "report.md").unlink()
    compare(config, ["rope", "tape"], [0, 1], tmp_path)
    assert before == {run: losses(tmp_path / run) for run in before}
    assert "All 4 runs" in report(tmp_path)


def test_a_run_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    honest = command.train

    def train(config, workdir):
        if config.model.position.name == "nope":
            raise NonFiniteError("step 2: loss nan")
        return honest(config, workdir)

    monkeypatch.setattr(command, "train", train)
    compare(tiny_run(), ["nope", "rope"], [0], tmp_path)
    _, rows = comparison(tmp_path)
    assert rows["nope"]["notes"] == ["seed 0: step 2: loss nan"] and not rows["nope"]["scores"]
    assert "1 of 2 runs are finished" in report(tmp_path)
    assert rows["rope"]["scores"]["mean"]["mean"] >= 0


def test_an_encoding_that_cannot_carry_the_model_is_reported(tmp_path):
    config = tiny_run()
    model = dataclasses.replace(config.model, position=positions.NoPE(), head_dim=5)
    config = dataclasses.replace(config, model=model)
    compare(config, ["rope", "nope"], [0], tmp_path)
    record, rows = comparison(tmp_path)
    assert [run["encoding"] for run in record["runs"]] == ["nope"]
    assert "model.head_dim=5 must be even" in rows["rope"]["notes"][0]
    assert "must be even" in report(tmp_path) and not (tmp_path / "rope").exists()
    with pytest.raises(ValueError, match=r"no encoding carries 'addition-demo':\n  rope: .*even"):
        plan(config, ["rope"], [0], tmp_path)


def test_all_is_checked_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="unknown positional encoding 'rop'; did you mean rope"):
        compare(tiny_run(), ["tape", "rop"], [0], tmp_path)
    with pytest.raises(ValueError, match="steps=0 must be >= 1"):
        compare(tiny_run(steps=0), ["tape"], [0], tmp_path)
    assert not any(tmp_path.iterdir())
    compare(tiny_run(), ["nope"], [0], tmp_path)
    with pytest.raises(ConfigChangedError, match="steps: 3 -> 4"):
        compare(tiny_run(steps=4), ["nope"], [0], tmp_path)


def test_a_signal_ends_the_comparison_and_the_same_command_continues(tmp_path, monkeypatch):
    config, honest = tiny_run(), command.train

    def train(config, workdir):
        step = honest(config, workdir)
        signal.raise_signal(signal.SIGTERM)  # between two runs
        return step

    with monkeypatch.context() as patch:
        patch.setattr(command, "train", train)
        compare(config, ["nope", "rope"], [0], tmp_path)
    _, rows = comparison(tmp_path)
    assert rows["rope"]["notes"] == ["seed 0: not finished"] and not losses(
        tmp_path / "rope/seed-0"
    )
    assert "1 of 2 runs" in report(tmp_path)
    compare(config, ["nope", "rope"], [0], tmp_path)
    assert "All 2 runs" in report(tmp_path)
    assert all(math.isfinite(loss) for _, loss in losses(tmp_path / "rope/seed-0"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model.position.name rope", "model.position varies in a comparison: give --encodings"),
        ("--seed 3", "seed varies in a comparison: give --seeds"),
    ],
)
def test_what_varies_is_not_set(tmp_path, monkeypatch, flags, message):
    arguments = f"compare --config addition-demo --encodings tape --workdir {tmp_path} {flags}"
    monkeypatch.setattr("sys.argv", arguments.split())
    with pytest.raises(SystemExit, match=message):
        main()
