"""Documents of text files, one at a time: whole texts, or the rows of JSON lines."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path


def read_documents(path: Path | str, field: str = "text") -> Iterator[str]:
    """The documents of a file: every row of `.jsonl`, or any other text as a whole.

    Either may be compressed, `.gz`. One document is in memory at a time.

    Args:
      path: UTF-8.
      field: of a row, which holds its text.

    Raises:
      ValueError: bytes that are no text, a row that is no JSON object or lacks the field; the
        message gives the file and the line.
    """
    path = Path(path)
    rows = path.name.removesuffix(".gz").endswith(".jsonl")
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8", newline="") as file:
            yield from _rows(path, file, field) if rows else [file.read()]
    except (UnicodeDecodeError, gzip.BadGzipFile, EOFError) as error:
        raise ValueError(f"{path} is not text, plain or .gz, in UTF-8: {error}") from None


def check_files(paths: tuple[Path, ...]) -> None:
    """Raises ValueError when there is none, or one is not a file."""
    if not paths:
        raise ValueError("no files: name at least one of text, .jsonl or either with .gz")
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path} is not a file: name text, .jsonl or either with .gz")


def _rows(path, file, field) -> Iterator[str]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} line {number} is not JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get(field), str):
            has = sorted(row) if isinstance(row, dict) else type(row).__name__
            raise ValueError(
                f"{path} line {number} has no text in field {field!r}, only {has}: name the field"
                " with --field"
            )
        yield row[field]
