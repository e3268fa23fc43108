"""Two processes of two devices each as one run, as two hosts would be."""

import re
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from tests.huggingface_data import DATA
from tests.train.small import ROOT, finish, launch, losses, start, wait_for_step

pytestmark = pytest.mark.slow


def launchers():
    """The start of the command line of each of two processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    how = ["train.hosts", "--coordinator", coordinator, "--processes", "2", "--process"]
    return [[*how, str(process)] for process in range(2)]


def test_two_processes_are_one_run(tmp_path):
    """Cut over all four devices, stopped by a signal to one of them, continued by one process."""
    flags = "--mesh.fsdp 4 --mesh.data 1 --save-every 1000 --optimizer.schedule constant"
    whole, two = tmp_path / "whole", tmp_path / "two"
    finish(start(whole, f"{flags} --steps 30", devices=4))
    endless = f"{flags} --steps 100000"
    first, second = (start(two, endless, 2, launcher) for launcher in launchers())
    wait_for_step(first, two, 4)
    second.send_signal(signal.SIGTERM)
    said = finish(first, timeout=120)
    assert "starting from scratch" not in finish(second, timeout=120)  # one of them speaks
    step = int(re.search(r"SIGTERM: saved at step (\d+)", said)[1])
    assert step == losses(two)[-1][0]
    more = f"{flags} --steps {step + 3} --allow-config-change"
    assert f"continuing from the checkpoint of step {step}" in finish(start(two, more, devices=4))
    assert [s for s, _ in losses(two)] == list(range(1, step + 4))
    shared = min(30, step + 3)
    found, want = ([x for _, x in losses(run)[:shared]] for run in (two, whole))
    np.testing.assert_allclose(found, want, rtol=2e-5)
    assert (two / f"eval/step-{step + 3:08d}/grid.json").is_file()


def together(arguments, folder):
    """What each of two processes says that run this command as one."""
    both = [launch([*launcher, *arguments.split()], 2, folder) for launcher in launchers()]
    return [finish(process) for process in both]


def test_a_base_is_read_and_a_run_scored_together(tmp_path):
    np.random.default_rng(0).integers(0, 97, 20_000).astype("<u2").tofile(tmp_path / "ids.bin")
    tune = (
        f"train.finetune --config smollm2-tape --init {DATA / 'hf_gqa_tied'} --task.vocab-size 97"
        " --task.train-file ids.bin --task.eval-file ids.bin --task.sequence-length 32"
        " --task.eval-lengths 16 --task.eval-windows 8 --batch-size 8 --steps 4 --log-every 1"
        " --optimizer.warmup-steps 1 --mesh.data 1 --mesh.fsdp 4 --workdir"
    )
    alone = finish(launch([*tune.split(), "one"], 4, tmp_path))
    together(f"{tune} two", tmp_path)
    one, two = (losses(tmp_path / name) for name in ("one", "two"))
    np.testing.assert_allclose(two, one, rtol=1e-5)
    said, _ = together("train.evaluate --mesh.data 1 --mesh.fsdp 4 --workdir two", tmp_path)
    perplexity = r"step 4: .*perplexity ([\d.]+), perplexity_16 ([\d.]+)"
    found, want = (re.search(perplexity, text).groups() for text in (said, alone))
    np.testing.assert_allclose(np.float64(found), np.float64(want), rtol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("train.pretrain", "could not be joined .*give --coordinator"),
        ("--processes 2 train.pretrain", "--coordinator and --process missing"),
        ("train.generate", "invalid choice: 'train.generate'"),
    ],
)
def test_what_cannot_be_joined(options, message):
    command = [sys.executable, "-m", "train.hosts", *options.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (1, 2)
    assert re.search(message, done.stderr) and "Traceback" not in done.stderr
