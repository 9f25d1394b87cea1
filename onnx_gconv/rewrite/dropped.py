"""What a dropped residual branch leaves behind: the constant that its last Conv gives when all its weights are zero."""

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.surgery import Surgery
from onnx_gconv.model.widths import Branch
from onnx_gconv.solve.grouping import Order

BATCH_NORMALIZATION_EPSILON = 1e-5  # where the node does not say


def drop(surgery: Surgery, constants: Constants, branch: Branch, order: Order | None) -> None:
    """Let the Add of a branch read a constant instead, in the order of its channels; nobody reads the branch any more."""
    add, last = surgery.node_of(branch.add), surgery.node_of(branch.name)
    weight = constants.value(last.inputs[1].name)
    values = _remnant(last, surgery.node_of(branch.end) if branch.end != branch.name else None, constants)
    kept = values if order is None else values[order]
    shape = 1, len(kept), *[1] * (weight.ndim - 2)
    constant = surgery.constant(surgery.unique(f"{branch.end}_mean"), kept.reshape(shape).astype(weight.dtype))
    for slot, tensor in enumerate(add.inputs):
        if tensor.name == branch.end:
            add.inputs[slot] = constant


def _remnant(last: gs.Node, norm: gs.Node | None, constants: Constants) -> NDArray[np.float64]:
    """Return the last Conv's bias, sent through the normalization behind it."""

    def floats(tensor: gs.Tensor) -> NDArray[np.float64]:
        return constants.value(tensor.name).astype(np.float64)

    has_bias = len(last.inputs) > 2 and last.inputs[2].name
    bias = floats(last.inputs[2]) if has_bias else np.zeros(constants.value(last.inputs[1].name).shape[0])
    if norm is None:
        return bias
    scale, shift, mean, variance = map(floats, norm.inputs[1:5])
    epsilon = norm.attrs.get("epsilon", BATCH_NORMALIZATION_EPSILON)
    return np.asarray(scale * (bias - mean) / np.sqrt(variance + epsilon) + shift)
