"""Models that are there already: what `--init`, `--workdir` and `--from` can name.

A run of this project, a converted model, a folder of Hugging Face's Llama, or a GGUF file.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
from flax.traverse_util import flatten_dict, unflatten_dict
from rich.progress import track

from tape_jax import ModelConfig, convert
from tape_jax.convert.start import parameter_shapes, start_missing
from tape_jax.saved import read_object
from train import model_folder
from train.checkpoint import Checkpoints, load_config
from train.config import TrainConfig
from train.step import abstract_params, abstract_state, join, split
from train.tokenizer import (
    Tokenizer,
    check_fits,
    copy_tokenizer,
    has_tokenizer,
    load_tokenizer,
)


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model on disk, of which only the config has been read.

    Attributes:
      path: where it is.
      config: of the model.
      read: (mesh) -> its parameters, sharded as `tape_jax.sharding` says, and the step of the
        checkpoint that they are from (None: of no run).
      tokenizer: what `train.tokenizer.load_tokenizer` takes; None when there is none.
      trained_length: tokens of a row in its training, when that is known.
      has_steps: whether it is a run, with checkpoints to choose from.
    """

    path: Path
    config: ModelConfig
    read: Callable[[jax.sharding.Mesh], tuple[dict, int | None]]
    tokenizer: Path | None = None
    trained_length: int | None = None
    has_steps: bool = False

    @property
    def name(self) -> str:
        """Of the file or folder."""
        return self.path.resolve().name


def find(path: Path, step: int | None = None) -> Pretrained:
    """What is at this path; a run's newest checkpoint that can be read, or the one of `step`.

    Raises:
      FileNotFoundError: nothing that holds a model, or no such checkpoint.
      ValueError: a model that we cannot honour, or a step of something that has none.
    """
    for is_one, describe in _KINDS:
        if is_one(path):
            found = describe(path, step)
            if step is not None and not found.has_steps:
                raise ValueError(f"step={step}: {path} is no run, it has one state only")
            return found
    if not path.exists():
        raise FileNotFoundError(
            f"{path} does not exist: name a folder or a file (a model on Hugging Face's Hub is"
            " downloaded first: hf download OWNER/NAME --local-dir DIR)"
        )
    raise FileNotFoundError(
        f"{path} holds no model: expected a run's or a converted model's folder, a folder with"
        " config.json and *.safetensors, or a .gguf file"
    )


def tokenizer_of(model: Pretrained, named: Path | None = None) -> Tokenizer:
    """The model's tokenizer, or the one at the path named instead.

    Raises:
      ValueError: there is none, or it has ids that the model does not know.
      FileNotFoundError: nothing at that path.
    """
    path = named or model.tokenizer
    if path is None:
        raise ValueError(f"{model.path} has no tokenizer: name one with --tokenizer")
    tokenizer = load_tokenizer(path)
    check_fits(tokenizer, model.config.vocab_size)
    return tokenizer


def extend(params: dict, config: ModelConfig, mesh: jax.sharding.Mesh, seed: int) -> dict:
    """The parameters with those that `config` has beside them, newly started.

    Raises:
      ValueError: parameters that the model lacks, or of another shape.
    """
    wanted = parameter_shapes(config)
    have = flatten_dict(params, sep="/")
    misfits = [
        f"{path}: {x.shape} is there, {wanted[path].shape if path in wanted else 'nothing'} fits"
        for path, x in have.items()
        if path not in wanted or wanted[path].shape != x.shape
    ]
    if misfits:
        raise ValueError("the base does not fit the model:\n  " + "\n  ".join(misfits))
    new = start_missing(config, wanted.keys() - have.keys(), mesh=mesh, seed=seed)
    return unflatten_dict(have | new, sep="/")


# --- The base of a run ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BaseRecord:
    """What a run keeps of its base: where it is, and the fingerprint of its parameters."""

    path: Path
    fingerprint: str


def _base_file(workdir: Path) -> Path:
    return workdir / "base.json"


def base_record(workdir: Path) -> BaseRecord:
    """The record of the base that the run in `workdir` was started from.

    Raises:
      ValueError: there is none: not a fine-tuning run.
    """
    file = _base_file(workdir)
    if not file.is_file():
        raise ValueError(f"{workdir} is no fine-tuning run: it has no {file.name}")
    fields = read_object(file)
    return BaseRecord(Path(fields["path"]), fields["fingerprint"])


