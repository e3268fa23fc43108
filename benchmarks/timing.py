"""What the benchmarks share: clocks, compilation, results on disk, checks of what the user asked.

JAX is imported where it is used: a peer's process must not carry it.
"""

import concurrent.futures
import dataclasses
import datetime
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

Run = Callable[[], Any]
Key = TypeVar("Key", bound=Hashable)


def seconds(run: Run) -> float:
    """Wall-clock seconds of one call, which returns when its work is done."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def attempt(function: Callable[..., Any], *arguments) -> Any:
    """What the call returns, or the exception it raises: one failure must not stop the others."""
    try:
        return function(*arguments)
    except Exception as error:
        return error


def interleaved(
    runs: Mapping[Key, Run],
    rounds: int,
    finish: Callable[[Any], Any] = lambda result: result,
    shortest: float = 0.0,
) -> dict[Key, float | Exception]:
    """Median seconds of each run over `rounds` rounds of all of them, or what it raised.

    A slow minute of the machine hits all runs.

    Args:
      runs: called once to warm up; they may return before their work is done.
      finish: waits for what a run returned, and for all that was started before it.
      shortest: a run that takes fewer seconds is queued several times and waited for once, so that
        work is timed and not its launch.
    """
    batches = {key: attempt(_batch, run, finish, shortest) for key, run in runs.items()}
    failed = {key: batch for key, batch in batches.items() if isinstance(batch, Exception)}
    times: dict[Key, list[float]] = {key: [] for key in runs}
    for _ in range(rounds):
        for key, batch in batches.items():
            if key in failed:
                continue
            spent = attempt(batch)
            if isinstance(spent, Exception):
                failed[key] = spent
            else:
                times[key].append(spent)
    return {key: failed[key] if key in failed else statistics.median(times[key]) for key in runs}


def _batch(run, finish, shortest):
    """A function that returns the seconds of one of enough queued runs to fill `shortest`."""
    finish(run())
    count = max(1, math.ceil(shortest / seconds(lambda: finish(run())))) if shortest else 1

    def queued():
        for _ in range(count - 1):
            run()
        finish(run())

    return lambda: seconds(queued) / count


def on_device(runs: Mapping[Key, Run], rounds: int) -> dict[Key, float | Exception]:
    """`interleaved` for functions that return JAX arrays.

    An accelerator works its queue off in order; a CPU may not, and needs none: launches are short
    beside its work.
    """
    import jax

    shortest = 0.0 if jax.default_backend() == "cpu" else 0.02
    return interleaved(runs, rounds, jax.block_until_ready, shortest)


def compiled(
    programs: Mapping[Key, Run], options: Mapping[str, Any] | None = None
) -> dict[Key, Any]:
    """Each program compiled, or what it raised.

    Args:
      programs: functions that return a `jax.stages.Lowered`. They run one after the other, because
        they are Python; the compiler runs on all cores.
      options: of the compiler.
    """
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        started = {}
        try:
            for key, lower in programs.items():
                lowered = attempt(lower)
                if not isinstance(lowered, Exception):
                    lowered = pool.submit(attempt, lowered.compile, options)
                started[key] = lowered
            return {k: x if isinstance(x, Exception) else x.result() for k, x in started.items()}
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def environment(settings: Any) -> dict[str, Any]:
    """Where, when and with what settings figures were measured."""
    import jax

    fields = dataclasses.asdict(settings)
    return {
        "device": jax.devices()[0].device_kind,
        "platform": jax.default_backend(),
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        "settings": {key: x for key, x in fields.items() if not isinstance(x, Path)},
    }


def write(path: Path, text: str) -> None:
    """Replaces a file at once: whoever reads it, whenever, finds it whole."""
    beside = path.with_name(path.name + ".partial")
    beside.write_text(text)
    os.replace(beside, path)


def write_json(path: Path, data: Any) -> None:
    """`data` as indented JSON, replacing the file at once."""
    write(path, json.dumps(data, indent=2) + "\n")


def summary(error: Exception) -> str:
    """One line of an exception whose message may be pages of a compiler's output."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200] if lines else ''}"


def console() -> Console:
    """The terminal, or wide lines where there is none."""
    found = Console()
    return found if found.is_terminal else Console(width=160)


def check_positive(owner: str, settings: Any, *fields: str) -> None:
    """Raises ValueError for a number, or a member of a tuple, below 1, or an empty tuple.

    A field that is None is left to its default.
    """
    for field in fields:
        value = getattr(settings, field)
        members = value if isinstance(value, tuple) else (value,)
        if value is not None and not (members and min(members) >= 1):
            raise ValueError(f"{owner}.{field}={value} must be whole numbers >= 1")


def make_folder(owner: str, path: Path) -> None:
    """Makes the output folder.

    Raises:
      ValueError: it cannot be made, before anything was measured in vain.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{owner}.out={path} cannot be made ({error.strerror}): name a folder"
        ) from None
