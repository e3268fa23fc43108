"""Train a model from scratch: `python -m train.pretrain --config NAME --workdir DIR`."""

import argparse

from absl import flags

from train.command_line import parse
from train.ending import command
from train.loop import NonFiniteError, train


def main() -> None:
    """The command. Exit status 0 when done or stopped by a signal, 1 on bad input or a bad step."""
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument(
        "--allow-config-change",
        action="store_true",
        help="continue the run in the work directory although its saved config differs",
    )
    where, config = parse(parents=[options])
    flags.FLAGS.mark_as_parsed()  # grain's workers read absl flags
    with command(NonFiniteError):
        train(config, where.workdir, where.allow_config_change)


if __name__ == "__main__":
    main()
