"""A run of seconds: its config, and the same as a command line."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import configs
from tape_jax import ModelConfig
from train.config import TrainConfig
from train.data.addition import VOCABULARY, Addition
from train.optimizer import OptimizerConfig

ROOT = Path(__file__).parents[2]


def small(**fields) -> TrainConfig:
    config = dataclasses.replace(
        configs.get("addition-demo"),
        model=ModelConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=16,
            num_layers=2,
            num_heads=2,
            initializer_range=0.1,
            scan_layers=True,
        ),
        task=Addition(max_digits=2, eval_digits=3, eval_examples=2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        steps=8,
        batch_size=16,
        log_every=1,
        eval_every=1000,
        save_every=4,
    )
    return dataclasses.replace(config, **fields)


FLAGS = (
    "--model.hidden-size 16 --model.intermediate-size 16 --model.num-layers 2 --model.num-heads 2"
    " --model.scan-layers --task.max-digits 2 --task.eval-digits 3 --task.eval-examples 2"
    " --optimizer.warmup-steps 2 --batch-size 16 --log-every 1 --eval-every 1000"
)


COMPILED_ONCE = {
    "JAX_COMPILATION_CACHE_DIR": os.environ["TAPE_JAX_TEST_CACHE"],
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
"""Environment of a command that shares what the tests' processes have compiled."""


def launch(arguments: Sequence[str], devices: int = 1, folder: Path = ROOT) -> subprocess.Popen:
    """`python -m ARGUMENTS` in this folder, on this many virtual devices."""
    xla = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    own = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": xla, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=os.environ | own | COMPILED_ONCE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def start(
    workdir: Path, flags: str = "", devices: int = 1, launcher: Sequence[str] = ()
) -> subprocess.Popen:
    """Training as a user types it, behind a launcher."""
    command = [*launcher, "train.pretrain", "--config", "addition-demo", "--workdir", str(workdir)]
    return launch([*command, *FLAGS.split(), *flags.split()], devices)


def finish(process: subprocess.Popen, status: int = 0, timeout: float = 240) -> str:
    output, _ = process.communicate(timeout=timeout)
    assert process.returncode == status, output
    return output


def losses(workdir: Path) -> list[tuple[int, float]]:
    """(step, loss) of every training line, in the order they were written."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(r["step"], r["loss"]) for r in records if r["kind"] == "train"]


def wait_for_step(process: subprocess.Popen, workdir: Path, step: int, timeout: float = 240):
    """Returns when the run has logged this step."""
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        if any(s >= step for s, _ in losses(workdir)):
            return
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not reached in {timeout} s")
