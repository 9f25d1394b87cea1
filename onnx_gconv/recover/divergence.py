"""How far a model's outputs are from those it should give, in one number."""

from collections.abc import Callable, Mapping

import numpy as np
import scipy.special
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
OfClasses = Callable[[Doubles, Doubles], float | None]  # log-probabilities as they should be, and as they are
FLOOR = 1e-12  # of a probability, before its logarithm


def divergence(reference: Mapping[str, object], found: Mapping[str, object], *, temperature: float = 1.0) -> float:
    """Return the mean over the outputs: Kullback-Leibler divergence per sample for classes, else relative squared error.

    Most samples are classified beyond doubt, so the divergence hangs on a few others, and on few samples it is noisy. A
    temperature above 1, by which scores are divided, makes more of them count. Outputs that are no floats, or that changed
    their shape, as boxes after a suppression do, say nothing.
    """

    def of_classes(a: Doubles, b: Doubles) -> float:
        rows_a, rows_b = (np.asarray(scipy.special.log_softmax(x / temperature, axis=1)) for x in (a, b))
        return float((np.exp(rows_a) * (rows_a - rows_b)).sum(axis=1).mean())

    return _mean(reference, found, of_classes)


def score_error(reference: Mapping[str, object], found: Mapping[str, object]) -> float:
    """Return the mean over the outputs of their relative squared error; of classes, that of their scores about their mean.

    That is what the divergence becomes at a high temperature: every sample has something to say, so that few will do. And
    squared errors add up where several layers cause some.
    """

    def of_classes(a: Doubles, b: Doubles) -> float | None:
        return _relative_error(*(x - x.mean(axis=1, keepdims=True) for x in (a, b)))

    return _mean(reference, found, of_classes)


def _mean(reference: Mapping[str, object], found: Mapping[str, object], of_classes: OfClasses) -> float:
    each = [_one(reference[name], found[name], of_classes) for name in reference]
    telling = [value for value in each if value is not None]
    return float(np.mean(telling)) if telling else float("nan")


def _one(reference: object, found: object, of_classes: OfClasses) -> float | None:
    if not isinstance(reference, np.ndarray) or not isinstance(found, np.ndarray):
        return None
    if reference.shape != found.shape or reference.dtype.kind != "f" or not reference.size:
        return None
    a, b = reference.astype(np.float64), found.astype(np.float64)
    if not np.isfinite(b).all():
        return float("inf")
    if is_classes(a):
        return of_classes(*(log_probabilities(x.reshape(len(x), -1)) for x in (a, b)))
    return _relative_error(a, b)


def _relative_error(a: Doubles, b: Doubles) -> float | None:
    scale = float(np.square(a).sum())
    return float(np.square(a - b).sum()) / scale if scale > 0 else None


def is_classes(output: Doubles) -> bool:
    """Return whether an output is one score for each of several classes: (samples, classes), perhaps with axes of 1."""
    return output.ndim >= 2 and output.shape[1] > 1 and output.size == output.shape[0] * output.shape[1]


def log_probabilities(scores: Doubles) -> Doubles:
    """Return the logarithm of each class's probability; scores that are probabilities already are taken as such."""
    if (scores >= 0).all() and np.allclose(scores.sum(axis=1), 1.0, atol=1e-3):
        return np.asarray(np.log(np.maximum(scores, FLOOR)))
    return np.asarray(scipy.special.log_softmax(scores, axis=1))
