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
INPUT, OUTPUT = "one_layer_input", "one_layer_output"  # unlike names in a model that is timed along with it
PLANAR = 4  # axes of a tensor of images
SEED_CHANNELS = 16  # of the single pixel that an input is made from


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


def conv_shape(node: onnx.NodeProto, weight: Shape, dtype: str, shapes: Mapping[str, Shape]) -> LayerShape | None:
    """Return the shape of a Conv; None where the size of its input is not known, or numpy does not know its type."""
    if node.input[0] not in shapes or dtype == "bfloat16":
        return None
    axes = len(weight) - 2
    found = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    auto_pad = found.get("auto_pad", b"NOTSET").decode() or "NOTSET"
    return LayerShape(
        input=tuple(shapes[node.input[0]]),
        out_channels=weight[0],
        kernel=tuple(weight[2:]),
        strides=tuple(found.get("strides", (1,) * axes)),
        pads=tuple(found.get("pads", (0,) * 2 * axes)) if auto_pad == "NOTSET" else (),
        dilations=tuple(found.get("dilations", (1,) * axes)),
        auto_pad=auto_pad,
        bias=len(node.input) > 2 and bool(node.input[2]),
        dtype=dtype,
    )


def layer_shape(layer: Layer, node: onnx.NodeProto, shapes: Mapping[str, Shape]) -> LayerShape | None:
    """Return the shape of a layer; None where the size of its input is not known, or numpy does not know its type."""
    return conv_shape(node, (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel), layer.dtype, shapes)


def layer_model(shape: LayerShape, groups: int) -> onnx.ModelProto:
    """Return a model of this one Conv as it stands inside a model, with random weights: its time does not depend on them.

    A Conv alone would be timed with the changes to the runtime's own layout and back, which a model has at its ends only and which
    shrink with the widths: half of MobileNet-v2's widths would look as if they took a ninth of the time. So its input is made from
    a single pixel inside that layout, and one pixel is taken from its output. Where a runtime has no such layout, with one or three
    axes of pixels, it is alone.
    """
    if is_framed(shape.input):
        return _framed(shape.input, shape.dtype, _conv(shape, groups, "grown", "result"))
    node, tensors = _conv(shape, groups, INPUT, OUTPUT)
    return _model([node], shape.input, _kind(shape.dtype), tensors)


def is_framed(tensor: Shape) -> bool:
    """Return whether a Conv of such an input is timed with something around it."""
    return len(tensor) == PLANAR


def frame_model(tensor: Shape, dtype: str) -> onnx.ModelProto:
    """Return what is around the Conv in a one-layer model, without it: what it takes is no part of the Conv's time."""
    return _framed(tensor, dtype, None)


def _framed(tensor: Shape, dtype: str, inner: tuple[onnx.NodeProto, list[onnx.TensorProto]] | None) -> onnx.ModelProto:
    """Return a model that makes such a tensor of a pixel, has the inner node read "grown", and takes a pixel of its "result"."""
    batch, channels, *pixels = tensor
    stem = np.random.default_rng(1).standard_normal((channels, SEED_CHANNELS, 1, 1)).astype(dtype)
    scales = np.array([1, 1, *pixels], np.float32)
    nearest = {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}
    nodes, last, tensors = ([], "grown", []) if inner is None else ([inner[0]], "result", inner[1])
    nodes = [
        helper.make_node("Conv", [INPUT, "stem"], ["pixel"], name="Conv_stem"),
        helper.make_node("Resize", ["pixel", "", "scales"], ["grown"], name="Resize", **nearest),
        *nodes,
        # A mean over all pixels would read them all, and so take longer for more channels.
        helper.make_node("MaxPool", [last], [OUTPUT], name="MaxPool", kernel_shape=[1, 1], strides=pixels),
    ]
    more = [numpy_helper.from_array(stem, "stem"), numpy_helper.from_array(scales, "scales")]
    return _model(nodes, (batch, SEED_CHANNELS, 1, 1), _kind(dtype), [*tensors, *more])


def _kind(dtype: str) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def _conv(shape: LayerShape, groups: int, source: str, result: str) -> tuple[onnx.NodeProto, list[onnx.TensorProto]]:
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
    return helper.make_node("Conv", [source, *(tensor.name for tensor in tensors)], [result], name="Conv", **attributes), tensors


def gather_models(tensor: Shape, dtype: str, *, before_add: bool) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """Return two models whose difference is a Gather of the channels of this tensor, as it stands in real models.

    Around it are Convs, depthwise and 1x1, the least that makes a runtime keep its own layout there: to leave that layout and
    come back to it is most of what a Gather costs. Between a Conv and the Add of a residual connection it also keeps the two
    from being fused.
    """
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

    without = _model(nodes(gathered=False), tensor, _kind(dtype), [weight])
    return without, _model(nodes(gathered=True), tensor, _kind(dtype), [weight, order])


def _model(nodes: list[onnx.NodeProto], shape: Shape, kind: int, tensors: list[onnx.TensorProto]) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes,
        "one_layer",
        [helper.make_tensor_value_info(INPUT, kind, shape)],
        [helper.make_tensor_value_info(OUTPUT, kind, None)],
        tensors,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
