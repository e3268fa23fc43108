"""Whole runs, in this process on eight devices: seeds, configs, damage, bad numbers."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from tests.train.small import losses, small
from train import config as train_config
from train.checkpoint import ConfigChangedError
from train.config import to_dict
from train.data.addition import Addition
from train.evaluate import evaluate_checkpoint
from train.loop import NonFiniteError, train

pytestmark = pytest.mark.multidevice


def test_a_run_leaves_everything_behind(tmp_path, capsys):
    config = small(eval_every=4)
    assert train(config, tmp_path) == 8
    assert json.loads((tmp_path / "config.json").read_text()) == to_dict(config)
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 9))
    for name in ("report.md", "curves.png", "eval/step-00000008/grid.json"):
        assert (tmp_path / name).stat().st_size > 0
    assert (tmp_path / "eval/step-00000004/grid.png").exists()
    assert list((tmp_path / "tensorboard").iterdir())
    said = capsys.readouterr().out
    assert "starting from scratch" in said and "exact match: in_range" in said
    last = [json.loads(line) for line in (tmp_path / "metrics.jsonl").open()][-2]
    assert len(last["position_norm"]) == 2 and last["learning_rate"] >= 0


def test_the_seed_decides(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(small(seed=seed, steps=4), tmp_path / name)
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


def test_a_finished_run_is_scored_again_not_trained(tmp_path):
    config = small(steps=4)
    train(config, tmp_path)
    before = losses(tmp_path)
    assert train(config, tmp_path) == 4
    assert losses(tmp_path) == before
    grid = json.loads((tmp_path / "eval/step-00000004/grid.json").read_text())
    summary = evaluate_checkpoint(tmp_path)
    assert summary["mean"] == grid["mean"]
    more = evaluate_checkpoint(tmp_path, eval_digits=2, eval_examples=1)
    assert set(more) == {"in_range", "mean"}


def test_evaluate_without_a_run(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no run: .*config.json is missing"):
        evaluate_checkpoint(tmp_path)
    train(small(steps=3), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"step 7; steps there: \[3\]"):
        evaluate_checkpoint(tmp_path, step=7)


def test_another_config_is_refused_with_its_differences(tmp_path):
    config = small(steps=4)
    train(config, tmp_path)
    other = dataclasses.replace(
        config, steps=6, optimizer=dataclasses.replace(config.optimizer, learning_rate=0.5)
    )
    with pytest.raises(ConfigChangedError) as refusal:
        train(other, tmp_path)
    assert "optimizer.learning_rate: 0.01 -> 0.5" in str(refusal.value)
    assert "steps: 4 -> 6" in str(refusal.value)
    assert "seed" not in str(refusal.value)
    assert train(other, tmp_path, allow_config_change=True) == 6
    assert [s for s, _ in losses(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert json.loads((tmp_path / "config.old.json").read_text())["steps"] == 4


def test_a_checkpoint_of_another_model_is_not_damage(tmp_path):
    config = small(steps=4)
    train(config, tmp_path)
    wider = dataclasses.replace(config, model=dataclasses.replace(config.model, hidden_size=32))
    with pytest.raises(ConfigChangedError, match=r"\(19, 16\) is saved, \(19, 32\) is needed"):
        train(wider, tmp_path, allow_config_change=True)
    assert not (tmp_path / "checkpoints-damaged").exists()
    assert (tmp_path / "checkpoints/4").exists()


def truncate(folder):
    largest = max((folder / "state/d").iterdir(), key=lambda f: f.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])


def lose_the_iterator(folder):
    for file in (folder / "data").iterdir():
        file.unlink()


def flip_bytes(folder):
    for file in folder.joinpath("state").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            content = bytearray(file.read_bytes())
            for i in range(len(content) // 3, len(content), 97):
                content[i] ^= 0xFF
            file.write_bytes(content)


def lose_metadata(folder):
    (folder / "state/_METADATA").unlink()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 12 steps that nothing happened to."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    train(small(steps=12), folder)
    return folder


@pytest.mark.parametrize("damage", [truncate, lose_the_iterator, flip_bytes, lose_metadata])
def test_a_damaged_newest_checkpoint(tmp_path, whole, caplog, damage):
    """The one before it is used, it says so, and the rest of the run is what it would have been."""
    hurt = tmp_path / "hurt"
    shutil.copytree(whole, hurt)
    damage(hurt / "checkpoints/12")
    assert train(small(steps=12), hurt) == 12
    assert "checkpoint 12 is damaged" in caplog.text
    assert (hurt / "checkpoints-damaged/12").exists()
    assert (hurt / "checkpoints/12").exists()
    assert losses(hurt)[12:] == losses(whole)[8:]


class _Poisoned(Addition):
    """Its samples are worth NaN from step 6 on."""

    def source(self, seed):
        good = super().source(seed)

        class Source:
            def __len__(self):
                return len(good)

            def __getitem__(self, index):
                sample = good[index]
                if index >= 5 * 16:
                    sample["weights"] = sample["weights"] * np.nan
                return sample

        return Source()


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good(tmp_path, monkeypatch):
    monkeypatch.setitem(train_config.TASKS, "addition", _Poisoned)
    config = small(save_every=2, task=_Poisoned(max_digits=2, eval_digits=2, eval_examples=1))
    with pytest.raises(NonFiniteError, match=r"step 6: loss nan"):
        train(config, tmp_path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "4"]
    monkeypatch.setitem(train_config.TASKS, "addition", Addition)
    sound = dataclasses.replace(config, task=small().task)
    assert train(sound, tmp_path, allow_config_change=True) == 8


def test_bad_sizes_are_named_before_anything_is_made(tmp_path):
    with pytest.raises(ValueError, match="batch_size / accumulation=12"):
        train(small(batch_size=12), tmp_path / "run")
    assert not (tmp_path / "run").exists()
