"""How far a model's outputs are from those it should give, in one number."""

from collections.abc import Mapping

import numpy as np
import scipy.special
from numpy.typing import NDArray

Doubles = NDArray[np.float64]


def divergence(reference: Mapping[str, object], found: Mapping[str, object]) -> float:
    """Return the mean over the outputs: Kullback-Leibler divergence per sample for classes, else relative squared error.

    Outputs that are no floats, or that changed their shape, as boxes after a suppression do, say nothing.
    """
    each = [_one(reference[name], found[name]) for name in reference]
    telling = [value for value in each if value is not None]
    return float(np.mean(telling)) if telling else float("nan")


def _one(reference: object, found: object) -> float | None:
    if not isinstance(reference, np.ndarray) or not isinstance(found, np.ndarray):
        return None
    if reference.shape != found.shape or reference.dtype.kind != "f" or not reference.size:
        return None
    a, b = reference.astype(np.float64), found.astype(np.float64)
    if not np.isfinite(b).all():
        return float("inf")
    if is_classes(a):
        rows_a, rows_b = (log_probabilities(x.reshape(len(x), -1)) for x in (a, b))
        return float((np.exp(rows_a) * (rows_a - rows_b)).sum(axis=1).mean())
    scale = float(np.square(a).sum())
    return float(np.square(a - b).sum()) / scale if scale > 0 else None


def is_classes(output: Doubles) -> bool:
    """Return whether an output is one score for each of several classes: (samples, classes), perhaps with axes of 1."""
    return output.ndim >= 2 and output.shape[1] > 1 and output.size == output.shape[0] * output.shape[1]


def log_probabilities(scores: Doubles) -> Doubles:
    """Return the logarithm of each class's probability; scores that are probabilities already are taken as such."""
    if (scores >= 0).all() and np.allclose(scores.sum(axis=1), 1.0, atol=1e-3):
        return np.asarray(np.log(np.maximum(scores, 1e-12)))
    return np.asarray(scipy.special.log_softmax(scores, axis=1))
