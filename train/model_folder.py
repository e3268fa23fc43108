"""A converted model on disk: model.json, its parameters for any mesh, and its tokenizer beside."""

import dataclasses
import json
from pathlib import Path

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import unflatten_dict

from tape_jax import ModelConfig
from tape_jax.convert import fingerprint
from tape_jax.convert.folders import new_folder
from tape_jax.convert.start import parameter_shapes
from tape_jax.saved import from_dict, read_object, to_dict
from tape_jax.sharding import parameter_shardings
from train.interrupt import Interrupt
from train.tokenizer import copy_tokenizer

FORMAT = "tape_jax model 1"


@dataclasses.dataclass(frozen=True)
class Description:
    """What model.json says.

    Attributes:
      config: of the model.
      fingerprint: of its parameters, as `tape_jax.convert.fingerprint` gives it.
      source: name of the file or folder that it was made from.
      trained_length: tokens of a row in its training, when that is known.
    """

    config: ModelConfig
    fingerprint: str
    source: str
    trained_length: int | None = None


def write_model(
    folder: Path,
    config: ModelConfig,
    params: dict,
    *,
    source: str,
    trained_length: int | None = None,
    tokenizer: Path | None = None,
) -> None:
    """Writes a converted model; the folder appears when everything is in it.

    Args:
      folder: a new one.
      config: of the model.
      params: its parameters, on whatever devices.
      source: name of what it was made from.
      trained_length: tokens of a row in its training.
      tokenizer: what `train.tokenizer.copy_tokenizer` copies beside; None: nothing.

    Raises:
      FileExistsError: the folder is there already.
      KeyboardInterrupt: after Ctrl-C or SIGTERM, when the folder is gone.
    """
    about = {
        "format": FORMAT,
        "source": source,
        "trained_length": trained_length,
        "fingerprint": fingerprint(params),
        "config": to_dict(config),
    }
    with new_folder(folder.absolute()) as partial, Interrupt() as stop:
        (partial / "model.json").write_text(json.dumps(about, indent=2) + "\n")
        if tokenizer is not None:
            copy_tokenizer(tokenizer, partial)
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(partial / "params", params)
        if stop():  # not before: threads of Orbax would go on writing into a folder that is gone
            raise KeyboardInterrupt


def read_model(folder: Path) -> Description:
    """What the model in this folder is, without its parameters.

    Raises:
      FileNotFoundError: there is none.
      ValueError: a model.json of another format.
    """
    file = folder / "model.json"
    if not file.exists():
        raise FileNotFoundError(f"{folder} holds no converted model: {file} is missing")
    about = read_object(file)
    found = about.pop("format", None)
    if found != FORMAT:
        raise ValueError(f"{file} has format {found!r}, expected {FORMAT!r}")
    return Description(**about | {"config": from_dict(ModelConfig, about["config"])})


def read_params(folder: Path, config: ModelConfig, mesh: jax.sharding.Mesh) -> dict:
    """The model's parameters, each read onto the devices that hold a part of it.

    Raises:
      FileNotFoundError: they are missing.
      ValueError: they are of another model, or damaged.
    """
    path = (folder / "params").absolute()
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: {folder} is no complete model")
    flat = parameter_shapes(config)
    if flat != parameter_shapes(read_model(folder).config):
        raise ValueError(f"{folder} holds the parameters of another model than the one asked for")
    shapes = unflatten_dict(flat, sep="/")
    wanted = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        parameter_shardings(shapes, mesh),
    )
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            return checkpointer.restore(path, wanted)
    except Exception as error:
        reason = str(error).splitlines()[0][:200]
        raise ValueError(f"{path} cannot be read: convert it again ({reason})") from None
