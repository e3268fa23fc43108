"""Train configs: round trips, the command line, and the run's log."""

import dataclasses
import json

import pytest

import configs
from tape_jax import ModelConfig, positions
from tests.train.small import small
from train.config import TrainConfig, differences, from_dict, parse, to_dict
from train.data.addition import Addition
from train.report import draw_curves
from train.runlog import RunLog, read_metrics
from train.throughput import training_flops_per_token


@pytest.mark.parametrize("name", configs.names())
@pytest.mark.parametrize("encoding", positions.names())
def test_every_config_survives_json(name, encoding):
    config = configs.get(name)
    model = dataclasses.replace(config.model, position=positions.get(encoding))
    config = dataclasses.replace(config, model=model)
    assert from_dict(TrainConfig, json.loads(json.dumps(to_dict(config)))) == config


def test_every_kind_of_field_survives_json():
    position = positions.Tape(
        block=(2, 2), scaling=positions.LinearScaling(2.0), width=7, state_dtype="bfloat16"
    )
    config = dataclasses.replace(small(), model=ModelConfig(position=position, num_kv_heads=4))
    assert from_dict(TrainConfig, to_dict(config)) == config


def test_saved_configs_with_unknown_names():
    saved = to_dict(small())
    with pytest.raises(ValueError, match="unknown field of TrainConfig 'stepz'; did you mean step"):
        from_dict(TrainConfig, saved | {"stepz": 1})
    saved["model"]["position"]["name"] = "tapee"
    with pytest.raises(ValueError, match="unknown Encoding 'tapee'; did you mean tape"):
        from_dict(TrainConfig, saved)


def test_differences_are_named_by_path():
    ours, theirs = to_dict(small()), to_dict(small(steps=9))
    assert differences(ours, theirs) == ["steps: 9 -> 8"]
    theirs["model"]["position"] = dataclasses.asdict(positions.NoPE())
    lines = differences(ours, theirs)
    assert "model.position.name: 'nope' -> 'tape'" in lines
    assert "model.position.base: 'absent' -> 10000.0" in lines


def test_command_line_sets_any_field(tmp_path):
    where, config = parse(
        f"--config addition-demo --workdir {tmp_path} --model.position.name rope"
        " --model.position.base 500 --steps 7 --mesh.tensor 2 --task.no-reverse".split()
    )
    assert where.workdir == tmp_path and not where.allow_config_change
    assert config.model.position == positions.RoPE(base=500.0)
    assert (config.steps, config.mesh.tensor, config.task.reverse) == (7, 2, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps=0 must be >= 1"),
        ({"save_every": 0}, "save_every=0"),
        ({"model": ModelConfig(dtype="float16")}, "needs loss scaling"),
        (
            {"model": ModelConfig(attention="pallas")},
            r"model.attention='pallas' runs on gpu, and this is a cpu: use one of reference, xla",
        ),
        ({"model": ModelConfig(vocab_size=18)}, r"vocab_size=18 must be >= 19"),
        ({"task": Addition(name="adition")}, r"unknown task.name 'adition'; did you mean addition"),
        ({"task": Addition(length_sampling="buckets")}, "did you mean bucket"),
    ],
)
def test_configs_that_cannot_run(change, message):
    with pytest.raises(ValueError, match=message):
        small(**change).validate()


def test_the_paper_config_is_the_papers():
    config = configs.get("addition-paper")
    assert (config.steps, config.batch_size, config.optimizer.learning_rate) == (20_000, 512, 1e-4)
    assert (config.task.max_digits, config.task.eval_digits) == (40, 80)
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_heads) == (
        16,
        1024,
        16,
    )


def test_metrics_keep_the_later_line_and_survive_a_cut_one(tmp_path):
    with RunLog(tmp_path) as log:
        for step, loss in ((1, 3.0), (2, 2.0), (2, 1.5)):
            log.write("train", step, {"loss": loss, "position_norm": [1.0, 1.1]})
        log.write("eval", 2, {"mean": 0.25})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "ste')
    records = read_metrics(tmp_path, "train")
    assert {step: r["loss"] for step, r in records.items()} == {1: 3.0, 2: 1.5}
    draw_curves(tmp_path).savefig(tmp_path / "curves.png")


def test_flops_per_token_by_hand():
    model = ModelConfig(
        vocab_size=10, hidden_size=4, intermediate_size=6, num_layers=2, num_heads=2, num_kv_heads=1
    )
    weights = 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6) + 4 * 10
    assert training_flops_per_token(model, 8) == 6 * weights + 12 * 2 * 8 * 4
