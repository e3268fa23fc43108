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
from train.command_line import parse
from train.config import TrainConfig, differences, to_dict
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


def _check_model_is_free(config: TrainConfig, name: str) -> None:
    """Raises ValueError when the command line sets what the base or the method decides."""
    ours, own = (to_dict(c)["model"] for c in (config, configs.get(name)))
    for field in RUN_FIELDS:
        del ours[field], own[field]
    if changed := differences(ours, own, "model."):
        raise ValueError(
            "the model is that of --init, changed by --method: leave out\n  " + "\n  ".join(changed)
        )


def _find_base(init: Path | None, workdir: Path) -> Pretrained:
    base = find(init) if init is not None else base_of(workdir)
    if base is None:
        raise ValueError("--init PATH is required: the model to start from")
    return base


def _warn_of_length(config: TrainConfig, base: Pretrained) -> None:
    """Says when rows are longer than the base has ever seen and nothing stretches its positions."""
    known, method = base.trained_length, config.method
    same = method.base is None and config.model.position == base.config.position
    if known is not None and config.task.longest > known and same:
        logging.getLogger("tape_jax").warning(
            "rows of %d tokens are longer than the %d that %s was trained on, and nothing stretches"
            " its positions (--method.scaling.name, --method.base)",
            config.task.longest,
            known,
            base.name,
        )


def main() -> None:
    """The command. Exit status 0 when done or stopped by a signal, 1 on bad input or a bad step."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
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
    try:
        _check_model_is_free(config, where.config)
        base = _find_base(where.init, where.workdir)
        config = on_base(config, base.config)
        _warn_of_length(config, base)
        train(config, where.workdir, where.allow_config_change, base)
    except (ValueError, FileNotFoundError, NonFiniteError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
