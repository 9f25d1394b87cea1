"""The paper's other two forms of a group convolution, for targets where a grouped Conv is not the fastest.

`split`: Split -> one Conv for each group -> Concat (its Listing 1). `matmul`: for 1x1 Convs, one batched MatMul (the form on
dense hardware of its sparse matrix product, Listing 2). What a form cannot express stays a grouped Conv.
"""

from typing import Literal

import numpy as np
import onnx_graphsurgeon as gs
from numpy.typing import NDArray

from onnx_gconv.model.surgery import Surgery

LoweringName = Literal["group", "split", "matmul"]

SPLIT_SIZES_ARE_AN_INPUT = 13  # the opset from which Split takes its sizes as an input
SLICE_TAKES_INPUTS = 10


def lower(surgery: Surgery, node: gs.Node, form: LoweringName, opset: int) -> None:
    """Replace a grouped Conv by the same function in another form, if that form can express it."""
    if form == "split":
        _split(surgery, node, opset)
    elif form == "matmul" and opset >= SLICE_TAKES_INPUTS and _is_pointwise(surgery, node):
        _matmul(surgery, node)


def _split(surgery: Surgery, node: gs.Node, opset: int) -> None:
    groups = node.attrs["group"]
    weight, bias = surgery.value(node.inputs[1]), surgery.value(node.inputs[2]) if len(node.inputs) > 2 else None
    name = node.name or node.outputs[0].name
    sizes = [weight.shape[0] // groups if node.op == "ConvTranspose" else weight.shape[1]] * groups
    parts = [surgery.variable(f"{name}_in_{g}") for g in range(groups)]
    results = [surgery.variable(f"{name}_out_{g}") for g in range(groups)]
    split = gs.Node("Split", surgery.unique(f"{name}_split"), {"axis": 1}, [node.inputs[0]], parts)
    if opset >= SPLIT_SIZES_ARE_AN_INPUT:
        split.inputs.append(surgery.constant(surgery.unique(f"{name}_sizes"), np.array(sizes)))
    else:
        split.attrs["split"] = sizes
    surgery.insert(split, before=node)
    attributes = {key: value for key, value in node.attrs.items() if key != "group"}
    blocks = np.split(weight, groups)
    shifts = np.split(bias, groups) if bias is not None else [None] * groups
    for g, (block, shift) in enumerate(zip(blocks, shifts, strict=True)):
        inputs = [parts[g], surgery.constant(surgery.unique(f"{node.inputs[1].name}_{g}"), np.ascontiguousarray(block))]
        if shift is not None:
            inputs.append(surgery.constant(surgery.unique(f"{node.inputs[2].name}_{g}"), np.ascontiguousarray(shift)))
        surgery.insert(gs.Node(node.op, surgery.unique(f"{name}_{g}"), dict(attributes), inputs, [results[g]]), before=node)
    _replace(surgery, node, gs.Node("Concat", surgery.unique(f"{name}_concat"), {"axis": 1}, results, []))


def _is_pointwise(surgery: Surgery, node: gs.Node) -> bool:
    weight = surgery.value(node.inputs[1])
    moves = [*node.attrs.get("strides", []), *(pad + 1 for pad in node.attrs.get("pads", []))]
    return node.op == "Conv" and weight.shape[2:] == (1,) * (weight.ndim - 2) and all(step == 1 for step in moves)


def _matmul(surgery: Surgery, node: gs.Node) -> None:
    """(N, C, pixels...) -> (N, G, C/G, P), one product for each group, and back to the pixels of the input."""
    groups = node.attrs["group"]
    weight = surgery.value(node.inputs[1])
    outs, ins = weight.shape[:2]
    name = node.name or node.outputs[0].name

    def constant(what: str, value: NDArray[np.generic]) -> gs.Tensor:
        return surgery.constant(surgery.unique(f"{name}_{what}"), value)

    def step(kind: str, what: str, inputs: list[gs.Tensor], **attributes: object) -> gs.Variable:
        result = surgery.variable(f"{name}_{what}")
        surgery.insert(gs.Node(kind, surgery.unique(f"{name}_{what}_op"), attributes, inputs, [result]), before=node)
        return result

    source = node.inputs[0]
    shape = step("Shape", "shape", [source])
    pixels = step("Slice", "pixels", [shape, constant("from", np.array([2])), constant("to", np.array([weight.ndim]))])
    wanted = step("Concat", "wanted", [constant("channels", np.array([0, outs])), pixels], axis=0)
    blocks = step("Reshape", "blocks", [source, constant("grouped", np.array([0, groups, ins, -1]))])
    product = step("MatMul", "product", [constant("weight", weight.reshape(groups, outs // groups, ins)), blocks])
    if len(node.inputs) > 2 and node.inputs[2].name:
        shift = surgery.value(node.inputs[2]).reshape(groups, outs // groups, 1)
        product = step("Add", "shifted", [product, constant("bias", shift)])
    _replace(surgery, node, gs.Node("Reshape", surgery.unique(f"{name}_ungroup"), {}, [product, wanted], []))


def _replace(surgery: Surgery, old: gs.Node, new: gs.Node) -> None:
    """Let a new last node write what the old node wrote."""
    surgery.insert(new, before=old)
    result = old.outputs[0]
    old.outputs.clear()
    old.inputs.clear()
    new.outputs.append(result)
    surgery.graph.nodes[:] = [node for node in surgery.graph.nodes if node is not old]
