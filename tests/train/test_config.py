"""Train configs: round trips, the command line, and the run's log."""

import dataclasses
import json
import re

import pytest

import configs
from tape_jax import ModelConfig, positions
from tests.train.small import small
from train import config as train_config
from train import methods
from train.command_line import parse
from train.config import (
    REGISTRIES,
    Registry,
    TrainConfig,
    differences,
    from_dict,
    registered,
    to_dict,
)
from train.data.addition import Addition
from train.data.state_tracking import StateTracking
from train.data.task import Metric
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
    assert where.workdir == tmp_path
    assert config.model.position == positions.RoPE(base=500.0)
    assert (config.steps, config.mesh.tensor, config.task.reverse) == (7, 2, False)


@pytest.mark.parametrize(
    "flags",
    [
        "--model.position.name rope --task.name state-tracking --task.group Z60",
        "--task.group Z60 --task.name=state-tracking --model.position.name=rope",
        "--model.position.name tape --model.position.name rope --task.group=Z60"
        " --task.name state-tracking",
    ],
)
def test_parts_are_chosen_by_name_in_any_order(tmp_path, flags):
    _, config = parse(
        f"--config addition-demo --workdir {tmp_path} --model.vocab-size 61 {flags}".split()
    )
    assert config.model.position == positions.RoPE()
    assert config.task == StateTracking(group="Z60")
    config.validate()


def test_variants_and_parts_of_them(tmp_path):
    flags = "--model.position.scaling.original 64 --model.position.name tape-unit"
    flags += " --model.position.scaling.name yarn --model.position.scaling.factor 4"
    _, config = parse(f"--config addition-demo --workdir {tmp_path} {flags}".split())
    scaling = positions.YarnScaling(factor=4.0, original=64)
    assert config.model.position == positions.get("tape-unit", scaling=scaling)
    config.validate()
    assert from_dict(TrainConfig, to_dict(config)) == config


@dataclasses.dataclass(frozen=True)
class Stretch:
    """A part within an encoding; the second kind needs a field that its default lacks."""

    name: str = "none"


@dataclasses.dataclass(frozen=True)
class By(Stretch):
    name: str = "by"
    factor: float = 0.0


@dataclasses.dataclass(frozen=True)
class Stretched(positions.Encoding):
    name: str = "stretched"
    stretch: Stretch = Stretch()

    def validate(self, config):
        if getattr(self.stretch, "factor", 1.0) == 0.0:
            raise ValueError("position.stretch.factor=0.0 must be set")


@pytest.fixture
def stretches(monkeypatch):
    kinds = {"none": Stretch, "by": By}
    registry = Registry(kinds, lambda name: kinds[name]())
    monkeypatch.setattr(train_config, "REGISTRIES", REGISTRIES | {Stretch: registry})
    monkeypatch.setitem(positions.ENCODINGS, "stretched", Stretched)


@pytest.mark.parametrize("order", [1, -1])
def test_a_part_of_a_part_that_needs_a_field(tmp_path, stretches, order):
    """The outer part is replaced first, and nothing is checked before all flags are applied."""
    chosen = ["--model.position.name=stretched", "--model.position.stretch.name=by"]
    command = ["--config", "addition-demo", "--workdir", str(tmp_path), *chosen[::order]]
    _, config = parse([*command, "--model.position.stretch.factor", "4"])
    assert config.model.position == Stretched(stretch=By(factor=4.0))
    assert [path for path, _, _ in registered(config)] == [
        "model.position",
        "model.position.stretch",
        "task",
        "method",
        "method.scaling",
    ]
    config.validate()
    assert from_dict(TrainConfig, to_dict(config)) == config
    with pytest.raises(SystemExit):
        parse(command)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model.position.name tap", "unknown positional encoding 'tap'; did you mean tape"),
        ("--task.name state-trackin", "unknown task 'state-trackin'; did you mean state-tracking"),
        ("--model.position.scaling.name yarnn", "unknown scaling 'yarnn'; did you mean yarn"),
        ("--model.position.scaling.name yarn", "position.scaling.factor=0.0 must be >= 1"),
        ("--model.positon.name rope", "--model.positon.name"),
        ("--optimizer.name adam", "--optimizer.name"),
        ("--model.position.name", "--model.position.name"),
    ],
)
def test_names_that_choose_nothing(tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as exit:
        parse(f"--config addition-demo --workdir {tmp_path} {flags}".split())
    said = re.sub(r"[\s│╭╮╰╯─]+", " ", f"{exit.value} {capsys.readouterr().err}")
    assert message in said


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, "steps=0 must be >= 1"),
        ({"save_every": 0}, "save_every=0"),
        ({"seed": -1}, "seed=-1 must be >= 0"),
        ({"model": ModelConfig(dtype="float16")}, "needs loss scaling"),
        (
            {"model": ModelConfig(attention="pallas")},
            r"model.attention='pallas' runs on gpu, and this is a cpu: use one of reference, xla",
        ),
        ({"model": ModelConfig(vocab_size=18)}, r"vocab_size=18 must be >= 19"),
        ({"task": Addition(name="adition")}, r"unknown task.name 'adition'; did you mean addition"),
        (
            {"task": Addition(name="state-tracking")},
            "task.name='state-tracking' names a StateTracking, but task is a Addition",
        ),
        (
            {"model": ModelConfig(position=positions.RoPE(name="tape"))},
            "model.position.name='tape' names a Tape, but model.position is a RoPE",
        ),
        ({"task": Addition(length_sampling="buckets")}, "did you mean bucket"),
        ({"task": StateTracking(group="A6")}, "unknown task.group 'A6'"),
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
    for metric in (Metric("accuracy"), Metric("perplexity", "perplexity", fraction=False)):
        draw_curves(tmp_path, metric).savefig(tmp_path / "curves.png")


def test_metrics_say_what_is_better_and_how_it_reads():
    accuracy, perplexity = Metric("accuracy"), Metric("perplexity", "at 8", fraction=False)
    assert accuracy.text(0.5) + accuracy.unit == "50.00 %"
    assert perplexity.text(88.64) + perplexity.unit == "88.64"
    scores = [{"mean": 0.2}, {}, {"mean": 0.9}]
    assert sorted(scores, key=accuracy.order) == [{"mean": 0.9}, {"mean": 0.2}, {}]
    scores = [{"at 8": 9.0}, {}, {"at 8": 3.0, "at 16": 1.0}]
    assert [s.get("at 8") for s in sorted(scores, key=perplexity.order)] == [3.0, 9.0, None]


def test_rows_longer_than_the_encoding_reaches():
    config = small()
    longest = config.task.longest
    model = dataclasses.replace(config.model, position=positions.Randomized(max_position=longest))
    dataclasses.replace(config, model=model).validate()
    model = dataclasses.replace(config.model, position=positions.Randomized(max_position=5))
    with pytest.raises(ValueError, match=f"position.max_position >= {longest}, not 5"):
        dataclasses.replace(config, model=model).validate()


def test_flops_per_token_by_hand():
    model = ModelConfig(
        vocab_size=10, hidden_size=4, intermediate_size=6, num_layers=2, num_heads=2, num_kv_heads=1
    )
    weights = 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 6) + 4 * 10
    run = small(model=model, task=Addition(max_digits=1, eval_digits=1))
    length = run.task.length
    assert training_flops_per_token(run) == 6 * weights + 12 * 2 * length * 4
    frozen = dataclasses.replace(run, method=methods.get("tape"))
    assert training_flops_per_token(frozen) == 4 * weights + 12 * 2 * length * 4
