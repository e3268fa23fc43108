"""Convert models: `python -m train.convert --from PATH --to DIR` or `--to-huggingface DIR`.

--to makes a folder that the other commands read on any mesh, from a Hugging Face Llama, an official
TAPE checkpoint or a GGUF file. --to-huggingface makes a Hugging Face folder, from any model that
the other commands read.
"""

import dataclasses
import logging
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console
from rich.progress import track

from tape_jax.config import Precision
from tape_jax.convert import save_huggingface
from tape_jax.lora import merge
from train.mesh import MeshConfig, make_mesh
from train.model_folder import write_model
from train.pretrained import Pretrained, find
from train.tokenizer import copy_tokenizer, load_tokenizer


def convert(
    source: Annotated[Path, tyro.conf.arg(name="from")],
    to: Path | None = None,
    to_huggingface: Path | None = None,
    step: int | None = None,
    dtype: Precision = "float32",
    mesh: MeshConfig = MeshConfig(),  # noqa: B008 - frozen
) -> None:
    """Converts a model.

    Args:
      source: the model: a Hugging Face folder, a .gguf file, a converted model, or a run.
      to: new folder for a model that this project's commands read on any mesh.
      to_huggingface: new folder for a checkpoint in Hugging Face's format.
      step: which checkpoint of a run; the newest when None.
      dtype: of the tensors in Hugging Face's format.
      mesh: how this machine's devices are used.

    Raises:
      FileNotFoundError: no model there.
      FileExistsError: a target that exists.
      ValueError: no target, or a model that cannot be converted.
    """
    targets = [folder for folder in (to, to_huggingface) if folder is not None]
    if not targets:
        raise ValueError("name a target: --to DIR or --to-huggingface DIR")
    for folder in targets:
        if folder.exists():
            raise FileExistsError(f"{folder} exists already; name another, or remove it")
    found, devices = find(source, step), make_mesh(mesh)
    with jax.set_mesh(devices):
        params = found.read(devices)
        if to is not None:
            write_model(
                to,
                found.config,
                params,
                source=found.name,
                trained_length=found.trained_length,
                tokenizer=found.tokenizer,
            )
        if to_huggingface is not None:
            _export(to_huggingface, found, params, dtype)
    console = Console()
    for folder in targets:
        console.print(f"{found.name} is in {folder}", markup=False)


def _export(folder: Path, found: Pretrained, params: dict, dtype: Precision) -> None:
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


def main(args: Sequence[str] | None = None) -> None:
    """The command."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        tyro.cli(convert, args=args, prog="python -m train.convert", description=__doc__)
    except (ValueError, FileNotFoundError, FileExistsError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
