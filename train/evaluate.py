"""Measure what a run has learned: `python -m train.evaluate [COMMAND] --workdir DIR ...`.

task (when no command is named): score a checkpoint on its own task again.
stability: how much the inside of several runs changes when a sentence is moved.
progress: the first and last evaluations of several runs, side by side.
perplexity: of texts, in windows of several lengths.
passkey: whether a number is found in prompts of several lengths.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from tape_jax import Transformer
from tape_jax.cache import new_cache
from tape_jax.errors import unknown
from tape_jax.generate import generate
from tape_jax.saved import read_object
from train.checkpoint import load_config
from train.config import TrainConfig
from train.ending import command
from train.evals import passkey, perplexity, progress
from train.evals.runner import Interrupted, Scorer
from train.evals.stability import changes, tabulate, write_stability
from train.interrupt import Interrupt
from train.loop import evaluate
from train.mesh import MeshConfig, make_mesh
from train.pretrained import Pretrained, find, tokenizer_of
from train.runlog import RunLog
from train.tokenizer import Tokenizer


def evaluate_checkpoint(
    workdir: Path,
    step: int | None = None,
    mesh: MeshConfig = MeshConfig(),  # noqa: B008 - frozen
    eval_examples: int | None = None,
    eval_digits: int | None = None,
    eval_length: int | None = None,
) -> dict[str, float] | None:
    """Scores the newest checkpoint of a run, or the one of a step, on any number of devices.

    Args:
      workdir: where the run lives; its config is read from there.
      step: which checkpoint; the newest when None.
      mesh: how this machine's devices are used, whatever the training used.
      eval_examples: addition's problems per cell, or words, instead of the config's.
      eval_digits: longest operands scored, instead of the config's.
      eval_length: elements of a scored word, instead of the config's.

    Raises:
      ValueError: a field that the task of the run does not have.
      FileNotFoundError: no run or no such checkpoint there.
    """
    asked = {"eval_examples": eval_examples, "eval_digits": eval_digits, "eval_length": eval_length}
    asked = {field: value for field, value in asked.items() if value is not None}
    config: TrainConfig = load_config(workdir)
    for field in asked.keys() - {field.name for field in dataclasses.fields(config.task)}:
        raise ValueError(f"{field}={asked[field]}: task {config.task.name!r} has no such field")
    task = dataclasses.replace(config.task, **asked)
    config = dataclasses.replace(config, task=task, mesh=mesh)
    config.validate()
    devices = make_mesh(mesh)
    model = find(workdir, step)
    with jax.set_mesh(devices), Interrupt() as stop, RunLog(workdir) as log:
        params, found = model.read(devices)
        return evaluate(config, workdir, devices, params, found, stop, log)


def evaluate_stability(
    workdirs: tuple[Path, ...], out: Path, sequences: int = 8, seed: int = 0
) -> None:
    """Compares what moving a sentence changes inside the newest checkpoints of several runs.

    Args:
      workdirs: where the runs live.
      out: folder of stability.json and stability.png.
      sequences: sentences of each run's own task.
      seed: of the sentences.

    Raises:
      ValueError: no sequences.
      FileNotFoundError: no run or no checkpoint in one of the work directories.
    """
    if sequences < 1:
        raise ValueError(f"sequences={sequences} must be >= 1")
    configs = {workdir: load_config(workdir) for workdir in workdirs}
    mesh, runs = make_mesh(MeshConfig()), []
    for workdir, config in configs.items():
        name = f"{config.model.position.name} ({workdir})"
        params, step = find(workdir).read(mesh)
        rows = config.task.probe(seed, sequences)
        found = changes(
            config.model, params, rows, config.task.filler, lambda x, n=name: track(x, n)
        )
        runs.append({"run": name, "step": step, "changes": found})
    write_stability(out, runs, sequences)
    console = Console()
    console.print(tabulate(runs))
    console.print(f"kept in {out}", markup=False)


def evaluate_perplexity(
    workdir: Path,
    data: Path,
    lengths: tuple[int, ...],
    out: Path,
    stride: int = 256,
    max_tokens: int | None = None,
    tokenizer: Path | None = None,
    field: str = "text",
    step: int | None = None,
    tokens_per_device: int = 2**14,
    mesh: MeshConfig = MeshConfig(),  # noqa: B008 - frozen
) -> None:
    """Perplexity of texts in windows of several lengths, sliding and pooled.

    Args:
      workdir: a run, or any other model.
      data: a token file (.bin, .npy), text, or .jsonl; the last two may be compressed, .gz.
      lengths: tokens of a window, one measurement each.
      out: folder of perplexity.json and perplexity.png, written after every length.
      stride: tokens from one window to the next.
      max_tokens: of the head of the data; all when None.
      tokenizer: folder or file; the model's own when None.
      field: of a .jsonl row, which holds its text.
      step: of a run's checkpoint; the newest when None.
      tokens_per_device: scored at once; memory grows with them.
      mesh: how this machine's devices are used.

    Raises:
      ValueError: sizes, data or a tokenizer that do not fit.
      FileNotFoundError: no model or tokenizer there.
    """
    perplexity.check_sizes(lengths, stride, max_tokens)
    _check_room(out, tokens_per_device=tokens_per_device)
    model = find(workdir, step)
    of_ids = data.suffix in perplexity.TOKEN_FILES
    words = None if of_ids else tokenizer_of(model, tokenizer)
    documents = perplexity.read_texts(data, words, field, max_tokens)
    perplexity.check_documents(data, documents, lengths, model.config.vocab_size)
    about = _about(model, words) | {
        "data": data.name,
        "documents": len(documents),
        "tokens": sum(map(len, documents)),
        "stride": stride,
    }
    _check_kept(out / "perplexity.json", about)
    devices, found = make_mesh(mesh), {}
    with jax.set_mesh(devices), Interrupt() as stop, _bars() as bars:
        params, about["step"] = model.read(devices)
        scorer = Scorer(Transformer(model.config), params, devices, tokens_per_device, stop)
        with contextlib.suppress(Interrupted):
            for length in lengths:
                show = _bar(bars, f"windows of {length}")
                scorer = dataclasses.replace(scorer, progress=show)
                found[length] = perplexity.measure(scorer, documents, length, stride)
                perplexity.write_perplexity(out, about, found)
    _report(perplexity.tabulate(about, found), out, stop)


def evaluate_passkey(
    workdir: Path,
    lengths: tuple[int, ...],
    out: Path,
    trials: int = 20,
    tokenizer: Path | None = None,
    step: int | None = None,
    tokens_per_batch: int = 2**14,
    mesh: MeshConfig = MeshConfig(),  # noqa: B008 - frozen
) -> None:
    """Whether a model finds a number that is hidden in a long prompt (greedy, cached decoding).

    Args:
      workdir: a run, or any other model.
      lengths: tokens of the prompts, about; their exact numbers are reported.
      out: folder of passkey.json and passkey.png, written after every length.
      trials: prompts of each length; their seeds are 0, 1, ...
      tokenizer: folder or file; the model's own when None.
      step: of a run's checkpoint; the newest when None.
      tokens_per_batch: of prompts decoded at once; memory grows with them.
      mesh: how this machine's devices are used.

    Raises:
      ValueError: sizes or a tokenizer that do not fit, or an encoding that cannot decode from a
        cache.
      FileNotFoundError: no model or tokenizer there.
    """
    passkey.check_sizes(lengths, trials)
    _check_room(out, tokens_per_batch=tokens_per_batch)
    model = find(workdir, step)
    words = tokenizer_of(model, tokenizer)
    jax.eval_shape(lambda: new_cache(model.config, 1, max(lengths)))  # or says why there is none
    about, devices, found = _about(model, words), make_mesh(mesh), []
    _check_kept(out / "passkey.json", about)
    with jax.set_mesh(devices), Interrupt() as stop, _bars() as bars:
        params, about["step"] = model.read(devices)
        decode = functools.partial(generate, model.config, params, pad_to=64)
        with contextlib.suppress(Interrupted):
            for length in lengths:
                show = _bar(bars, f"about {length} tokens")
                each = passkey.run_trials(decode, words, length, trials, tokens_per_batch, stop)
                for trial in each:
                    found.append(trial)
                    show(trial["trial"] + 1, trials)
                passkey.write_passkey(out, about, words, found)
        if stop() and found:
            passkey.write_passkey(out, about, words, found)
    _report(passkey.tabulate(about, found), out, stop)


def evaluate_progress(workdirs: tuple[Path, ...], out: Path) -> None:
    """What several runs have gained: their own first and last evaluations, side by side.

    Args:
      workdirs: where the runs live; nothing is computed anew.
      out: folder of progress.json and progress.png.

    Raises:
      ValueError: no runs, or runs of different tasks.
      FileNotFoundError: no run or no evaluation in one of the work directories.
    """
    runs = [progress.read_run(workdir) for workdir in workdirs]
    metrics = {run["metric"] for run in runs}
    if len(metrics) != 1:
        raise ValueError(f"workdirs: name runs of one task, these have {sorted(metrics)}")
    progress.write_progress(out, runs)
    console = Console()
    console.print(progress.tabulate(runs))
    console.print(f"kept in {out}", markup=False)


def _check_kept(file: Path, about: Mapping[str, Any]) -> None:
    """Raises ValueError for results of something else, which would be overwritten."""
    kept = read_object(file) if file.exists() else {}
    others = [key for key in about if key != "step" and kept.get(key, about[key]) != about[key]]
    if others:
        was = ", ".join(f"{key}={kept[key]!r}" for key in others)
        raise ValueError(f"{file} holds results of {was}: name another --out, or remove it")


def _check_room(out: Path, **sizes: int) -> None:
    """Raises ValueError for a folder that cannot be written to, or a batch of nothing."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"out={out} is a file: name a folder")
    for field, size in sizes.items():
        if size < 1:
            raise ValueError(f"{field}={size} must be >= 1")


