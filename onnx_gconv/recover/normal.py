"""Normal equations of a site, added up batch by batch, and their solution."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Rows = tuple[NDArray[np.float32], NDArray[np.float32]]  # inputs (blocks, positions, inputs), targets (blocks, positions, outputs)


@dataclass
class Sums:
    """Second moments of inputs u and targets t over all positions; one entry for each block.

    Memory is that of the Gram matrix: (inputs of a block x kernel) squared, for each block.
    """

    count: int
    u: Doubles  # (blocks, inputs)
    t: Doubles  # (blocks, outputs)
    uu: Doubles  # (blocks, inputs, inputs)
    ut: Doubles  # (blocks, inputs, outputs)
    tt: Doubles  # (blocks, outputs)

    def __iadd__(self, other: "Sums") -> "Sums":
        self.count += other.count
        for name in ("u", "t", "uu", "ut", "tt"):
            getattr(self, name).__iadd__(getattr(other, name))
        return self


def add_up(parts: Iterable[Sums]) -> Sums:
    """Return the sum, added in the order given: the same bits whatever thread made a part."""
    each = iter(parts)
    total = next(each)
    for part in each:
        total += part
    return total


@dataclass(frozen=True)
class Coefficients:
    """The weights of each block, and the constant added to each output."""

    weight: Doubles  # (blocks, inputs, outputs)
    intercept: Doubles  # (blocks, outputs)


def sums(parts: Sequence[Rows]) -> Sums:
    """Return the moments of some inputs and targets.

    Products in float32, where they are three times faster; the parts are few, and their sums are added in float64.
    """
    u, t = (np.ascontiguousarray(np.concatenate(arrays, axis=1)) for arrays in zip(*parts, strict=True))
    transposed = u.transpose(0, 2, 1)
    return Sums(
        u.shape[1],
        u.sum(axis=1, dtype=np.float64),
        t.sum(axis=1, dtype=np.float64),
        np.matmul(transposed, u).astype(np.float64),
        np.matmul(transposed, t).astype(np.float64),
        np.square(t, dtype=np.float64).sum(axis=1),
    )


def solve(total: Sums, prior: Coefficients, *, damping: float, has_intercept: bool) -> Coefficients:
    """Return the weights that bring the inputs closest to the targets.

    They minimise |t - w u - b|^2 + damping * mean(diag uu) * |w - prior|^2 (the intercept is free): what the data do not
    decide, such as the weights of a channel that is always zero, stays as it was.
    """
    gram, cross = _centred(total) if has_intercept else (total.uu, total.ut)
    size = gram.shape[1]
    weight = np.empty_like(prior.weight)
    for block in range(len(gram)):
        ridge = damping * float(np.trace(gram[block])) / size or 1.0  # nothing ever came in: all stays as it was
        matrix = gram[block] + ridge * np.eye(size)
        weight[block] = scipy.linalg.solve(matrix, cross[block] + ridge * prior.weight[block], assume_a="pos")
    if not has_intercept:
        return Coefficients(weight, prior.intercept)
    means = total.u / total.count, total.t / total.count
    return Coefficients(weight, means[1] - np.einsum("bi,bio->bo", means[0], weight))


def _centred(total: Sums) -> tuple[Doubles, Doubles]:
    gram = total.uu - total.u[:, :, None] * total.u[:, None, :] / total.count
    cross = total.ut - total.u[:, :, None] * total.t[:, None, :] / total.count
    return gram, cross


def residual(total: Sums, at: Coefficients) -> Doubles:
    """Return the sum of squared errors of each output: (blocks, outputs)."""
    w, b = at.weight, at.intercept
    quadratic = np.einsum("bio,bij,bjo->bo", w, total.uu, w, optimize=True)
    error = total.tt - 2 * (w * total.ut).sum(axis=1) + quadratic
    error += b * (2 * np.einsum("bi,bio->bo", total.u, w) - 2 * total.t + total.count * b)
    return np.asarray(np.maximum(error, 0.0))  # rounding


def variance(total: Sums) -> Doubles:
    """Return the sum of squared deviations of each target from its mean: (blocks, outputs)."""
    return np.maximum(total.tt - np.square(total.t) / total.count, 0.0)
