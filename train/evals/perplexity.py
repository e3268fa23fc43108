"""Perplexity of texts in windows of several lengths, as JSON and as curves.

Two definitions, from the same windows: the sliding one, which scores every token once, and the one
of LongLoRA's and TAPE's evaluations, which pools all losses of all windows.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import matplotlib
import numpy as np
from jaxtyping import Int
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from rich.table import Table

from train.data.documents import check_files, read_documents
from train.data.task import Sample
from train.data.tokens import read_ids
from train.evals.runner import Scorer
from train.evals.tokens import perplexity
from train.tokenizer import Tokenizer

matplotlib.use("Agg")

Document = Int[np.ndarray, " T"]

TOKEN_FILES = (".bin", ".npy")
"""Files of ids, in which one document is taken to follow the other as in one text."""

DEFINITION = (
    "exp(sum of -ln p / scored tokens). Windows of `length` tokens start at 0, stride, 2 stride,"
    " ... until one reaches the document's end. The first window scores all its tokens but the"
    " first, every other one only its last `stride` tokens (the last window: what is left). So at"
    " every length the same tokens are scored, each once: all of a document but its first. A window"
    " after the first begins where it begins, without BOS."
)
POOLED = (
    "exp(mean of -ln p over all length - 1 next tokens of all windows range(0, T - length, stride)"
    " of the documents): tokens count as often as windows hold them, also with little before them"
    " (TAPE's and LongLoRA's evaluations)."
)


@dataclasses.dataclass(frozen=True)
class Window:
    """A part of a document.

    Attributes:
      start: where in the document.
      size: tokens of the document in it, at most the length.
      first: the first token that is scored, counted from `start`.
      pooled: whether the pooled definition has it.
    """

    start: int
    size: int
    first: int
    pooled: bool


def windows(tokens: int, length: int, stride: int) -> Iterator[Window]:
    """The windows of a document of so many tokens; none where there is nothing to score."""
    if tokens < 2:
        return
    for start in range(0, max(tokens - length + stride, 1), stride):
        size = min(length, tokens - start)
        yield Window(start, size, length - stride if start else 1, start < tokens - length)


def sample(ids: Document, window: Window, length: int) -> Sample:
    """The window with the token that follows each of its own; what is missing is not scored."""
    row = np.zeros(length + 1, np.int32)
    row[: window.size] = ids[window.start : window.start + window.size]
    weights = (np.arange(length) < window.size - 1).astype(np.float32)
    return {"tokens": row[:-1], "targets": row[1:], "weights": weights}


def measure(
    scorer: Scorer, documents: Sequence[Document], length: int, stride: int
) -> dict[str, float | int | None]:
    """Both perplexities in windows of one length.

    Returns:
      perplexity, loss [nats / token] and scored_tokens; those of the pooled definition, None where
      no document is longer than a window; windows.

    Raises:
      Interrupted: the scorer was told to stop.
    """
    plan = [(ids, part) for ids in documents for part in windows(len(ids), length, stride)]
    rows = scorer.stream_losses((sample(*one, length) for one in plan), len(plan))
    sums, counts = np.zeros(2), np.zeros(2, int)  # of the sliding definition, of the pooled one
    for (_, part), row in zip(plan, rows, strict=True):
        losses = row[: part.size - 1].astype(np.float64)
        scored = losses[part.first - 1 :]
        sums[0], counts[0] = sums[0] + scored.sum(), counts[0] + scored.size
        if part.pooled:
            sums[1], counts[1] = sums[1] + losses.sum(), counts[1] + losses.size
    loss, pooled = float(sums[0] / counts[0]), float(sums[1] / counts[1]) if counts[1] else None
    return {
        "perplexity": perplexity(loss),
        "loss": loss,
        "scored_tokens": int(counts[0]),
        "pooled_perplexity": None if pooled is None else perplexity(pooled),
        "pooled_loss": pooled,
        "pooled_tokens": int(counts[1]),
        "windows": len(plan),
    }


def check_sizes(lengths: Sequence[int], stride: int, max_tokens: int | None) -> None:
    """Raises ValueError for numbers that leave a token without one before it, or nothing at all."""
    if not lengths or min(lengths) < 2:
        raise ValueError(f"lengths={tuple(lengths)}: give at least one, each >= 2")
    if not 1 <= stride < min(lengths):
        raise ValueError(
            f"stride={stride} must lie in [1, {min(lengths) - 1}], below every length: a scored"
            " token needs one before it in its window"
        )
    if max_tokens is not None and max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens} must be >= 2")


def read_texts(
    path: Path, tokenizer: Tokenizer | None, field: str, max_tokens: int | None
) -> list[Document]:
    """The documents of a file: a token file or a text is one, each row of a .jsonl is one.

    Args:
      path: .bin or .npy of ids, text, or .jsonl; the last two may be compressed, .gz.
      tokenizer: for what is no token file.
      field: of a .jsonl row, which holds the text.
      max_tokens: of all documents together, the head of the file; all when None.

    Raises:
      ValueError: no such file, one that holds something else, or no tokenizer for it.
    """
    if path.suffix in TOKEN_FILES:
        return [read_ids(path)[:max_tokens]]
    check_files((path,))
    if tokenizer is None:
        raise ValueError(f"{path} is text and the model has no tokenizer: name one, --tokenizer")
    documents, left = [], np.inf if max_tokens is None else max_tokens
    for text in read_documents(path, field):
        if left <= 0:
            break
        documents.append(np.asarray(tokenizer.encode(text), np.int32)[: int(min(left, 2**31))])
        left -= len(documents[-1])
    return documents


def check_documents(
    path: Path, documents: Sequence[Document], lengths: Sequence[int], vocab_size: int
) -> None:
    """Raises ValueError for documents that are too short, or with ids that the model lacks."""
    longest = max(map(len, documents), default=0)
    if longest < max(lengths):
        raise ValueError(
            f"lengths={tuple(lengths)}: the longest document of {path} has {longest} tokens, so"
            f" windows of {max(lengths)} are never full: use longer texts or lengths <= {longest}"
        )
    highest = max(int(ids.max()) for ids in documents if len(ids))
    if highest >= vocab_size:
        raise ValueError(
            f"{path} holds token id {highest}, but model.vocab_size={vocab_size}: use ids of the"
            " model's own tokenizer"
        )


def write_perplexity(
    out: Path, about: Mapping[str, Any], by_length: Mapping[int, Mapping[str, Any]]
) -> None:
    """Writes perplexity.json and perplexity.png into `out`, of what `measure` gave by length."""
    if jax.process_index() != 0:
        return
    definitions = {"definition": DEFINITION, "pooled_definition": POOLED}
    record = {**about, **definitions, "lengths": by_length}
    out.mkdir(parents=True, exist_ok=True)
    (out / "perplexity.json").write_text(json.dumps(record, indent=1) + "\n")
    draw_perplexity(about, by_length).savefig(out / "perplexity.png", dpi=120)


CURVES = {
    "perplexity": ("o-", "sliding: every token once", -14),
    "pooled_perplexity": ("s--", "pooled: all tokens of all windows", 7),
}
"""Of what `measure` gives: how it is drawn, what it is, and how far above it its number stands."""


def draw_perplexity(about: Mapping[str, Any], by_length: Mapping[int, Mapping[str, Any]]) -> Figure:
    """Both definitions over the length of the window."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    axes = figure.subplots()
    for name, (style, label, above) in CURVES.items():
        points = {n: row[name] for n, row in sorted(by_length.items()) if row[name] is not None}
        axes.plot(list(points), list(points.values()), style, label=label)
        for point in points.items():
            text = f"{point[1]:.2f}"
            axes.annotate(text, point, (0, above), textcoords="offset points", ha="center")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(by_length), [str(length) for length in sorted(by_length)])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.1, y=0.2)
    axes.set(xlabel="tokens of a window", ylabel="perplexity")
    axes.set_title(f"{about['model']} on {about['data']}, stride {about['stride']}")
    axes.legend()
    return figure


def tabulate(about: Mapping[str, Any], by_length: Mapping[int, Mapping[str, Any]]) -> Table:
    """A line for every length."""
    table = Table(title=f"perplexity of {about['model']} on {about['data']}")
    for head in ("length", "sliding", "of tokens", "pooled", "of tokens"):
        table.add_column(head, justify="right")
    for length, row in sorted(by_length.items()):
        pooled = row["pooled_perplexity"]
        table.add_row(
            str(length),
            f"{row['perplexity']:.4f}",
            f"{row['scored_tokens']:,}",
            "-" if pooled is None else f"{pooled:.4f}",
            f"{row['pooled_tokens']:,}",
        )
    return table
