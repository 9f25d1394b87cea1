"""Normal equations of a site, added up batch by batch, and their solution."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy.linalg
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Rows = tuple[NDArray[np.float32], NDArray[np.float32]]  # inputs (blocks, positions, inputs), targets (blocks, positions, outputs)
ROUNDING = 1e-10  # what float64 sums may be off by, relative, with room


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

    Products in float32, where they are three times faster; the parts are few, and their sums are added in float64. The
    products are of numbers about their mean, which is added back in float64: far off centre, float32 would lose the spread.
    """
    u, t = (np.ascontiguousarray(np.concatenate(arrays, axis=1)) for arrays in zip(*parts, strict=True))
    count = u.shape[1]
    total_u, total_t = (values.sum(axis=1, dtype=np.float64) for values in (u, t))
    at_u, at_t = ((total / count).astype(np.float32) for total in (total_u, total_t))
    u -= at_u[:, None]
    t -= at_t[:, None]
    sum_u, sum_t = total_u - count * at_u.astype(np.float64), total_t - count * at_t.astype(np.float64)
    transposed = u.transpose(0, 2, 1)
    return Sums(
        count,
        total_u,
        total_t,
        np.matmul(transposed, u) + _outer(sum_u, at_u) + _outer(at_u, total_u),
        np.matmul(transposed, t) + _outer(sum_u, at_t) + _outer(at_u, total_t),
        np.square(t, dtype=np.float64).sum(axis=1) + at_t * (sum_t + total_t),
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
        # Inputs that do not vary leave nothing but rounding in the Gram matrix, which must not decide anything.
        spread = max(damping * float(np.trace(gram[block])), ROUNDING * float(np.trace(total.uu[block])))
        ridge = spread / size or 1.0  # nothing ever came in: all stays as it was
        matrix = gram[block] + ridge * np.eye(size)
        weight[block] = scipy.linalg.solve(matrix, cross[block] + ridge * prior.weight[block], assume_a="pos")
    if not has_intercept:
        return Coefficients(weight, prior.intercept)
    means = total.u / total.count, total.t / total.count
    return Coefficients(weight, means[1] - np.einsum("bi,bio->bo", means[0], weight))


def _outer(a: NDArray[np.floating], b: NDArray[np.floating]) -> Doubles:
    return a[:, :, None] * b[:, None, :]


def _centred(total: Sums) -> tuple[Doubles, Doubles]:
    gram = total.uu - _outer(total.u, total.u) / total.count
    cross = total.ut - _outer(total.u, total.t) / total.count
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
