"""The protocol of a training task: where samples come from and how the model is scored on it."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from train.evals.runner import Scorer

Sample = dict[str, np.ndarray]
"""`tokens` and `targets` (N,) int32 and `weights` (N,) float32: 1 where the target is scored."""


class Source(Protocol):
    """Samples by index: item i is the same for every process and every run."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


@dataclasses.dataclass(frozen=True)
class Metric:
    """What a task's headline numbers are, and how they are read.

    Attributes:
      name: in words.
      headline: the number that orders models.
      fraction: numbers are fractions of 1, shown in percent, and more is better; else they are
        shown as they are, and less is better.
    """

    name: str
    headline: str = "mean"
    fraction: bool = True

    @property
    def unit(self) -> str:
        """What stands behind a number."""
        return " %" if self.fraction else ""

    def text(self, value: float, digits: int = 2) -> str:
        """A number without its unit."""
        return f"{100 * value if self.fraction else value:.{digits}f}"

    def order(self, summary: Mapping[str, float]) -> float:
        """What to sort models by, the best first; those without the headline number come last."""
        if self.headline not in summary:
            return math.inf
        return -summary[self.headline] if self.fraction else summary[self.headline]


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """A frozen, hashable description of a task; subclasses set `name` to their registry name."""

    name: str

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """N: tokens of a training sample."""

    @property
    @abc.abstractmethod
    def longest(self) -> int:
        """Tokens of the longest row that training or evaluation gives the model."""

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """Ids a sample may hold; the model needs at least as many."""

    @property
    @abc.abstractmethod
    def metric(self) -> Metric:
        """What `evaluate` measures."""

    @property
    @abc.abstractmethod
    def filler(self) -> int:
        """The id of a token that says nothing, to be put in front of a row."""

    @abc.abstractmethod
    def validate(self) -> None:
        """Raises ValueError, naming field, value and fix."""

    @abc.abstractmethod
    def source(self, seed: int) -> Source:
        """The training samples of this seed."""

    @abc.abstractmethod
    def evaluate(self, scorer: Scorer, seed: int, folder: Path) -> dict[str, float]:
        """Scores a model, writes JSON and a picture into `folder`, returns the headline numbers."""

    @abc.abstractmethod
    def probe(self, seed: int, count: int) -> np.ndarray:
        """Token rows (count, N) int32 that training has not seen, to look at a model's inside."""

    @abc.abstractmethod
    def draw_comparison(self, evaluations: Mapping[str, Sequence[Path]]) -> Figure:
        """One picture of several encodings, from the folders that `evaluate` wrote, one a seed."""


Stop = Callable[[], bool]
