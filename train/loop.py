"""The training loop, top to bottom: config, mesh, data, state, step, loop."""

import functools
import math
import time
from pathlib import Path

import jax

from tape_jax import Transformer
from train.checkpoint import Checkpoints, check_workdir, keep_config
from train.config import TrainConfig
from train.data.pipeline import batches, to_device
from train.evals.runner import Interrupted, Scorer
from train.interrupt import Interrupt
from train.mesh import make_mesh
from train.methods import Method
from train.pretrained import Pretrained, start_from
from train.report import write_report
from train.runlog import RunLog
from train.step import (
    TrainState,
    abstract_params,
    abstract_state,
    count_parameters,
    jit_train_step,
    join,
    make_state,
    shardings_of,
    split,
    start_state,
)
from train.throughput import utilisation


class NonFiniteError(ArithmeticError):
    """The loss or the gradient of a step is not a number."""


def train(
    config: TrainConfig,
    workdir: Path,
    allow_config_change: bool = False,
    base: Pretrained | None = None,
) -> int:
    """Trains until done or told to stop, continuing what `workdir` holds; returns the step.

    With a base its weights are where training starts, as the config's method has it, and it is
    scored before the first step too.

    Raises:
      ValueError: a config that cannot work, or a work directory of another one, before anything
        is compiled.
      NonFiniteError: a loss or gradient that is not finite; the newest checkpoint is from before.
    """
    config.validate()
    _check_base(config, workdir, base)
    check_workdir(workdir, config, allow_config_change)
    if not (workdir / "config.json").exists():
        keep_config(workdir, config)
    mesh = make_mesh(config.mesh)
    with jax.set_mesh(mesh), Interrupt() as stop, RunLog(workdir) as log:
        data = batches(config.task.source(config.seed), config.batch_size)
        checkpoints = Checkpoints(workdir, config.keep)
        try:
            state, frozen = _restore_or_start(config, workdir, mesh, checkpoints, data, log, base)
            if base is not None and int(state.step) == 0:  # what the method alone has changed
                evaluate(config, workdir, mesh, join(state.params, frozen), 0, stop, log)
            return _loop(config, workdir, mesh, state, frozen, data, checkpoints, stop, log)
        finally:
            checkpoints.close()


def _check_base(config, workdir, base):
    """Raises ValueError when training has no base and needs one, or has one and needs none."""
    goes_on = (workdir / "checkpoints").is_dir()
    scratch = type(config.method) is Method
    if (scratch and base is not None) or not (scratch or base is not None or goes_on):
        raise ValueError(
            f"method.name={config.method.name!r}: a method other than 'scratch' changes a model"
            " that is there already, so use train.finetune with --init"
        )


def _restore_or_start(
    config, workdir, mesh, checkpoints, data, log, base
) -> tuple[TrainState, dict]:
    # Where a run starts from, in this order:
    #   1. the newest sound checkpoint of its own work directory
    #   2. the weights of its base (--init), and what the method adds to them
    #   3. scratch, from the seed
    # The frozen weights are those of the base whenever there are any.
    abstract = abstract_state(config, mesh)
    state, frozen = checkpoints.restore(abstract, data), {}
    keep_config(workdir, config)  # a changed one, now that the checkpoints are known to fit it
    wants_frozen = bool(split(config, abstract_params(config, mesh))[1])
    if base is None and wants_frozen:
        raise ValueError(f"the run in {workdir} needs its base: name it with --init")
    where = shardings_of(abstract)
    if base is not None and (state is None or wants_frozen):
        log.say(f"reading {base.path}")
        trained, frozen = split(config, start_from(base, config, mesh, workdir))
        if state is None:
            counts = count_parameters(trained), count_parameters(frozen)
            log.say(f"starting from it: {counts[0]:,} of {sum(counts):,} parameters are trained")
            start = functools.partial(start_state, config)
            return jax.jit(start, out_shardings=where)(trained), frozen
    if state is not None:
        log.say(f"continuing from the checkpoint of step {int(state.step)}")
        log.write("event", int(state.step), {"event": "resumed"})
        return state, frozen
    count = count_parameters(abstract.params)
    log.say(f"starting from scratch: {count:,} parameters, seed {config.seed}")
    return jax.jit(lambda: make_state(config, config.seed), out_shardings=where)(), frozen