def base_of(workdir: Path) -> Pretrained | None:
    """The base that the run in `workdir` was started from; None for one from scratch.

    Raises:
      FileNotFoundError: it is no longer where it was; says how to name its new place.
    """
    if not _base_file(workdir).is_file():
        return None
    path = base_record(workdir).path
    if not path.exists():
        raise FileNotFoundError(
            f"{path}, the base of the run in {workdir}, is gone: write its new place as 'path' into"
            f" {_base_file(workdir)}, or continue the run with --init"
        )
    return find(path)


def start_from(
    base: Pretrained, config: TrainConfig, mesh: jax.sharding.Mesh, workdir: Path
) -> dict:
    """All parameters of the run's model: the base's, and newly started what the method adds.

    The run keeps where the base is, its fingerprint and a copy of its tokenizer.

    Raises:
      ValueError: not the base that the run was started from, or one that does not fit its model.
    """
    params, fingerprint = _checked(base, mesh, workdir)
    if jax.process_index() == 0:
        record = {"path": str(base.path.resolve()), "fingerprint": fingerprint}
        partial = workdir / ".base.json.partial"
        partial.write_text(json.dumps(record, indent=2) + "\n")
        partial.replace(_base_file(workdir))
        if base.tokenizer is not None:
            copy_tokenizer(base.tokenizer, workdir)
    return extend(params, config.model, mesh, config.seed)


def _checked(base: Pretrained, mesh: jax.sharding.Mesh, workdir: Path) -> tuple[dict, str]:
    """The base's parameters, those that the run in `workdir` was started from, and their name."""
    params, _ = base.read(mesh)
    fingerprint = convert.fingerprint(params)  # on every process: its sums go over all devices
    file = _base_file(workdir)
    if file.is_file() and base_record(workdir).fingerprint != fingerprint:
        raise ValueError(
            f"{base.path} is not the base of the run in {workdir}: its weights differ from those"
            f" that {file} describes; name the right one with --init"
        )
    return params, fingerprint


def with_adapter(base: Pretrained, file: Path) -> Pretrained:
    """The model with what an adapter file holds in place of its own parameters or beside them.

    Raises:
      FileNotFoundError: no such file.
      ValueError: no adapter, or, when it is read, one for another base.
    """
    config, _ = convert.load_adapter(file)

    def read(mesh):
        params, step = base.read(mesh)
        _, own = convert.load_adapter(file, base=convert.fingerprint(params))
        return extend(join(params, own), config, mesh, seed=0), step

    return dataclasses.replace(base, config=config, read=read)


# --- Kinds ----------------------------------------------------------------------------------------


def _holds(folder: Path, key: str) -> bool:
    path = folder / "config.json"
    return path.is_file() and key in read_object(path)


def _tokenizer_in(folder: Path) -> Path | None:
    return folder if has_tokenizer(folder) else None


def _run(workdir: Path, step: int | None) -> Pretrained:
    config = load_config(workdir)
    checkpoints = Checkpoints(workdir, config.keep)

    def read(mesh):
        state = checkpoints.read(abstract_state(config, mesh), step)
        params = state.params
        if split(config, abstract_params(config, mesh))[1]:
            if (base := base_of(workdir)) is None:
                raise FileNotFoundError(f"{_base_file(workdir)} is missing: it names the base")
            params = join(_checked(base, mesh, workdir)[0], params)
        return params, int(state.step)

    length = config.task.length
    return Pretrained(workdir, config.model, read, _tokenizer_in(workdir), length, has_steps=True)


def _converted(folder: Path, step: int | None) -> Pretrained:
    about = model_folder.read_model(folder)

    def read(mesh):
        return model_folder.read_params(folder, about.config, mesh), None

    return Pretrained(folder, about.config, read, _tokenizer_in(folder), about.trained_length)


def _reading(steps):
    return track(steps, "reading", disable=jax.process_index() != 0)


def _huggingface(folder: Path, step: int | None) -> Pretrained:
    config, length = convert.read_huggingface_config(folder)

    def read(mesh):
        return convert.load_huggingface(folder, mesh=mesh, track=_reading)[1], None

    return Pretrained(folder, config, read, _tokenizer_in(folder), length)


def _gguf(file: Path, step: int | None) -> Pretrained:
    config, length = convert.read_gguf_config(file)

    def read(mesh):
        return convert.load_gguf(file, mesh=mesh, track=_reading)[1], None

    return Pretrained(file, config, read, file, length)


_KINDS: Sequence[tuple[Callable[[Path], bool], Callable[[Path, int | None], Pretrained]]] = (
    (lambda path: _holds(path, "task"), _run),
    (lambda path: (path / "model.json").is_file(), _converted),
    (lambda path: _holds(path, "hidden_size"), _huggingface),
    (lambda path: path.is_file() and path.suffix == ".gguf", _gguf),
)
"""Whether it is one -> what it holds."""
