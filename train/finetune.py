"""Train a pre-trained model further: `python -m train.finetune --config NAME --init PATH ...`.

The architecture is that of the model at --init; what is made of it, and which of its weights are
trained, is the config's method (`--method.name lora` takes another one).
"""

import argparse
import dataclasses
import logging
from pathlib import Path

from absl import flags

import configs
from tape_jax import ModelConfig
from tape_jax.convert.start import parameter_shapes
from train.checkpoint import load_config
from train.command_line import parse
from train.config import TrainConfig, differences, to_dict
from train.ending import command
from train.loop import NonFiniteError, train
from train.methods import Method
from train.pretrained import Pretrained, base_of, find

RUN_FIELDS = ("dtype", "attention", "scan_layers", "remat")
"""Fields of the model that say how it is computed, not what it is: the config's own."""


def on_base(config: TrainConfig, base: ModelConfig) -> TrainConfig:
    """The config with the model that its method makes of this one.

    Raises:
      ValueError: a method that trains from scratch, or that cannot change this model.
    """
    if type(config.method) is Method:
        raise ValueError(
            "method.name='scratch' starts from nothing: use train.pretrain, or choose a method"
            " such as --method.name full"
        )
    how = {field: getattr(config.model, field) for field in RUN_FIELDS}
    model = config.method.adapt(dataclasses.replace(base, **how))
    return dataclasses.replace(config, model=model)


def of_command(config: TrainConfig, name: str, base: ModelConfig) -> TrainConfig:
    """`on_base`, for a config that a command line has made of the named one.

    A method of the command line that stretches no positions stretches them as the named config's.

    Raises:
      ValueError: what `on_base` raises, or fields of the model that it decides.
    """
    own = configs.get(name)
    changed = differences(*(_what_it_is(c.model) for c in (config, own)), "model.")
    if changed:
        raise ValueError(
            "the model is that of --init, changed by --method: leave out\n  " + "\n  ".join(changed)
        )
    method = config.method.stretched_like(own.method)
    return on_base(dataclasses.replace(config, method=method), base)


def _what_it_is(model: ModelConfig) -> dict:
    return {field: x for field, x in to_dict(model).items() if field not in RUN_FIELDS}


def _resolve(
    config: TrainConfig, name: str, init: Path | None, workdir: Path
) -> tuple[TrainConfig, Pretrained | None]:
    """The config of the run, and its base; None for one that goes on and has no use for it.

    Raises:
      ValueError, FileNotFoundError: no base, or one that does not fit.
    """
    if init is not None or not (workdir / "base.json").is_file():
        if init is None:
            raise ValueError("--init PATH is required: the model to start from")
        base = find(init)
        return of_command(config, name, base.config), base
    how = {field: getattr(config.model, field) for field in RUN_FIELDS}
    method = config.method.stretched_like(configs.get(name).method)
    model = dataclasses.replace(load_config(workdir).model, **how)
    config = dataclasses.replace(config, method=method, model=model)
    trains_all = all(map(method.trains, parameter_shapes(model)))
    return config, None if trains_all else base_of(workdir)


def _warn_of_length(config: TrainConfig, base: Pretrained) -> None:
    """Says when positions and what the base has seen do not fit together."""
    log, known = logging.getLogger("tape_jax"), base.trained_length
    if known is None:
        return
    positions = base.config.position, config.model.position
    stretch = [[getattr(x, field, None) for field in ("base", "scaling")] for x in positions]
    if config.task.longest > known and stretch[0] == stretch[1]:
        log.warning(
            "rows of %d tokens are longer than the %d that %s was trained on, and nothing stretches"
            " its positions (--method.scaling.name, --method.base)",
            config.task.longest,
            known,
            base.name,
        )
    original = getattr(config.method.scaling, "original", known)
    if original != known:
        log.warning(
            "method.scaling.original=%d, and %s was trained on rows of %d: is that meant?",
            original,
            base.name,
            known,
        )


def main() -> None:
    """The command. Exit status 0 when done or stopped by a signal, 1 on bad input or a bad step."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument(
        "--init",
        type=Path,
        help="the model to start from: a run's or a converted"
        " model's folder, a Hugging Face folder, a .gguf file",
    )
    options.add_argument(
        "--allow-config-change",
        action="store_true",
        help="continue the run in the work directory although its saved config differs",
    )
    where, config = parse(parents=[options], description=__doc__.splitlines()[0])
    flags.FLAGS.mark_as_parsed()  # grain's workers read absl flags
    with command(NonFiniteError):
        config, base = _resolve(config, where.config, where.init, where.workdir)
        config.validate()
        if base is not None:
            _warn_of_length(config, base)
        train(config, where.workdir, where.allow_config_change, base)


if __name__ == "__main__":
    main()
