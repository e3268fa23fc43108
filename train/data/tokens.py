"""Language modelling on files of token ids, cut into windows by index.

A file holds ids, its documents one after the other: raw little-endian uint16 (LongLoRA's `.bin`),
or, for vocabularies beyond 65,536 ids, a NumPy array of unsigned integers (`.npy`). It is read
where it lies, through a memory map. `python -m train.tokenize` writes both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from grain.experimental import index_shuffle

from train.data.streams import generator
from train.data.task import Metric, Sample, Task

ID = np.dtype("<u2")
"""Of a raw file."""
LARGEST = 2**31 - 1
"""Vocabulary: the model reads ids as int32."""
LOOKED_AT = 2**20
"""Ids at the head of a file that are compared with the vocabulary before a run starts."""


def read_ids(path: Path | str, called: str = "") -> np.ndarray:
    """The ids of a file (T,), unsigned, mapped, not loaded.

    Args:
      path: ends in .npy, or is raw uint16.
      called: how errors name it, if not by its path.

    Raises:
      ValueError: no such file, or one that holds something else.
    """
    path, called = Path(path), called or str(path)
    if not path.is_file():
        raise ValueError(f"{called} is not a file: name one of ids, .npy or raw uint16")
    if path.suffix == ".npy":
        return _read_array(path, called)
    size = path.stat().st_size
    if size % ID.itemsize:
        raise ValueError(
            f"{called} has an odd number of bytes, {size}: write every id as little-endian uint16"
        )
    return np.memmap(path, ID, mode="r").view(np.ndarray) if size else np.empty(0, ID)


def _read_array(path, called):
    try:
        ids = np.load(path, mmap_mode="r").view(np.ndarray)
    except ValueError as error:
        raise ValueError(f"{called} is not an array as NumPy writes them: {error}") from None
    if ids.ndim != 1 or ids.dtype.kind != "u":
        raise ValueError(
            f"{called} holds {ids.dtype} of shape {ids.shape}: write one row of unsigned integers"
        )
    return ids


def window(ids: np.ndarray, start: int, length: int) -> Sample:
    """`length` tokens from `start` on, each with the one after it; the end runs into the start."""
    row = ids.take(np.arange(start, start + length + 1), mode="wrap").astype(np.int32)
    return {"tokens": row[:-1], "targets": row[1:], "weights": np.ones(length, np.float32)}


@dataclasses.dataclass(frozen=True, eq=False)
class TokensSource:
    """Sample i of a seed, for any i.

    Every pass over the ids cuts them from an offset of its own into windows that do not overlap,
    and visits each of these once, in an order of its own. The pass is a ring: one of its windows
    may run over the end. Fewer than `length` tokens are left out, other ones in each pass.

    Attributes:
      ids: (T,), more than `length`.
      length: N.
    """

    ids: np.ndarray
    length: int
    seed: int

    def __len__(self) -> int:
        """More samples than any run draws."""
        return 2**40

    def __getitem__(self, index: int) -> Sample:
        """The window at the place of `index` in its pass."""
        count = len(self.ids) // self.length
        epoch, place = divmod(int(index), count)
        offset, key = generator(self.seed, 0, epoch).integers([len(self.ids), 2**32])
        chosen = index_shuffle(place, max_index=count - 1, seed=int(key), rounds=4)
        return window(self.ids, int(offset) + chosen * self.length, self.length)


@dataclasses.dataclass(frozen=True)
class Tokens(Task):
    """Predict the next token of `train_file`; perplexity on the head of `eval_file`.

    Attributes:
      train_file, eval_file: ids as `read_ids` takes them, documents concatenated.
      sequence_length: tokens of a training window, N.
      vocab_size: ids of the tokenizer that made the files.
      eval_windows: windows of N tokens that are scored, from the start of `eval_file` on.
      eval_lengths: windows of other lengths in which the same tokens are scored again.
      filler: an id that says nothing; the default is BOS of Llama's tokenizers.
    """

    name: str = "tokens"
    train_file: str = ""
    eval_file: str = ""
    sequence_length: int = 1_024
    vocab_size: int = 32_000
    eval_windows: int = 512
    eval_lengths: tuple[int, ...] = ()
    filler: int = 1

    @property
    def length(self) -> int:
        """N of training rows."""
        return self.sequence_length

    @property
    def longest(self) -> int:
        """Of training and evaluation."""
        return max(self.lengths)

    @property
    def metric(self) -> Metric:
        """Of held-out tokens."""
        return Metric("perplexity", headline="perplexity", fraction=False)

    @property
    def scored_tokens(self) -> int:
        """At every length."""
        return self.eval_windows * self.sequence_length

    @property
    def lengths(self) -> list[int]:
        """Of the scored windows, shortest first."""
        return sorted({self.sequence_length, *self.eval_lengths})

    def validate(self) -> None:
        """Raises ValueError for sizes and files that cannot work."""
        for field in ("sequence_length", "eval_windows"):
            if getattr(self, field) < 1:
                raise ValueError(f"task.{field}={getattr(self, field)} must be >= 1")
        if not 1 <= self.vocab_size <= LARGEST:
            raise ValueError(f"task.vocab_size={self.vocab_size} must lie in [1, {LARGEST}]")
        if not 0 <= self.filler < self.vocab_size:
            raise ValueError(
                f"task.filler={self.filler} must lie in [0, task.vocab_size={self.vocab_size})"
            )
        for length in self.eval_lengths:
            if length < 1 or self.scored_tokens % length:
                raise ValueError(
                    f"task.eval_lengths={self.eval_lengths}: {length} must divide"
                    f" task.eval_windows * task.sequence_length={self.scored_tokens}, the tokens"
                    " that are scored at every length"
                )
        self._check_file("train_file", self.sequence_length + 1, "sequence_length")
        self._check_file("eval_file", self.scored_tokens + 1, "eval_windows")

    def _check_file(self, field: str, needed: int, lower: str) -> None:
        path = getattr(self, field)
        where = f"task.{field}={path!r}"
        ids = read_ids(path, where)
        if ids.dtype == ID and self.vocab_size > 2**16:
            raise ValueError(
                f"{where} holds uint16 and task.vocab_size={self.vocab_size} does not fit: write"
                " the ids as uint32 into a .npy"
            )
        if len(ids) < needed:
            raise ValueError(
                f"{where} holds {len(ids)} tokens and {needed} are needed: use a longer file or"
                f" lower task.{lower}={getattr(self, lower)}"
            )
        high = ids[: max(needed, LOOKED_AT)].max()
        if high >= self.vocab_size:
            raise ValueError(
                f"{where} holds token id {high}, but task.vocab_size={self.vocab_size}: give the"
                " size of the vocabulary that made it, and a file of ids"
            )

    def source(self, seed: int) -> TokensSource:
        """Windows of `train_file`."""
        return TokensSource(read_ids(self.train_file), self.sequence_length, seed)

    def held_out(self, length: int) -> Iterator[Sample]:
        """The scored tokens in windows of `length` that do not overlap."""
        ids = read_ids(self.eval_file)
        for start in range(0, self.scored_tokens, length):
            yield window(ids, start, length)

    def probe(self, seed, count):
        """Windows of the training length, anywhere among the scored tokens."""
        ids, length = read_ids(self.eval_file), self.sequence_length
        starts = generator(seed, 1).integers(0, self.scored_tokens - length + 1, count)
        return np.stack([window(ids, start, length)["tokens"] for start in starts])

    def evaluate(self, scorer, seed, folder):
        """Perplexity and loss by position; see train.evals.tokens."""
        from train.evals.tokens import evaluate_perplexity

        return evaluate_perplexity(self, scorer, folder)

    def draw_comparison(self, evaluations):
        """Every encoding's loss by position in one picture."""
        from train.evals.tokens import draw_comparison

        return draw_comparison(evaluations)
