"""What the machine can do, as it is told to users."""

import subprocess
import sys

import jax
import pytest

from pallas_kernels import IMPLEMENTATIONS
from pallas_kernels.implementations import Implementation, registered
from tape_jax.info import attention_runs, report, version


def test_report():
    lines = list(report())
    text = "\n".join(lines)
    assert f"jax {jax.__version__}," in text and f"{jax.device_count()} x cpu" in text
    found = dict(line.split(maxsplit=1) for line in lines if line.startswith("  "))
    assert found == {
        "reference": "runs",
        "xla": "runs",
        "pallas": "needs a gpu",
        "triton": "needs a gpu",
        "cudnn": "needs a gpu",
        "tpu": "needs a tpu",
    }
    assert found.keys() == IMPLEMENTATIONS.keys()
    assert version("nothing-of-this-name") == "not installed"


def test_what_fails_says_why():
    def failing(*_, **__):
        raise RuntimeError("the driver is\n too old")

    with registered("failing", Implementation(failing)) as name:
        assert attention_runs(name) == "the driver is too old"


@pytest.mark.slow
def test_the_command():
    command = [sys.executable, "-m", "tape_jax.info"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "implementation=None tries xla" in said.stdout and not said.stderr
