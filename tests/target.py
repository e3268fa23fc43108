"""A device that is not here, for tests marked `aot`."""

import pytest

from train import targets


def device(name):
    """One device of this kind; skips the test where its plugin is missing."""
    try:
        return targets.devices(name)[0]
    except RuntimeError as error:
        pytest.skip(str(error))