def _about(model: Pretrained, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What was measured, for its JSON."""
    about = {"model": model.name, "step": None, "position": model.config.position.name}
    if tokenizer is None:
        return about
    return about | {"tokenizer": tokenizer.name, "vocabulary_sha256": tokenizer.fingerprint}


def _bars() -> Progress:
    return Progress(disable=jax.process_index() != 0)


def _bar(bars: Progress, name: str) -> Callable[[int, int], None]:
    task = bars.add_task(name, total=None)
    return lambda done, total: bars.update(task, completed=done, total=total)


def _report(table: Table, out: Path, stop: Interrupt) -> None:
    console = Console(quiet=jax.process_index() != 0)
    console.print(table)
    console.print(f"kept in {out}" + ("; interrupted" if stop() else ""), markup=False)


COMMANDS: Mapping[str, Callable] = {
    "task": evaluate_checkpoint,
    "stability": evaluate_stability,
    "progress": evaluate_progress,
    "perplexity": evaluate_perplexity,
    "passkey": evaluate_passkey,
}


def main(args: Sequence[str] | None = None) -> None:
    """The command."""
    args = list(sys.argv[1:] if args is None else args)
    named = bool(args) and not args[0].startswith("-")
    name = args.pop(0) if named else "task"
    with command():
        if name not in COMMANDS:
            raise ValueError(unknown("command", name, COMMANDS))
        about = None if named else __doc__
        prog = f"python -m train.evaluate {name if named else '[COMMAND]'}"
        tyro.cli(COMMANDS[name], args=args, prog=prog, description=about)


if __name__ == "__main__":
    main()
