"""What a dropped residual branch leaves behind: the constant that its last Conv gives when all its weights are zero.

Where that constant is zero, nothing is left: the Add goes, too, and the Relu behind it if there was one before the block.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.surgery import Surgery
from onnx_gconv.model.widths import Branch
from onnx_gconv.rewrite.taken import Taken
from onnx_gconv.solve.grouping import Order

BATCH_NORMALIZATION_EPSILON = 1e-5  # where the node does not say
SCALE, SHIFT, MEAN = 1, 2, 3  # slots of a BatchNormalization


@dataclass(frozen=True, eq=False)
class Remnant:
    """The constant that stands for a branch: taken from a stored tensor as it is, or else computed with several."""

    name: str
    taken: Taken | None
    computed_with: frozenset[str]


def drop(surgery: Surgery, constants: Constants, branch: Branch, order: Order | None) -> Remnant:
    """Let the Add of a branch read a constant instead, in the order of its channels; nobody reads the branch any more."""
    add, (last, norm) = surgery.node_of(branch.add), _ends(surgery, branch)
    weight = constants.value(last.inputs[1].name)
    values = _remnant(last, norm, constants).astype(weight.dtype)
    kept = np.arange(len(values)) if order is None else order
    shape = 1, len(kept), *[1] * (weight.ndim - 2)
    name = surgery.unique(f"{branch.end}_mean")
    constant = surgery.constant(name, values[kept].reshape(shape))
    for slot, tensor in enumerate(add.inputs):
        if tensor.name == branch.end:
            add.inputs[slot] = constant
    source = _stored_remnant(last, norm, constants)
    is_same = source and np.array_equal(constants.value(source), values) and constants.value(source).dtype == values.dtype
    read = [*last.inputs[2:], *(norm.inputs[1:] if norm is not None else ())]
    computed_with = frozenset[str]().union(*(constants.stored_in(tensor.name) for tensor in read if tensor.name))
    return Remnant(name, Taken(source, (kept,), shape) if is_same else None, computed_with)


def erase(surgery: Surgery, remnants: Iterable[Remnant]) -> None:
    """Take out every Add of nothing but zeros, and a Relu of what a Relu gave; what the model gives out keeps its name."""
    for remnant in remnants:
        if surgery.value(surgery.tensor(remnant.name)).any():
            continue
        add = next(node for node in surgery.graph.nodes if any(tensor.name == remnant.name for tensor in node.inputs))
        (shortcut,) = (tensor for tensor in add.inputs if tensor.name != remnant.name)
        if not _bypass(surgery, add, shortcut):
            continue
        if _produced_by_relu(surgery, shortcut):
            for relu in [node for node in surgery.graph.nodes if node.op == "Relu" and node.inputs[0].name == shortcut.name]:
                _bypass(surgery, relu, shortcut)


def _produced_by_relu(surgery: Surgery, tensor: gs.Tensor) -> bool:
    return any(node.op == "Relu" and tensor.name in (each.name for each in node.outputs) for node in surgery.graph.nodes)


def _bypass(surgery: Surgery, node: gs.Node, source: gs.Tensor) -> bool:
    """Let all that read the node's result read the source instead; False where the result is the model's own, so it stays."""
    (result,) = node.outputs
    if any(output.name == result.name for output in surgery.graph.outputs):
        return False
    for reader in surgery.graph.nodes:
        for slot, tensor in enumerate(reader.inputs):
            if tensor.name == result.name:
                reader.inputs[slot] = source
    return True


def empty(model: onnx.ModelProto, branches: Sequence[Branch]) -> tuple[onnx.ModelProto, frozenset[str]]:
    """Return the masked model with the constants of these branches zero, and which of them are: not those that others read."""
    if not branches:
        return model, frozenset()  # not even a copy: it may be large
    constants, surgery, done = Constants(model), Surgery(model), []
    for branch in branches:
        names = _holding(*_ends(surgery, branch), constants)
        if all(constants.is_stored(name) and len(constants.readers(name)) == 1 for name in names):
            done.append(branch.name)
            for name in names:
                surgery.constant(name, np.zeros_like(constants.value(name)))
    return surgery.finish(), frozenset(done)


def emptied_tensors(model: onnx.ModelProto, branches: Iterable[Branch]) -> set[str]:
    """Return the tensors that hold the constants of branches of which nothing is left."""
    constants, surgery = Constants(model), Surgery(model)
    holding = [_holding(*_ends(surgery, branch), constants) for branch in branches]
    return {name for names in holding if not any(constants.value(each).any() for each in names) for name in names}


def _holding(last: gs.Node, norm: gs.Node | None, constants: Constants) -> list[str]:
    """Return the tensors with which, if they are zero, a branch without weights gives nothing."""
    if norm is not None:
        return [constants.origin(norm.inputs[slot].name) for slot in (SCALE, SHIFT)]
    return [constants.origin(last.inputs[2].name)] if _has_bias(last) else []


def settle(model: onnx.ModelProto, branches: tuple[Branch, ...]) -> onnx.ModelProto:
    """Return the masked model with the constant of each dropped branch in one place: the shift of its normalization.

    The scale becomes zero, the mean that of the last Conv's result. The function stays the same. In training, when statistics are
    those of the batch, there is no variance that the branch could be divided by, only rounding; with no scale it gives its shift,
    and a trained constant has a place to return to. What others read as well stays as it is.
    """
    if all(branch.end == branch.name for branch in branches):
        return model
    constants, surgery = Constants(model), Surgery(model)
    for branch in branches:
        last, norm = _ends(surgery, branch)
        if norm is None:
            continue
        names = [constants.origin(norm.inputs[slot].name) for slot in (SCALE, SHIFT, MEAN)]
        bias, remnant = _bias(last, constants), _remnant(last, norm, constants)
        if all(constants.is_stored(name) and len(constants.readers(name)) == 1 for name in names):
            for name, value in zip(names, (np.zeros_like(bias), remnant, bias), strict=True):
                surgery.constant(name, value.astype(constants.value(name).dtype))
    return surgery.finish()


def _ends(surgery: Surgery, branch: Branch) -> tuple[gs.Node, gs.Node | None]:
    """Return the branch's last Conv, and the normalization behind it."""
    return surgery.node_of(branch.name), surgery.node_of(branch.end) if branch.end != branch.name else None


