"""Fine-tuning from a base: where it starts, what it keeps, how it goes on, what it refuses."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tape_jax import positions
from tests.tiny import logits, mostly_slow, random_params, tiny, tokens
from tests.train.small import small
from tests.train.vocabularies import byte_level, write
from train import methods
from train.checkpoint import check_workdir
from train.convert import main as convert
from train.data.tokens import Tokens, TokensSource
from train.evaluate import main as evaluate
from train.finetune import _resolve, _warn_of_length, main, on_base
from train.generate import generate_text
from train.loop import train
from train.mesh import MeshConfig, make_mesh
from train.model_folder import write_model
from train.optimizer import OptimizerConfig
from train.pretrained import base_of, find

BASE = tiny(position="rope", num_kv_heads=2, num_layers=2)
LENGTH = 16


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A converted model and its parameters."""
    folder = tmp_path_factory.mktemp("base") / "base"
    params = random_params(BASE, scale=0.2)
    write_model(folder, BASE, params, source="test", trained_length=64)
    return folder, params


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, seed in (("train", 0), ("validation", 1)):
        ids = np.random.default_rng(seed).integers(0, BASE.vocab_size, 4_000)
        ids.astype("<u2").tofile(folder / f"{name}.bin")
    return Tokens(
        train_file=str(folder / "train.bin"),
        eval_file=str(folder / "validation.bin"),
        sequence_length=LENGTH,
        vocab_size=BASE.vocab_size,
        eval_windows=4,
    )


def run_of(name, task, **fields):
    config = small(
        method=methods.get(name),
        task=task,
        batch_size=8,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, weight_decay=0.0),
        **{"steps": 4, "save_every": 2} | fields,
    )
    return on_base(config, BASE)


def mesh():
    return make_mesh(MeshConfig())


def params_of(path):
    return find(path).read(mesh())[0]


def base_of_command(config, workdir):
    """The base that the command finds for a run to be continued without --init."""
    return _resolve(config, "smollm2-tape", None, workdir)[1]


def final_loss(workdir, step):
    return json.loads((workdir / f"eval/step-{step:08d}/loss.json").read_text())["loss"]


class Crash(Exception):
    """Of the data, in the middle of a run."""


@pytest.mark.parametrize("name", mostly_slow(["tape", "lora"], quick=["tape"]))
def test_a_run_goes_on_as_if_never_stopped(name, base, task, tmp_path, monkeypatch):
    folder, params = base
    config = run_of(name, task)
    through, cut = tmp_path / "through", tmp_path / "cut"
    train(config, through, base=find(folder))
    row = TokensSource.__getitem__

    def failing(source, index):
        if index >= 2 * config.batch_size:
            raise Crash
        return row(source, index)

    with monkeypatch.context() as patched, pytest.raises(Crash):
        patched.setattr(TokensSource, "__getitem__", failing)
        train(config, cut, base=find(folder))
    train(config, cut, base=base_of(cut))
    assert final_loss(cut, 4) == final_loss(through, 4)
    one, other = map(params_of, (through, cut))
    jax.tree.map(np.testing.assert_array_equal, one, other)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        same = one
        for key in path:
            same = same[key.key]
        np.testing.assert_array_equal(same, leaf)  # frozen weights are the base's


def test_a_new_run_computes_what_its_base_does(base, task, tmp_path):
    folder, params = base
    config = run_of("tape", task, steps=1)
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, learning_rate=1e-30)
    )
    train(config, tmp_path / "run", base=find(folder))
    opened = find(tmp_path / "run")
    assert opened.config.position == positions.Tape()
    ids = tokens(BASE)
    want = logits(BASE, params, ids)
    np.testing.assert_allclose(
        logits(opened.config, params_of(tmp_path / "run"), ids), want, atol=1e-6
    )


def test_a_checkpoint_holds_what_is_trained(base, task, tmp_path):
    train(run_of("tape", task), tmp_path, base=find(base[0]))
    saved = ocp.StandardCheckpointHandler().metadata(tmp_path / "checkpoints/4/state")
    leaves = jax.tree_util.tree_leaves_with_path(saved.tree["params"])
    assert {path[1].key for path, _ in leaves} == {"position"}
    size = sum(f.stat().st_size for f in (tmp_path / "checkpoints/4").rglob("*") if f.is_file())
    whole = sum(x.nbytes for x in jax.tree.leaves(base[1]))
    assert size < whole


