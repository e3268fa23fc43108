"""A benchmark from its settings to a table, NAME.json and NAME.png."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import tyro
from matplotlib.figure import Figure

from benchmarks import timing

Report = Mapping[str, Any]


class Settings(Protocol):
    """What all benchmarks are told: a folder for what they find."""

    out: Path


def published(
    name: str,
    settings: Settings,
    measure: Callable[[], Report],
    show: Callable[[Report], None],
    draw: Callable[[Report], Figure],
) -> Report:
    """What was measured, with the machine, date and settings; also shown, and written to `out`."""
    timing.make_folder(name, settings.out)
    report = timing.environment(settings) | measure()
    show(report)
    path = settings.out / f"{name}.json"
    timing.write_json(path, report)
    draw(report).savefig(path.with_suffix(".png"), dpi=120)
    return report


def command(benchmark: type, run: Callable[[Any], Any], description: str | None) -> None:
    """The command line of a benchmark; exit status 1 on bad input."""
    try:
        run(tyro.cli(benchmark, description=description))
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
