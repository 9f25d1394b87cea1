"""How much each kernel matters: a (Cout, Cin per group) matrix of non-negative numbers."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Criterion = Literal["l2", "l1", "taylor", "activation"]
Matrix = NDArray[np.float64]


def importance(weight: NDArray[np.generic], criterion: Literal["l2", "l1"]) -> Matrix:
    """Return the norm of every kernel: entry (o, i) ranks what output o takes from input i.

    `weight` is a Conv's, (Cout, Cin per group, *kernel). The paper's criterion is the L2 norm (its equation 5).
    """
    kernels = weight.reshape(*weight.shape[:2], -1).astype(np.float64)
    if criterion == "l1":
        return np.asarray(np.abs(kernels).sum(axis=2))
    return np.asarray(np.sqrt(np.einsum("oik,oik->oi", kernels, kernels)))
