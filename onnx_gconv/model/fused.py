"""Convs that ONNX Runtime fused with what follows, as it saves them when it optimises a model: taken apart on reading.

A FusedConv is a Conv, the Add of another tensor where there is one, and an activation. Apart, all of it is known to everything that
works on Convs, and ONNX Runtime fuses it again when it loads the result.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnx_gconv.model.constants import STANDARD_DOMAINS, inner_graphs

DOMAIN = "com.microsoft"
CLIP_TAKES_INPUTS = 11  # from this opset on
# The activations that are known, and the attributes that their parameters are.
ACTIVATIONS: Mapping[str, tuple[str, ...]] = {
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
    "LeakyRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
    "Clip": ("min", "max"),
}


def unfused(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with its FusedConvs taken apart; itself where there are none."""
    if not any(_is_known(node) for node in _all_nodes(model.graph)):
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    opset = max((entry.version for entry in result.opset_import if entry.domain in STANDARD_DOMAINS), default=0)
    if not opset:  # a model that ONNX Runtime made of FusedConvs alone
        opset = CLIP_TAKES_INPUTS
        result.opset_import.append(helper.make_opsetid("", opset))
    names = {name for node in _all_nodes(model.graph) for name in (*node.input, *node.output)}
    _take_apart(result.graph, opset, names)
    return result


def _take_apart(graph: onnx.GraphProto, opset: int, names: set[str]) -> None:
    types = {tensor.name: tensor.data_type for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        for inner in inner_graphs(node):
            _take_apart(inner, opset, names)
        nodes += _parts(node, opset, names, types) if _is_known(node) else [node]
    copies = onnx.GraphProto(node=nodes)  # before the originals go
    del graph.node[:]
    graph.node.extend(copies.node)


def _parts(node: onnx.NodeProto, opset: int, names: set[str], types: Mapping[str, int]) -> list[onnx.NodeProto]:
    activation, parameters = _activation(node)
    steps = ["Conv", *(["Add"] if node.input[3:] and node.input[3] else []), *([activation] if activation else [])]
    results = [*(_unique(f"{node.output[0]}_{step.lower()}", names) for step in steps[:-1]), node.output[0]]
    conv = onnx.NodeProto(op_type="Conv", name=node.name, doc_string=node.doc_string, input=node.input[:3], output=results[:1])
    conv.attribute.extend(each for each in node.attribute if not each.name.startswith("activation"))
    parts = [conv]
    for step, source, result in zip(steps[1:], results, results[1:], strict=False):
        if step == "Add":
            parts.append(helper.make_node("Add", [source, node.input[3]], [result]))
        elif step == "Clip" and opset >= CLIP_TAKES_INPUTS:
            kind = helper.tensor_dtype_to_np_dtype(types.get(node.input[1], onnx.TensorProto.FLOAT))
            bounds = [_unique(f"{result}_{name}", names) for name in ACTIVATIONS[step]]
            for name, value in zip(bounds, parameters, strict=True):
                parts.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(value, kind))))
            parts.append(helper.make_node(step, [source, *bounds], [result]))
        else:
            part = helper.make_node(step, [source], [result])
            part.attribute.extend(helper.make_attribute(*each) for each in zip(ACTIVATIONS[step], parameters, strict=True))
            parts.append(part)
    return parts


def _is_known(node: onnx.NodeProto) -> bool:
    if node.op_type != "FusedConv" or node.domain != DOMAIN or not 2 <= len(node.input) <= 4 or not node.output[0]:
        return False
    activation, parameters = _activation(node)
    return not activation or (activation in ACTIVATIONS and len(parameters) == len(ACTIVATIONS[activation]))


def _activation(node: onnx.NodeProto) -> tuple[str, Sequence[float]]:
    found = {attribute.name: attribute for attribute in node.attribute}
    name = found["activation"].s.decode() if "activation" in found else ""
    return name, list(found["activation_params"].floats) if "activation_params" in found else []


def _unique(name: str, names: set[str]) -> str:
    candidate, number = name, 1
    while candidate in names:
        number += 1
        candidate = f"{name}_{number}"
    names.add(candidate)
    return candidate


def _all_nodes(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    for node in graph.node:
        yield node
        for inner in inner_graphs(node):
            yield from _all_nodes(inner)
