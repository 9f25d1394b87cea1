"""Damped second moments of patches, ready to be solved with: what makes a few steps of conjugate gradients enough."""

from dataclasses import dataclass

import numpy as np

from onnx_gconv.recover.definite import Doubles, Factor, Floats, Run, damped
from onnx_gconv.recover.normal import SMALL, Sums

DAMPING = 1e-3  # of a step, by the mean square of the patches


@dataclass(frozen=True, eq=False)
class Preconditioner:
    """Second moments of each block's patches and of a 1 behind them, damped. float32 is enough for what they are used for."""

    ridge: Doubles  # what each block is damped by: (blocks, 1, 1)
    factors: tuple[Factor, ...]  # of each block; none where blocks are small
    inverses: Floats | None  # of small blocks

    @classmethod
    def of(cls, total: Sums, places: int, run: Run) -> "Preconditioner":
        """Return it for so many places, out of the moments of others."""
        blocks, size = total.u.shape
        weight = places / total.count
        ridge = DAMPING * weight * (np.trace(total.uu, axis1=1, axis2=2) + total.count) / (size + 1)
        if size < SMALL:
            moments = weight * np.stack([_with_one(total, block) for block in range(blocks)])
            inverses = np.linalg.inv(moments + ridge[:, None, None] * np.eye(size + 1)).astype(np.float32)
            return cls(ridge[:, None, None], (), inverses)
        factors = [damped(weight * _with_one(total, block), float(ridge[block]), run)[0].single() for block in range(blocks)]
        return cls(ridge[:, None, None], tuple(factors), None)

    def solve(self, values: Doubles, run: Run) -> Doubles:
        """Return the inverse of the moments times these values: (blocks, inputs and 1, outputs)."""
        single = values.astype(np.float32)
        if self.inverses is not None:
            return np.asarray(np.matmul(self.inverses, single), np.float64)
        each = [factor.solve(value, run) for factor, value in zip(self.factors, single, strict=True)]
        return np.stack(each).astype(np.float64)


def _with_one(total: Sums, block: int) -> Doubles:
    """Return the second moments of a block's patches with a 1 behind them."""
    size = total.u.shape[1]
    moments = np.empty((size + 1, size + 1))
    moments[:-1, :-1], moments[-1, :-1], moments[:-1, -1], moments[-1, -1] = (
        total.uu[block],
        total.u[block],
        total.u[block],
        total.count,
    )
    return moments
