"""Folders and files that are there whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Generator
from pathlib import Path


@contextlib.contextmanager
def new_folder(target: Path) -> Generator[Path]:
    """An empty folder beside `target`, which becomes it at the end; an error leaves neither.

    Raises:
      FileExistsError: the target is there already.
    """
    with _renamed(target) as partial:
        partial.mkdir(parents=True)
        yield partial


@contextlib.contextmanager
def new_file(target: Path) -> Generator[Path]:
    """The same for a file, which the caller writes."""
    with _renamed(target) as partial:
        partial.parent.mkdir(parents=True, exist_ok=True)
        yield partial


@contextlib.contextmanager
def _renamed(target):
    if target.exists():
        raise FileExistsError(f"{target} exists already; name another, or remove it")
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    try:
        yield partial
        partial.rename(target)
    except BaseException:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)
        raise