@pytest.mark.slow
def test_another_base_is_refused(base, task, tmp_path):
    folder, params = base
    train(run_of("lora", task), tmp_path / "run", base=find(folder))
    other = tmp_path / "other"
    changed = jax.tree.map(lambda x: x, params)
    changed["embedding"]["embedding"] = changed["embedding"]["embedding"].at[3, 1].add(1e-3)
    write_model(other, BASE, changed, source="test")
    longer = dataclasses.replace(run_of("lora", task), steps=6)
    with pytest.raises(ValueError, match="is not the base of the run"):
        train(longer, tmp_path / "run", allow_config_change=True, base=find(other))
    folder_of_base = tmp_path / "moved"
    write_model(folder_of_base, BASE, params, source="test")
    train(longer, tmp_path / "run", allow_config_change=True, base=find(folder_of_base))
    assert base_of(tmp_path / "run").path == folder_of_base.resolve()


def test_a_base_that_is_gone(base, task, tmp_path):
    shutil.copytree(base[0], tmp_path / "base")
    train(run_of("lora", task), tmp_path / "run", base=find(tmp_path / "base"))
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(FileNotFoundError, match=r"the base of the run in .* is gone"):
        params_of(tmp_path / "run")


def test_a_damaged_checkpoint_is_stepped_over(base, task, tmp_path):
    train(run_of("tape", task), tmp_path, base=find(base[0]))
    newest = tmp_path / "checkpoints/4/state"
    for file in newest.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    assert find(tmp_path).read(mesh())[1] == 2
    with pytest.raises(ValueError, match=r"checkpoint 4 .* cannot be read .*others: \[2\]"):
        find(tmp_path, 4).read(mesh())


def test_a_change_that_cannot_be_leaves_the_run_as_it_was(base, task, tmp_path):
    train(run_of("tape", task), tmp_path, base=find(base[0]))
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(ValueError, match="checkpoint 4 holds another model"):
        train(run_of("lora", task), tmp_path, allow_config_change=True, base=find(base[0]))
    assert (tmp_path / "config.json").read_text() == before
    assert find(tmp_path).read(mesh())[1] == 4


def test_reading_a_run_changes_nothing_in_it(base, task, tmp_path):
    train(run_of("tape", task), tmp_path, base=find(base[0]))
    before = {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in tmp_path.glob("*.json")}
    params_of(tmp_path)
    assert {f: (f.stat().st_mtime_ns, f.read_bytes()) for f in tmp_path.glob("*.json")} == before


@pytest.mark.slow
def test_full_needs_no_base_once_it_runs(base, task, tmp_path):
    shutil.copytree(base[0], tmp_path / "base")
    train(run_of("full", task), tmp_path / "run", base=find(tmp_path / "base"))
    shutil.rmtree(tmp_path / "base")
    params = params_of(tmp_path / "run")
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), params, base[1])
    assert min(jax.tree.leaves(moved)) > 0
    assert base_of_command(run_of("full", task, steps=6), tmp_path / "run") is None
    train(run_of("full", task, steps=6), tmp_path / "run", allow_config_change=True)
    with pytest.raises(FileNotFoundError, match="is gone"):
        base_of_command(run_of("lora", task), tmp_path / "run")


@pytest.mark.slow
def test_what_is_trained_alone_and_on_its_base_again(base, task, tmp_path):
    folder, _ = base
    run, other = tmp_path / "run", tmp_path / "other"
    train(run_of("longlora", task), run, base=find(folder))
    file, peft, whole = tmp_path / "a.safetensors", tmp_path / "peft", tmp_path / "whole"
    convert(["--from", str(run), "--to-adapter", str(file), "--to-peft", str(peft)])
    assert file.stat().st_size < sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    about = json.loads((peft / "adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"]) == (8, 16)
    assert about["base_model_name_or_path"] == "base"
    convert(["--from", str(folder), "--adapter", str(file), "--to", str(whole)])
    assert find(run).config == find(whole).config
    jax.tree.map(np.testing.assert_array_equal, *map(params_of, (run, whole)))
    write_model(other, BASE, random_params(BASE, seed=1), source="test")
    with pytest.raises(SystemExit, match="is an adapter for another base"):
        convert(["--from", str(other), "--adapter", str(file), "--to", str(tmp_path / "no")])
    with pytest.raises(SystemExit, match="is no fine-tuning run"):
        convert(["--from", str(folder), "--to-adapter", str(tmp_path / "no")])
    assert not (tmp_path / "no").exists()


