"""A tensor that is described before it is read."""

import dataclasses
from typing import Protocol

import numpy as np

Index = tuple[slice, ...]


class Source(Protocol):
    """One tensor, wherever it lies: its shape and dtype cost nothing, its numbers are read."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        ...

    @property
    def dtype(self) -> np.dtype:
        """Of what `read` gives."""
        ...

    def read(self, index: Index = ()) -> np.ndarray:
        """The part of it in these slices (step 1), one per leading axis."""
        ...


@dataclasses.dataclass(frozen=True)
class Held:
    """An array that is in memory already."""

    array: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the array."""
        return self.array.shape

    @property
    def dtype(self) -> np.dtype:
        """Of the array."""
        return self.array.dtype

    def read(self, index: Index = ()) -> np.ndarray:
        """A view."""
        return self.array[index]
