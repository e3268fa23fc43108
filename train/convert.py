"""Convert models: `python -m train.convert --from PATH --to DIR`, and to other formats.

--to makes a folder that the other commands read on any mesh, from a Hugging Face Llama, an official
TAPE checkpoint or a GGUF file. --to-huggingface makes a Hugging Face folder, from any model that
the other commands read. What a fine-tuning run has trained can be kept alone: --to-adapter writes
one small file, which --adapter puts on its base again; --to-peft what Hugging Face's PEFT reads.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console
from rich.progress import track

from tape_jax.config import Precision
from tape_jax.convert import save_adapter, save_huggingface, save_peft
from tape_jax.convert.configs import write_config
from tape_jax.convert.start import flatten
from tape_jax.lora import merge
from train.checkpoint import load_config
from train.ending import command
from train.mesh import MeshConfig, make_mesh
from train.model_folder import write_model
from train.pretrained import Pretrained, base_record, find, with_adapter
from train.step import split
from train.tokenizer import copy_tokenizer, load_tokenizer


def convert(
    source: Annotated[Path, tyro.conf.arg(name="from")],
    adapter: Path | None = None,
    to: Path | None = None,
    to_huggingface: Path | None = None,
    to_adapter: Path | None = None,
    to_peft: Path | None = None,
    step: int | None = None,
    dtype: Precision = "float32",
    mesh: MeshConfig = MeshConfig(),  # noqa: B008 - frozen
) -> None:
    """Converts a model.

    Args:
      source: the model: a Hugging Face folder, a .gguf file, a converted model, or a run.
      adapter: a file of --to-adapter, which is put on that model.
      to: new folder for a model that this project's commands read on any mesh.
      to_huggingface: new folder for a checkpoint in Hugging Face's format.
      to_adapter: new .safetensors file for what a fine-tuning run has trained, and nothing else.
      to_peft: new folder for the low-rank updates of a run, as Hugging Face's PEFT has them.
      step: which checkpoint of a run; the newest when None.
      dtype: of the tensors in Hugging Face's format.
      mesh: how this machine's devices are used.

    Raises:
      FileNotFoundError: no model there.
      FileExistsError: a target that exists.
      ValueError: no target, or a model that cannot be converted.
    """
    asked = {_model: to, _huggingface: to_huggingface, _adapter: to_adapter, _peft: to_peft}
    targets = {write: path for write, path in asked.items() if path is not None}
    if not targets:
        raise ValueError("name a target: --to, --to-huggingface, --to-adapter or --to-peft")
    for path in targets.values():
        if path.exists():
            raise FileExistsError(f"{path} exists already; name another, or remove it")
    found, devices = find(source, step), make_mesh(mesh)
    if adapter is not None:
        found = with_adapter(found, adapter)
    _check(found, targets)
    with jax.set_mesh(devices):
        params, _ = found.read(devices)
        for write, path in targets.items():
            write(path, found, params, dtype)
    console = Console(highlight=False, soft_wrap=True)
    for path in targets.values():
        console.print(f"{found.name} is in {path}", markup=False)


def _check(found: Pretrained, targets: Container[Callable]) -> None:
    """Raises ValueError for a target that this model cannot be written to."""
    if _huggingface in targets:
        write_config(dataclasses.replace(found.config, lora=None), dtype="float32")
    if _adapter in targets or _peft in targets:
        base_record(found.path)
    if _peft in targets and found.config.lora is None:
        raise ValueError(f"{found.path} has no low-rank updates: use --to-adapter")


def _model(folder: Path, found: Pretrained, params: dict, dtype: Precision) -> None:
    """What the other commands read."""
    write_model(
        folder,
        found.config,
        params,
        source=found.name,
        trained_length=found.trained_length,
        tokenizer=found.tokenizer,
    )


def _huggingface(folder: Path, found: Pretrained, params: dict, dtype: Precision) -> None:
    """The Hugging Face folder, LoRA's factors merged into their kernels, its tokenizer beside."""
    config = found.config
    if config.lora is not None:
        params = merge(params, config.lora)
        config = dataclasses.replace(config, lora=None)
    with tempfile.TemporaryDirectory() as beside:
        files, token_ids = [], {}
        if found.tokenizer is not None:
            files, tokenizer = copy_tokenizer(found.tokenizer, beside), load_tokenizer(beside)
            token_ids = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos}
        save_huggingface(
            folder,
            config,
            params,
            dtype=dtype,
            length=found.trained_length,
            token_ids=token_ids,
            extra_files=files,
            track=lambda names: track(names, "writing"),
        )


def _adapter(file: Path, found: Pretrained, params: dict, dtype: Precision) -> None:
    """What the run has trained, as a file for its base."""
    record, run = base_record(found.path), load_config(found.path)
    save_adapter(file, found.config, split(run, params)[0], record.fingerprint)


def _peft(folder: Path, found: Pretrained, params: dict, dtype: Precision) -> None:
    """The run's low-rank updates, and what it trained beside them."""
    record, run = base_record(found.path), load_config(found.path)
    trained = [path for path in flatten(split(run, params)[0]) if "/lora_" not in path]
    save_peft(folder, found.config, params, record.path.name, trained=trained)


def main(args: Sequence[str] | None = None) -> None:
    """The command."""
    with command():
        tyro.cli(convert, args=args, prog="python -m train.convert", description=__doc__)


if __name__ == "__main__":
    main()