@pytest.mark.slow
def test_scoring_a_run_again(base, task, tmp_path):
    train(run_of("tape", task), tmp_path, base=find(base[0]))
    first = final_loss(tmp_path, 4)
    evaluate(["--workdir", str(tmp_path)])
    assert final_loss(tmp_path, 4) == first
    assert final_loss(tmp_path, 0) != first  # what it was before training


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("", "--init PATH is required"),
        ("--init {base} --model.num-layers 7", "model.num_layers: 30 -> 7"),
        ("--init {base} --method.name scratch", "'scratch' starts from nothing"),
        ("--init {base}/nothing", "nothing does not exist: .*downloaded first"),
        ("--init {base}/..", "holds no model: expected"),
        ("--init {base} --method.name lorra", "did you mean lora"),
        ("--init {base}", "task.train_file='data/long/train.bin' is not a file"),
    ],
)
def test_commands_that_cannot_run(flags, message, base, tmp_path, monkeypatch):
    command = ["finetune", "--config", "smollm2-tape", "--workdir", str(tmp_path / "run")]
    monkeypatch.setattr("sys.argv", [*command, *flags.format(base=base[0]).split()])
    with pytest.raises(SystemExit, match=message):
        main()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", [methods.TapeMethod, methods.LoraMethod, methods.Full])
@pytest.mark.parametrize(
    ("stretch", "length", "warned"),
    [
        ({}, 4 * LENGTH, False),
        ({}, 4 * LENGTH + 1, True),
        ({"base": 1e6}, 80, False),
        ({"scaling": positions.LinearScaling(2.0)}, 80, False),
    ],
)
def test_rows_beyond_what_the_base_has_seen(method, stretch, length, warned, base, caplog):
    """A change of encoding alone, such as to TAPE, stretches nothing."""
    config = small(method=method(**stretch), task=Tokens(sequence_length=length))
    _warn_of_length(on_base(config, BASE), find(base[0]))
    assert ("longer than the 64 that base was trained on" in caplog.text) == warned


def test_training_from_nothing_with_a_method(task, tmp_path):
    with pytest.raises(ValueError, match=r"use train.finetune with --init"):
        train(run_of("lora", task), tmp_path)
    with pytest.raises(ValueError, match=r"'scratch': a method other"):
        train(small(), tmp_path, base=find)


def test_generating_needs_a_tokenizer(base):
    with pytest.raises(ValueError, match="has no tokenizer: name one with --tokenizer"):
        generate_text(base[0], ("hello",))
    with pytest.raises(ValueError, match="--prompt TEXT is required"):
        generate_text(base[0], ())


@pytest.mark.slow
def test_progress_of_several_runs(base, task, tmp_path):
    runs = [tmp_path / name for name in ("tape", "lora")]
    for workdir in runs:
        train(run_of(workdir.name, task), workdir, base=find(base[0]))
    out = tmp_path / "out"
    evaluate(["progress", "--workdirs", *map(str, runs), "--out", str(out)])
    found = json.loads((out / "progress.json").read_text())
    assert [(x["run"], x["method"], x["position"]) for x in found] == [
        ("tape", "tape", "tape"),
        ("lora", "lora", "rope"),
    ]
    for workdir, one in zip(runs, found, strict=True):
        for step in (0, 4):
            loss = final_loss(workdir, step)
            assert next(iter(loss.values())) == pytest.approx(
                np.log(one["evaluations"][str(step)]["perplexity"]), rel=1e-6
            )
    first = [x["evaluations"]["0"]["perplexity"] for x in found]
    assert first[0] == pytest.approx(first[1], rel=1e-5)  # both compute what the base does
    assert (out / "progress.png").stat().st_size > 1000
    with pytest.raises(SystemExit, match="holds no run"):
        evaluate(["progress", "--workdirs", str(tmp_path), "--out", str(out)])


@pytest.mark.parametrize("file", ["model.json", "config.json"])
def test_a_run_is_not_put_into_a_model(file, task, tmp_path):
    (tmp_path / file).write_text('{"hidden_size": 8}')
    with pytest.raises(ValueError, match="holds a model and no run: name another --workdir"):
        check_workdir(tmp_path, run_of("full", task), allow_change=True)
    assert (tmp_path / file).read_text() == '{"hidden_size": 8}'


def test_a_run_is_not_put_into_a_file(task, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file: name a folder"):
        check_workdir(tmp_path / "file", run_of("full", task), allow_change=False)


def test_a_cache_beyond_all_memory_is_refused(tmp_path):
    write(tmp_path, "tokenizer.json", byte_level())
    write_model(
        tmp_path / "model",
        tiny(vocab_size=259),
        random_params(tiny(vocab_size=259)),
        source="test",
        tokenizer=tmp_path,
    )
    with pytest.raises(ValueError, match=r"max_new_tokens=1000000000000: the cache takes .* GB"):
        generate_text(tmp_path / "model", ("hello",), max_new_tokens=10**12)
