"""A Conv of low rank: its weight as a product of two, and the Conv as two.

W, as a matrix of outputs by (inputs x kernel), is U S V' in singular values. With the largest r of them, the first Conv has the
kernels S V', so r outputs, and the second, 1x1, has U. It keeps the bias and the name of the result.
"""

from dataclasses import dataclass

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from onnx_gconv.model.surgery import Surgery

Doubles = NDArray[np.float64]
# Of the largest singular value: what is left of a product of this rank once its numbers have been rounded, with room.
ROUNDING = {np.dtype(np.float64): 1e-12, np.dtype(np.float32): 1e-5}
COARSEST = 2e-2  # of types with fewer bits


@dataclass(frozen=True, eq=False)
class Factors:
    """The weights of the two Convs."""

    first: NDArray[np.generic]  # (rank, inputs, kernel)
    second: NDArray[np.generic]  # (outputs, rank, 1 for each axis of the kernel)


def factors(weight: NDArray[np.generic], rank: int) -> Factors:
    """Return the two weights whose product is nearest to this one."""
    left, values, right = _svd(weight)
    root = np.sqrt(values[:rank])  # shared out evenly, for types of few bits
    first = (root[:, None] * right[:rank]).reshape(len(root), *weight.shape[1:])
    second = (left[:, :rank] * root).reshape(len(weight), len(root), *[1] * (weight.ndim - 2))
    return Factors(first.astype(weight.dtype), second.astype(weight.dtype))


def product(weight: NDArray[np.generic], rank: int) -> NDArray[np.generic]:
    """Return the weight of this rank that is nearest to this one: itself, bit by bit, if it has no more but for rounding."""
    left, values, right = _svd(weight)
    if (values[rank:] <= ROUNDING.get(weight.dtype, COARSEST) * values[:1]).all():
        return weight
    return ((left[:, :rank] * values[:rank]) @ right[:rank]).reshape(weight.shape).astype(weight.dtype)


def factor(surgery: Surgery, node: gs.Node, rank: int) -> None:
    """Write a Conv as two."""
    name, slot = node.outputs[0].name, node.inputs[1]
    both = factors(surgery.value(slot), rank)
    between = surgery.variable(f"{name}_low_rank")
    first, second = (
        surgery.constant(surgery.unique(f"{slot.name}_{which}"), value)
        for which, value in (("first", both.first), ("second", both.second))
    )
    label = surgery.unique(f"{node.name or name}_second")
    attributes = {"kernel_shape": [1] * (both.second.ndim - 2)}
    behind = gs.Node("Conv", label, attributes, [between, second, *node.inputs[2:]], [node.outputs[0]])
    node.inputs = [node.inputs[0], first]
    node.outputs = [between]
    surgery.insert(behind, after=node)


def _svd(weight: NDArray[np.generic]) -> tuple[Doubles, Doubles, Doubles]:
    left, values, right = np.linalg.svd(weight.reshape(len(weight), -1).astype(np.float64), full_matrices=False)
    # Of each pair of signs one: the same factors on every machine.
    signs = np.sign(right[np.arange(len(right)), np.abs(right).argmax(axis=1)])
    return left * signs, values, right * signs[:, None]
