"""The grouped model: each planned Conv becomes Gather -> grouped Conv -> Gather."""

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import layer_weight
from onnx_gconv.model.surgery import Surgery
from onnx_gconv.plan import Plan
from onnx_gconv.rewrite.fit import Fitted, fit
from onnx_gconv.solve.grouping import Order, inverse


def group(model: onnx.ModelProto, plan: Plan) -> onnx.ModelProto:
    """Return the model with every planned Conv grouped; the same function as `mask(model, plan)`.

    With x' = x[in_order] and y' = y[out_order], the kept weights are the diagonal blocks of W[out_order][:, in_order], so
    y' is a grouped Conv of x', and y is y' gathered by the inverse of out_order. Gathers that move nothing are not written.
    """
    constants = Constants(model)
    surgery = Surgery(model)
    shared: dict[tuple[object, ...], str] = {}  # two Convs with one weight or bias and one grouping go on sharing it
    for fitted in fit(model, plan, constants):
        if fitted.key not in shared:
            shared[fitted.key] = surgery.unique(f"{fitted.layer.weight}_g{fitted.groups}")
            surgery.constant(shared[fitted.key], grouped_weight(layer_weight(constants, fitted.layer), fitted))
        node = surgery.node_of(fitted.layer.name)
        node.inputs[1] = surgery.tensor(shared[fitted.key])
        node.attrs["group"] = fitted.groups
        _gather_input(surgery, node, fitted)
        _gather_output(surgery, node, fitted, constants, shared)
    return surgery.finish()


def grouped_weight(weight: NDArray[np.generic], fitted: Fitted) -> NDArray[np.generic]:
    """Return the diagonal blocks of the permuted weight: (Cout, Cin / G, *kernel)."""
    layer = fitted.layer
    outputs = fitted.out_order.reshape(fitted.groups, -1)
    inputs = fitted.in_order.reshape(fitted.groups, -1)
    # The weight of a Conv that has groups already holds only its own group's columns: count them from there.
    columns = inputs - (inputs[:, :1] // (layer.in_channels // layer.groups)) * (layer.in_channels // layer.groups)
    blocks = weight[outputs[:, :, None], columns[:, None, :]]
    return np.ascontiguousarray(blocks.reshape(layer.out_channels, layer.in_channels // fitted.groups, *layer.kernel))


def _is_identity(order: Order) -> bool:
    return bool((order == np.arange(len(order))).all())


def _gather(surgery: Surgery, name: str, order: Order, data: gs.Tensor, result: gs.Tensor) -> gs.Node:
    # int32: TensorRT adds a cast for every int64 index.
    indices = surgery.constant(surgery.unique(f"{name}_order"), order.astype(np.int32))
    return gs.Node("Gather", surgery.unique(f"{name}_gather"), {"axis": 1}, [data, indices], [result])


def _gather_input(surgery: Surgery, node: gs.Node, fitted: Fitted) -> None:
    if _is_identity(fitted.in_order):
        return
    name = f"{fitted.layer.label}_in"
    data, gathered = node.inputs[0], surgery.variable(f"{name}_grouped")
    surgery.insert(_gather(surgery, name, fitted.in_order, data, gathered), before=node)
    node.inputs[0] = gathered


def _gather_output(
    surgery: Surgery, node: gs.Node, fitted: Fitted, constants: Constants, shared: dict[tuple[object, ...], str]
) -> None:
    if _is_identity(fitted.out_order):
        return
    bias = fitted.layer.bias
    if bias:
        key = bias, fitted.out_order.tobytes()
        if key not in shared:
            shared[key] = surgery.unique(f"{bias}_g{fitted.groups}")
            surgery.constant(shared[key], constants.value(bias)[fitted.out_order])
        node.inputs[2] = surgery.tensor(shared[key])
    name = f"{fitted.layer.label}_out"
    result, grouped = node.outputs[0], surgery.variable(f"{name}_grouped")
    node.outputs[0] = grouped
    surgery.insert(_gather(surgery, name, inverse(fitted.out_order), grouped, result), after=node)
