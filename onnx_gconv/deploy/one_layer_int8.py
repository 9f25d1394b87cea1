"""Models of one layer in int8, as ONNX Runtime runs it on a CPU inside a quantised model.

There, Convs read and write bytes with the channels last, from the first to the last of them. A Conv between a QuantizeLinear and
a DequantizeLinear would be timed with both, and with the changes of layout around it, which take longer than the Conv does.
"""

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from onnx_gconv.deploy.block import CHANNELS, SIZES
from onnx_gconv.deploy.one_layer import INPUT, IR_VERSION, OPSET, OUTPUT, LayerShape, is_framed, layer_model
from onnx_gconv.model.shapes import Shape

DOMAIN = "com.microsoft"  # of the QLinearConv that has its channels last
GRAPH = "one_layer_int8"


def int8_layer_model(shape: LayerShape, groups: int) -> onnx.ModelProto:
    """Return a model of this one Conv in int8; with one or three axes of pixels in float, for ONNX Runtime has no such layout."""
    if not is_framed(shape.input):
        return layer_model(shape, groups)
    rng, (batch, channels, *pixels) = np.random.default_rng(0), shape.input
    weight = rng.integers(-127, 128, (shape.out_channels, channels // groups, *shape.kernel)).astype(np.int8)
    found: dict[str, Any] = {
        "input_scale": np.float32(0.02),
        "input_zero": np.uint8(128),
        "weight": weight,
        "weight_scale": np.full(shape.out_channels, 0.01, np.float32),
        "weight_zero": np.zeros(shape.out_channels, np.int8),
        "output_scale": np.float32(1),
        "output_zero": np.uint8(128),
        **({"bias": np.zeros(shape.out_channels, np.int32)} if shape.bias else {}),
    }
    padded: dict[str, Any] = {"pads": shape.pads} if shape.auto_pad == "NOTSET" else {"auto_pad": shape.auto_pad}
    sizes: dict[str, Any] = {"kernel_shape": shape.kernel, "strides": shape.strides, "dilations": shape.dilations, "group": groups}
    node = helper.make_node("QLinearConv", [INPUT, *found], [OUTPUT], domain=DOMAIN, channels_last=1, **sizes, **padded)
    graph = helper.make_graph(
        [node],
        GRAPH,
        [helper.make_tensor_value_info(INPUT, TensorProto.UINT8, [batch, *pixels, channels])],
        [helper.make_tensor_value_info(OUTPUT, TensorProto.UINT8, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in found.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def int8_frame_model(tensor: Shape, dtype: str) -> onnx.ModelProto:
    """Return a model of next to nothing: to start a run takes time, which is no part of the Conv's."""
    return int8_layer_model(_shape(channels=16, outs=16, kernel=1, pixels=1, dtype=dtype), 1)


def int8_probe_models() -> dict[int, onnx.ModelProto]:
    """Return depthwise Convs whose channels are a multiple of each size, and of none larger.

    Channels beyond the last full vector are computed one by one: with AVX-512, 136 take 3 times as long as 144.
    """
    return {
        size: int8_layer_model(_shape(channels=CHANNELS + size, outs=CHANNELS + size, kernel=3, pixels=14), CHANNELS + size)
        for size in SIZES
    }


def is_int8_layer(model: onnx.ModelProto) -> bool:
    """Return whether the model is one of these: in int8 already."""
    return bool(model.graph.name == GRAPH)


def _shape(*, channels: int, outs: int, kernel: int, pixels: int, dtype: str = "float32") -> LayerShape:
    half = kernel // 2
    tensor = (1, channels, pixels, pixels)
    return LayerShape(tensor, outs, (kernel, kernel), (1, 1), (half,) * 4, (1, 1), "NOTSET", bias=True, dtype=dtype)