def _loop(config, workdir, mesh, state, frozen, data, checkpoints, stop, log) -> int:
    step_function = jit_train_step(config, state)
    start = step = int(state.step)
    meter, pending, stopping = _Meter(config, log, start), None, stop()
    while step < config.steps and not stopping:
        batch = to_device(next(data), mesh, config.model.vocab_size)
        state, figures = step_function(state, batch, frozen)
        # The step runs on the device while the one before it is checked and logged.
        if pending is not None:
            meter.record(*pending)
        step, pending = step + 1, (step + 1, figures)
        done, stopping = step == config.steps, stop()
        if step % config.save_every == 0 or done or step % config.eval_every == 0 or stopping:
            meter.record(*pending)  # nothing unsound is saved or evaluated
            pending = None
            if step % config.save_every == 0 or done:
                checkpoints.save(step, state, data)
            if step % config.eval_every == 0 and not done:
                params = join(state.params, frozen)
                evaluate(config, workdir, mesh, params, step, stop, log)
                meter.restart()
                stopping = stop()
    if pending is not None:
        meter.record(*pending)
    if step > start:
        checkpoints.save(step, state, data)
    if not stop():
        evaluate(config, workdir, mesh, join(state.params, frozen), step, stop, log)
    if stop():
        log.say(f"{stop.signal.name}: saved at step {step}; the same command continues from there")
        log.write("event", step, {"event": stop.signal.name})
    return step


def evaluation_folder(workdir: Path, step: int) -> Path:
    """Where the evaluation of a step is kept."""
    return workdir / "eval" / f"step-{step:08d}"


def evaluate(config, workdir, mesh, params, step, stop, log) -> dict[str, float] | None:
    """Scores the parameters, logs the result and writes the report; None when told to stop."""
    folder = evaluation_folder(workdir, step)
    scorer = Scorer(
        Transformer(config.model),
        params,
        mesh,
        stop=stop,
        progress=lambda done, total: log.show("evaluate", done, total),
    )
    try:
        summary = config.task.evaluate(scorer, config.seed, folder)
    except Interrupted:
        return None
    log.write("eval", step, summary)
    metric = config.task.metric
    figures = ", ".join(f"{n} {metric.text(value)}{metric.unit}" for n, value in summary.items())
    log.say(f"step {step}: {metric.name}: {figures}  ({folder})")
    if jax.process_index() == 0:
        write_report(workdir, config, step, folder, summary)
    return summary


class _Meter:
    """Checks, times and logs the steps one after the other."""

    def __init__(self, config: TrainConfig, log: RunLog, start: int):
        self._config, self._log, self._start = config, log, start
        self._mark: tuple[int, float] | None = None
        self._began = time.monotonic()

    def restart(self) -> None:
        """Leaves what has happened since the last step out of the timing."""
        self._mark = None

    def record(self, step: int, figures: dict) -> None:
        """Waits for the step and logs it when its turn has come.

        Raises:
          NonFiniteError: its loss or gradient is not finite.
        """
        config = self._config
        loss, norm = float(figures["loss"]), float(figures["gradient_norm"])
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteError(
                f"step {step}: loss {loss}, gradient norm {norm}; nothing of it was saved, the last"
                " good checkpoint is kept (try a lower optimizer.learning_rate, or look at the"
                " step's data)"
            )
        now = time.monotonic()
        if step == self._start + 1:
            self._log.say(f"first step, with compilation: {now - self._began:.1f} s")
        if step % config.log_every == 0 or step == config.steps:
            figures = dict(figures) | self._speed(step, now)
            self._log.write("train", step, figures)
            self._mark = (step, now)
        speed = figures.get("tokens_per_second")
        text = f"loss {loss:.4f}" + (f"  {speed:,.0f} tokens/s" if speed else "")
        if speed or not self._log.console.is_terminal:
            self._log.show("train", step, config.steps, text)

    def _speed(self, step: int, now: float) -> dict[str, float]:
        if self._mark is None or step == self._mark[0]:
            return {}
        config, (since, then) = self._config, self._mark
        seconds = (now - then) / (step - since)
        tokens = config.batch_size * config.task.length / seconds
        figures = {
            "step_seconds": seconds,
            "tokens_per_second": tokens,
            "eta_seconds": seconds * (config.steps - step),
        }
        used = utilisation(config, tokens)
        return figures if used is None else figures | {"mfu": used}
