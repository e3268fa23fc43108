"""Finite groups as multiplication tables, closed from permutations that generate them."""

import functools
from collections.abc import Iterable, Sequence

import numpy as np

Cycles = Sequence[Sequence[int]]

GENERATORS: dict[str, tuple[int, Sequence[Cycles]]] = {
    "Z60": (12, [[(0, 1, 2), (3, 4, 5, 6), (7, 8, 9, 10, 11)]]),
    "A4xZ5": (9, [[(0, 1, 2)], [(1, 2, 3)], [(4, 5, 6, 7, 8)]]),
    "A5": (5, [[(0, 1, 2)], [(0, 1, 2, 3, 4)]]),
    "S5": (5, [[(0, 1)], [(0, 1, 2, 3, 4)]]),
}
"""Group -> the points that are permuted, and the generators as their cycles.

Three groups of 60 elements, abelian, solvable and not solvable, as in the literature on state
tracking (arXiv 2404.08819), and the symmetric group of 120.
"""


@functools.cache
def multiplication_table(group: str) -> np.ndarray:
    """table[a, b] = a b, "first a, then b", as (|G|, |G|) int32; element 0 is the identity."""
    index = _elements(group)
    rows = [[index[_then(a, b)] for b in index] for a in index]
    table = np.array(rows, np.int32)
    table.flags.writeable = False  # shared by everyone who asks
    return table


def generating_elements(group: str) -> np.ndarray:
    """The identity and the generators, as elements of `multiplication_table`; int32."""
    return np.array([0, *(_elements(group)[g] for g in _generators(group))], np.int32)


def _generators(group: str) -> list[tuple[int, ...]]:
    points, generators = GENERATORS[group]
    return [_permutation(points, cycles) for cycles in generators]


@functools.cache
def _elements(group: str) -> dict[tuple[int, ...], int]:
    """Permutation -> its number, in lexicographic order: the identity is the first."""
    return {element: i for i, element in enumerate(sorted(_closure(_generators(group))))}


def _permutation(points: int, cycles: Cycles) -> tuple[int, ...]:
    image = list(range(points))
    for cycle in cycles:
        for point, following in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
            image[point] = following
    return tuple(image)


def _then(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(b[point] for point in a)


def _closure(generators: Iterable[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Every product of the generators: a finite set closed under products has inverses too."""
    generators = list(generators)
    found, frontier = set(generators), list(generators)
    while frontier:
        products = {_then(a, b) for a in frontier for b in generators}
        frontier = list(products - found)
        found |= products
    return found