def _remnant(last: gs.Node, norm: gs.Node | None, constants: Constants) -> NDArray[np.float64]:
    """Return the last Conv's bias, sent through the normalization behind it."""
    bias = _bias(last, constants)
    if norm is None:
        return bias
    scale, shift, mean, variance = (_floats(tensor, constants) for tensor in norm.inputs[1:5])
    epsilon = norm.attrs.get("epsilon", BATCH_NORMALIZATION_EPSILON)
    return np.asarray(scale * (bias - mean) / np.sqrt(variance + epsilon) + shift)


def _stored_remnant(last: gs.Node, norm: gs.Node | None, constants: Constants) -> str:
    """Return the tensor that holds the remnant as it is: the bias, or the shift of a normalization that is settled; "" if none."""
    if norm is None:
        source = constants.origin(last.inputs[2].name) if _has_bias(last) else ""
    else:
        is_settled = not constants.value(norm.inputs[SCALE].name).any()
        source = constants.origin(norm.inputs[SHIFT].name) if is_settled else ""
    return source if source and constants.is_stored(source) else ""


def _has_bias(last: gs.Node) -> bool:
    return len(last.inputs) > 2 and bool(last.inputs[2].name)


def _bias(last: gs.Node, constants: Constants) -> NDArray[np.float64]:
    if _has_bias(last):
        return _floats(last.inputs[2], constants)
    return np.zeros(constants.value(last.inputs[1].name).shape[0])


def _floats(tensor: gs.Tensor, constants: Constants) -> NDArray[np.float64]:
    return constants.value(tensor.name).astype(np.float64)
