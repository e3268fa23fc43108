"""Commands killed, stopped and restarted, as processes of their own."""

import re
import signal
import subprocess
import sys

import pytest

from tests.train.small import ROOT, finish, losses, start, wait_for_step
from train.interrupt import Interrupt

pytestmark = pytest.mark.slow


def test_sigkill_at_an_arbitrary_step_then_the_same_losses(tmp_path):
    """Killed without warning and started again, the losses are those of the run left alone."""
    flags = "--steps 70 --save-every 10"
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(whole, flags))
    process = start(killed, flags)
    wait_for_step(process, killed, 33)
    process.kill()
    process.wait()
    seen = len(losses(killed))
    output = finish(start(killed, flags))
    resumed = int(re.search(r"continuing from the checkpoint of step (\d+)", output)[1])
    assert 10 <= resumed <= seen
    again = losses(killed)[seen:]
    assert len(again) >= 20
    assert again == losses(whole)[resumed:]
    # And what was logged before the kill was no different.
    assert losses(killed)[:seen] == losses(whole)[:seen]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_training_saves_and_exits_cleanly(tmp_path, number):
    flags = "--steps 100000 --save-every 100000 --optimizer.schedule constant"
    process = start(tmp_path, flags)
    wait_for_step(process, tmp_path, 5)
    process.send_signal(number)
    output = finish(process, status=0, timeout=60)
    step = int(re.search(rf"{number.name}: saved at step (\d+)", output)[1])
    assert step == losses(tmp_path)[-1][0]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == [str(step)]
    resumed = start(tmp_path, flags)
    wait_for_step(resumed, tmp_path, step + 3)
    resumed.send_signal(number)
    assert f"continuing from the checkpoint of step {step}" in finish(resumed, timeout=60)


def test_a_signal_in_an_evaluation_saves_and_exits_cleanly(tmp_path):
    """With an evaluation of minutes after step 4, the signal must not wait for its end."""
    flags = "--steps 8 --eval-every 4 --save-every 100 --task.eval-digits 40"
    process = start(tmp_path, flags + " --task.eval-examples 100")
    wait_for_step(process, tmp_path, 4)
    process.send_signal(signal.SIGTERM)
    output = finish(process, status=0, timeout=120)
    assert re.search(r"SIGTERM: saved at step [456]", output)
    assert not (tmp_path / "eval").exists()


def test_a_signal_before_the_first_step_is_honoured(tmp_path):
    process = start(tmp_path, "--steps 100000 --optimizer.schedule constant")
    for line in process.stdout:
        if "starting from scratch" in line:
            break
    process.send_signal(signal.SIGTERM)
    assert "SIGTERM" in finish(process, status=0, timeout=120)
    assert len(losses(tmp_path)) <= 2


def test_a_second_ctrl_c_aborts():
    before = signal.getsignal(signal.SIGINT)  # a shell's background jobs ignore it
    with Interrupt() as stop:
        assert not stop()
        signal.raise_signal(signal.SIGINT)
        assert stop() and stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--config addition-dmo --workdir W", "unknown config 'addition-dmo'; did you mean"),
        ("--config addition-demo", "--workdir DIR is required"),
        ("--config addition-demo --workdir W --model.num-layer 3", "--model.num-layers"),
        ("--config addition-demo --workdir W --model.position.name tap", "did you mean tape"),
        ("--config addition-demo --workdir W --model.num-heads 3", "num_heads=3"),
        ("--config addition-demo --workdir W --task.max-digits 0", "task.max_digits=0"),
        ("--config addition-demo --workdir W --mesh.tensor 3", "mesh.tensor=3"),
        ("--config addition-demo --workdir W --model.vocab-size 10", "vocab_size=10 must be >= 19"),
    ],
)
def test_bad_command_lines(tmp_path, arguments, message):
    arguments = arguments.replace("W", str(tmp_path / "run"))
    done = subprocess.run(
        [sys.executable, "-m", "train.pretrain", *arguments.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    said = re.sub(r"[\s│╭╮╰╯─]+", " ", done.stdout + done.stderr)
    assert done.returncode != 0
    assert message in said
    assert "Traceback" not in said
    assert not (tmp_path / "run").exists()
