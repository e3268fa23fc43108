"""One run on several hosts: `python -m train.hosts train.pretrain --config NAME --workdir DIR`.

Started once on every host (or once for every GPU), with the same arguments everywhere, it joins
the processes and runs the command. Slurm, Open MPI, Kubernetes and Cloud TPU tell JAX who is who;
elsewhere --coordinator, --processes and --process do. The work directory is one that all hosts see.
"""

import argparse
import runpy
import sys
from collections.abc import Sequence

import jax

from train.ending import command

COMMANDS = ("train.pretrain", "train.finetune", "train.compare", "train.evaluate")
"""What several processes can do together."""


def join(coordinator: str | None, processes: int | None, process: int | None) -> None:
    """Joins the processes, before anything looks at the devices.

    Raises:
      ValueError: nothing says who is who.
    """
    given = {"--coordinator": coordinator, "--processes": processes, "--process": process}
    missing = [option for option, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise ValueError(
            f"{' and '.join(missing)} missing: give all of {', '.join(given)}, or none"
        )
    try:
        jax.distributed.initialize(coordinator, processes, process)
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"the processes could not be joined ({error}); outside Slurm, Open MPI, Kubernetes and"
            " Cloud TPU give --coordinator HOST:PORT --processes N --process I"
        ) from error


def main(args: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m train.hosts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0, a free port")
    parser.add_argument("--processes", type=int, metavar="N", help="how many there are")
    parser.add_argument("--process", type=int, metavar="I", help="which this is, from 0")
    parser.add_argument("module", choices=COMMANDS, help="the command to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of that command")
    ours = parser.parse_args(args)
    with command():
        join(ours.coordinator, ours.processes, ours.process)
    sys.argv = [ours.module, *ours.arguments]
    runpy.run_module(ours.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
