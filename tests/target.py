"""A device that is not here, for tests marked `aot`."""

import pytest

from train import targets


def device(name):
    """One device of this kind; skips the test where its plugin is missing."""
    try:
        return targets.devices(name)[0]
    except ModuleNotFoundError as error:
        pytest.skip(str(error))


def kernels(lowered, name="h200"):
    """`targets.kernels` of the attention; skips the test where no PTX can be had."""
    try:
        return targets.kernels(name, lowered, "tape_attention")
    except RuntimeError as error:
        pytest.skip(str(error))
