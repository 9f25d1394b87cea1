"""The weight of a ConvTranspose, which lies the other way round: (Cin, Cout per group, *kernel)."""

import numpy as np
from numpy.typing import NDArray

CONVOLVING = ("Conv", "ConvTranspose")


def as_filters(weight: NDArray[np.generic], groups: int) -> NDArray[np.generic]:
    """Return the weight of a ConvTranspose as that of a Conv lies: (Cout, Cin per group, *kernel)."""
    ins, outs, *kernel = weight.shape
    blocks = weight.reshape(groups, ins // groups, outs, *kernel)
    return blocks.swapaxes(1, 2).reshape(groups * outs, ins // groups, *kernel)


def as_stored(filters: NDArray[np.generic], groups: int) -> NDArray[np.generic]:
    """Return filters as a ConvTranspose has them: the inverse of `as_filters`, which with roles swapped is itself."""
    return as_filters(filters, groups)
