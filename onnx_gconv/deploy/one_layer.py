"""Models of one layer, to time each layer of a network alone with each number of groups."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from onnx_gconv.model.network import Layer
from onnx_gconv.model.shapes import Shape

# Old enough for every target, new enough for all types.
OPSET, IR_VERSION = 13, 7
INPUT, OUTPUT = "x", "y"


@dataclass(frozen=True)
class LayerShape:
    """All of a Conv that its time depends on, but for the number of groups."""

    input: Shape
    out_channels: int
    kernel: Shape
    strides: Shape
    pads: Shape
    dilations: Shape
    auto_pad: str
    bias: bool
    dtype: str


def layer_shape(layer: Layer, node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> LayerShape | None:
    """Return the shape of a layer; None where the size of its input is not known, or numpy does not know its type."""
    if node.input[0] not in shapes or layer.dtype == "bfloat16":
        return None
    axes = len(layer.kernel)
    found = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    auto_pad = found.get("auto_pad", b"NOTSET").decode() or "NOTSET"
    return LayerShape(
        input=tuple(shapes[node.input[0]]),
        out_channels=layer.out_channels,
        kernel=tuple(layer.kernel),
        strides=tuple(found.get("strides", (1,) * axes)),
        pads=tuple(found.get("pads", (0,) * 2 * axes)) if auto_pad == "NOTSET" else (),
        dilations=tuple(found.get("dilations", (1,) * axes)),
        auto_pad=auto_pad,
        bias=bool(layer.bias),
        dtype=layer.dtype,
    )


def layer_model(shape: LayerShape, groups: int) -> onnx.ModelProto:
    """Return a model of this one Conv, with random weights: its time does not depend on them."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(shape.dtype))
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((shape.out_channels, shape.input[1] // groups, *shape.kernel)).astype(shape.dtype)
    tensors = [numpy_helper.from_array(weight, "weight")]
    if shape.bias:
        tensors.append(numpy_helper.from_array(np.zeros(shape.out_channels, shape.dtype), "bias"))
    attributes: dict[str, Any] = {"strides": shape.strides, "dilations": shape.dilations, "group": groups}
    if shape.auto_pad == "NOTSET":
        attributes["pads"] = shape.pads
    else:
        attributes["auto_pad"] = shape.auto_pad
    node = helper.make_node("Conv", [INPUT, *(tensor.name for tensor in tensors)], [OUTPUT], name="Conv", **attributes)
    return _model([node], shape.input, kind, tensors)


def yardstick_model() -> onnx.ModelProto:
    """Return a Conv that is measured along with everything: what slows the device down for a while slows it down, too."""
    shape = LayerShape((1, 64, 56, 56), 64, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), "NOTSET", bias=True, dtype="float32")
    return layer_model(shape, 1)


def gather_models(tensor: Shape, dtype: str, *, before_add: bool) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return two models whose difference is a Gather of the channels of this tensor, as it stands in real models.

    Around it are Convs, depthwise and 1x1, the least that makes a runtime keep its own layout there: to leave that layout and
    come back to it is most of what a Gather costs. Between a Conv and the Add of a residual connection it also keeps the two
    from being fused.
    """
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    channels = tensor[1]
    weight = numpy_helper.from_array(np.ones((channels, 1, *(1,) * (len(tensor) - 2)), dtype), "weight")
    order = numpy_helper.from_array(np.random.default_rng(0).permutation(channels).astype(np.int32), "order")

    def nodes(*, gathered: bool) -> list[onnx.NodeProto]:
        def conv(source: str, result: str) -> onnx.NodeProto:
            return helper.make_node("Conv", [source, "weight"], [result], name=f"Conv_{result}", group=channels)

        steps = [conv(INPUT, "a"), conv("a", "b")]
        if gathered:
            steps.append(helper.make_node("Gather", ["b", "order"], ["c"], name="gather", axis=1))
        moved = "c" if gathered else "b"
        if before_add:
            steps += [helper.make_node("Add", [moved, "a"], ["d"], name="Add"), helper.make_node("Relu", ["d"], ["e"], name="Relu")]
        return [*steps, conv("e" if before_add else moved, OUTPUT)]

    without = _model(nodes(gathered=False), tensor, kind, [weight])
    return without, _model(nodes(gathered=True), tensor, kind, [weight, order])


def _model(nodes: list[onnx.NodeProto], shape: Shape, kind: int, tensors: list[onnx.TensorProto]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "one_layer",
        [helper.make_tensor_value_info(INPUT, kind, shape)],
        [helper.make_tensor_value_info(OUTPUT, kind, None)],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
