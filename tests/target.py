"""A device that is not here, for tests marked `aot`."""

import pytest

from train import targets


def device(name):
    """One device of this kind; skips the test where its plugin is missing."""
    try:
        return targets.devices(name)[0]
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


def reported(report, *arguments):
    """report(*arguments) of compiled kernels; skips the test where nothing can look into them."""
    try:
        return report(*arguments)
    except targets.NoReportError as error:
        pytest.skip(str(error))


def kernels(lowered):
    """`targets.kernels` of the attention on an H200."""
    return reported(targets.kernels, "h200", lowered, "tape_attention")
