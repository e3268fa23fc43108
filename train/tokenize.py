"""Text files to a token file: `python -m train.tokenize --tokenizer PATH --out FILE.bin FILES...`.

The documents of the files, in order, become one row of ids: every document after one BOS (if the
model uses one) and, with --eos, before EOS. One that is interrupted goes on when started again.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import tyro
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from train.data.documents import check_files, read_documents
from train.data.task import Stop
from train.data.tokens import ID
from train.ending import command
from train.interrupt import Interrupt
from train.tokenizer import Tokenizer, load_tokenizer

WIDE = np.dtype("<u4")
"""Of ids that uint16 does not hold."""


def tokenize(
    files: tyro.conf.Positional[tuple[Path, ...]],
    tokenizer: Path,
    out: Path,
    field: str = "text",
    eos: bool = False,
    skip_documents: int = 0,
    documents: int | None = None,
    max_tokens: int | None = None,
) -> dict[str, Any] | None:
    """Writes the ids of text files into one file, and what they are into FILE.json beside it.

    Args:
      files: text, whole, or .jsonl, a document a row; either may be compressed, .gz.
      tokenizer: a model's folder, a .model, a tokenizer.json or a .gguf.
      out: .bin for raw uint16, .npy for any vocabulary; must not exist.
      field: of a .jsonl row, which holds the text.
      eos: put EOS behind every document.
      skip_documents: how many to leave out at the head, counted over all files.
      documents: how many to take at most after those.
      max_tokens: where to stop, in the middle of a document if need be.

    Returns:
      what FILE.json says; None when interrupted.

    Raises:
      ValueError: arguments or files that cannot work.
      FileNotFoundError: no tokenizer there.
    """
    check_files(files)
    _check_range(skip_documents, documents, max_tokens)
    reader = load_tokenizer(tokenizer)
    if eos and reader.eos is None:
        raise ValueError(f"eos: tokenizer {reader.name} has no EOS; leave --eos out")
    dtype = _check_out(out, reader)
    record = {
        "tokenizer": reader.name,
        "vocabulary_sha256": reader.fingerprint,
        "vocab_size": reader.vocab_size,
        "bos": reader.bos if reader.adds_bos else None,
        "eos": reader.eos if eos else None,
        "sources": [path.name for path in files],
        "field": field,
        "skip_documents": skip_documents,
        "max_documents": documents,
        "max_tokens": max_tokens,
        "dtype": dtype.name,
    }
    end = None if documents is None else skip_documents + documents
    texts = itertools.chain.from_iterable(read_documents(path, field) for path in files)
    with Interrupt() as stop, _Part(out, dtype, record) as part:
        rest = itertools.islice(texts, skip_documents + part.documents, end)
        ends = [reader.eos] if eos and reader.eos is not None else []
        if not part.fill((reader.encode(text) + ends for text in rest), stop):
            return None
        if not part.tokens:
            raise ValueError("no tokens: the files hold no document in the range asked for")
        return part.finish()


def _check_range(skip_documents: int, documents: int | None, max_tokens: int | None) -> None:
    if skip_documents < 0:
        raise ValueError(f"skip_documents={skip_documents} must be >= 0")
    for field, value in (("documents", documents), ("max_tokens", max_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{field}={value} must be >= 1; leave --{field.replace('_', '-')} out")


def _check_out(out: Path, tokenizer: Tokenizer) -> np.dtype:
    """The type of ids in `out`, which can be written."""
    narrow = tokenizer.vocab_size <= 2**16
    if out.suffix not in (".bin", ".npy"):
        raise ValueError(f"out={out} must end in .bin (raw uint16) or .npy")
    if out.suffix == ".bin" and not narrow:
        raise ValueError(
            f"out={out} would hold uint16 and tokenizer {tokenizer.name} has"
            f" {tokenizer.vocab_size} ids: end it in .npy"
        )
    for path in (out, _beside(out)):
        if path.exists():
            raise ValueError(f"{path} exists and is not overwritten: name another --out")
    if not out.parent.is_dir():
        raise ValueError(f"out={out}: there is no folder {out.parent}; make it first")
    return ID if narrow else WIDE


def _beside(out: Path) -> Path:
    return out.with_name(f"{out.name}.json")


class _Part:
    """The file while it grows, under another name, and how far it is."""

    def __init__(self, out: Path, dtype: np.dtype, record: dict[str, Any]):
        """Goes on with what an interrupted call with the same record left, or begins anew."""
        self._out, self._dtype, self._record = out, dtype, record
        self._path, self._state = (out.with_name(f"{out.name}.part{end}") for end in ("", ".json"))
        self.documents = self.tokens = 0
        self._file: IO[bytes]

    def __enter__(self) -> _Part:
        """Opens the file."""
        state = json.loads(self._state.read_text()) if self._state.exists() else {}
        again = state.get("record") == self._record and self._is_whole(state["tokens"])
        self._file = self._path.open("r+b" if again else "w+b")
        self._state.unlink(missing_ok=True)
        if again:
            self.documents, self.tokens = state["documents"], state["tokens"]
            self._file.seek(0, 2)
        else:
            self._file.write(self._head())
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        """Closes the file; after an error nothing of it is left."""
        self._file.close()
        if kind is not None:
            self._path.unlink(missing_ok=True)

    def fill(self, rows: Iterator[list[int]], stop: Stop) -> bool:
        """Appends documents until they or the tokens asked for are all; False when told to stop."""
        limit, console = self._record["max_tokens"], Console(stderr=True)
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            bar = progress.add_task("tokenize")
            while limit is None or self.tokens < limit:
                if stop():
                    self._save()
                    return False
                ids = next(rows, None)
                if ids is None:
                    break
                ids = ids[: None if limit is None else limit - self.tokens]
                self._file.write(np.asarray(ids, self._dtype).tobytes())
                self.documents, self.tokens = self.documents + 1, self.tokens + len(ids)
                text = f"{self.documents:,} documents, {self.tokens:,} tokens"
                progress.update(bar, description=text)
        return True

    def finish(self) -> dict[str, Any]:
        """Gives the file its name."""
        self._file.seek(0)
        self._file.write(self._head())
        self._file.close()
        record = self._record | {"documents": self.documents, "tokens": self.tokens}
        self._path.rename(self._out)  # the ids first: the record alone would be in the way
        _beside(self._out).write_text(json.dumps(record, indent=1) + "\n")
        return record

    def _is_whole(self, tokens: int) -> bool:
        """Whether the part holds so many tokens."""
        size = len(self._head()) + tokens * self._dtype.itemsize
        return self._path.exists() and self._path.stat().st_size == size

    def _save(self) -> None:
        self._file.flush()
        progress = {"documents": self.documents, "tokens": self.tokens}
        self._state.write_text(json.dumps(progress | {"record": self._record}))

    def _head(self) -> bytes:
        """Of a .npy: as long for any number of tokens, NumPy leaves room for it to grow."""
        if self._out.suffix != ".npy":
            return b""
        head = io.BytesIO()
        shape = {"descr": self._dtype.str, "fortran_order": False, "shape": (self.tokens,)}
        np.lib.format.write_array_header_1_0(head, shape)
        return head.getvalue()


def main(args: Sequence[str] | None = None) -> None:
    """The command."""
    console = Console(highlight=False, soft_wrap=True)
    with command():
        record = tyro.cli(tokenize, args=args, prog="python -m train.tokenize")
    if record is None:
        console.print("interrupted: the same command goes on from there", markup=False)
    else:
        done = f"{record['documents']:,} documents, {record['tokens']:,} {record['dtype']} tokens"
        console.print(f"{done}; what they are stands in the .json beside them", markup=False)


if __name__ == "__main__":
    main()
