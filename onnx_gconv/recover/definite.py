"""Positive definite matrices in tiles: factored, solved with and inverted, on several threads.

SciPy's LAPACK holds the interpreter while it computes, so that other threads wait; NumPy's products do not. The tiles are the same
on any number of threads, and so is every bit of the result.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]
Reals = TypeVar("Reals", Doubles, Floats)
TILE = 256
JITTER = 1e-12  # of a diagonal, to begin with, where rounding has made a matrix indefinite


class Run(Protocol):
    """How independent pieces of work are done: `map`, or that of a pool (never from within the pool)."""

    def __call__(self, function: Callable[[Any], Any], pieces: Iterable[Any], /) -> Iterable[Any]: ...


@dataclass(frozen=True, eq=False)
class Factor:
    """The lower Cholesky factor of a matrix; zero above its diagonal. Its diagonal tiles are inverted as well."""

    lower: NDArray[Any]
    inverses: tuple[NDArray[Any], ...]

    def single(self) -> "Factor":
        """Return it in float32, which is enough for a preconditioner."""
        return Factor(self.lower.astype(np.float32), tuple(each.astype(np.float32) for each in self.inverses))

    def solve(self, values: Reals, run: Run = map) -> Reals:
        """Return the matrix's inverse times these values (rows, columns), which are of the factor's type."""
        found = np.empty_like(values)

        def some(columns: slice) -> None:
            found[:, columns] = self._back(self._forth(values[:, columns].copy(), 0), 0)

        list(run(some, _tiles(values.shape[1])))
        return found

    def inverse(self, run: Run = map) -> Doubles:
        """Return the matrix's inverse, exactly symmetric."""
        size = len(self.lower)
        found = np.empty_like(self.lower)

        def column(tile: slice) -> None:
            unit = np.zeros((size - tile.start, tile.stop - tile.start))
            np.fill_diagonal(unit, 1.0)
            below = self._back(self._forth(unit, tile.start), tile.start)
            top = below[: tile.stop - tile.start]
            top[:] = (top + top.T) / 2
            found[tile.start :, tile], found[tile, tile.start :] = below, below.T

        list(run(column, _tiles(size)))
        return found

    def _forth(self, values: Reals, start: int) -> Reals:
        """Solve with the factor in place; the values begin with the row `start`, zero before it."""
        for tile, inverse in zip(_tiles(len(self.lower)), self.inverses, strict=True):
            if tile.start >= start:
                rows = slice(tile.start - start, tile.stop - start)
                left = values[rows] - self.lower[tile, start : tile.start] @ values[: rows.start]
                np.matmul(inverse, left, out=values[rows])
        return values

    def _back(self, values: Reals, start: int) -> Reals:
        """Solve with the factor's transpose in place, down to the row `start`."""
        for tile, inverse in zip(reversed(_tiles(len(self.lower))), reversed(self.inverses), strict=True):
            if tile.start >= start:
                rows = slice(tile.start - start, tile.stop - start)
                left = values[rows] - self.lower[tile.stop :, tile].T @ values[rows.stop :]
                np.matmul(inverse.T, left, out=values[rows])
        return values


def factored(matrix: Doubles, ridge: float = 0.0, run: Run = map, *, less: Doubles | None = None) -> Factor:
    """Return the factor of matrix + ridge I - less less'; raise LinAlgError if that is not positive definite."""
    size = len(matrix)
    vector = np.zeros(size) if less is None else less
    lower = np.zeros((size, size))
    inverses: list[Doubles] = []
    for tile in _tiles(size):
        before = lower[tile, : tile.start]
        top = matrix[tile, tile] - np.outer(vector[tile], vector[tile]) - before @ before.T
        top[np.diag_indices(len(top))] += ridge
        lower[tile, tile] = np.linalg.cholesky(top)
        inverses.append(inverted(lower[tile, tile]))

        def below(rows: slice, tile: slice = tile, before: Doubles = before, inverse: Doubles = inverses[-1]) -> None:
            left = matrix[rows, tile] - np.outer(vector[rows], vector[tile]) - lower[rows, : tile.start] @ before.T
            np.matmul(left, inverse.T, out=lower[rows, tile])

        list(run(below, _tiles(size, tile.stop)))
    return Factor(lower, tuple(inverses))


def damped(matrix: Doubles, ridge: float, run: Run = map, *, less: Doubles | None = None) -> tuple[Factor, float]:
    """Return the factor of a finite matrix that is positive definite but for rounding, and the ridge that this took, if not more.

    Rounding is large where what is added up is so small that its squares underflow: a model whose signal dies away.
    """
    while True:
        try:
            return factored(matrix, ridge, run, less=less), ridge
        except np.linalg.LinAlgError:
            largest = float(np.abs(np.diagonal(matrix)).max())
            assert ridge <= len(matrix) * max(largest, 1.0), "second moments are finite"  # NaN is no less than anything
            ridge = max(100 * ridge, JITTER * largest) or 1.0


def inverted(lower: Doubles) -> Doubles:
    """Return the inverse of a small lower triangular matrix with a positive diagonal."""
    inverse, failed = scipy.linalg.lapack.dtrtri(lower, lower=1)
    assert failed == 0, "a factor has no zeros on its diagonal"
    return np.tril(inverse)


def _tiles(size: int, start: int = 0) -> list[slice]:
    return [slice(begin, min(begin + TILE, size)) for begin in range(start, size, TILE)]
