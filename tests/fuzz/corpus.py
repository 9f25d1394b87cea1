"""The sound models that mutations start from: small, and of everything that the tool treats in its own way."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper
from random_cnn import RandomCnn
from tiny import conv_net, from_text, residual_net

DIGITS = Path(__file__).parent.parent.parent / "models/digits.onnx"


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape) / np.sqrt(max(1, np.prod(shape[1:])))


def dynamic() -> onnx.ModelProto:
    return conv_net(size="S")


def listed() -> onnx.ModelProto:
    """Weights are graph inputs as well, as before IR 4."""
    model = conv_net()
    model.ir_version = 3
    model.graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in model.graph.initializer)
    return model


def typed_stores() -> onnx.ModelProto:
    """Weights in float_data, not in raw bytes."""
    model = residual_net()
    for tensor in model.graph.initializer:
        values = numpy_helper.to_array(tensor).ravel().tolist()
        tensor.ClearField("raw_data")
        tensor.float_data.extend(values)
    return model


def computed() -> onnx.ModelProto:
    """Weights that the graph computes, shares and passes on."""
    return from_text(
        """computed (float[1,4,6,6] image) => (float[1,8,6,6] out) {
        zeros = ConstantOfShape (shape)
        whole = Add (zeros, w)
        same = Identity (whole)
        a = Conv (image, same)
        b = Conv (image, whole)
        both = Add (a, b)
        first = Slice (both, starts, ends, axes)
        second = Slice (both, ends, far, axes)
        joined = Concat <axis = 1> (second, first)
        grown = Resize (joined, , scales)
        small = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (grown)
        out = Conv (small, v)
    }""",
        shape=np.array([8, 4, 1, 1]), w=_normal(1, 8, 4, 1, 1), v=_normal(2, 8, 8, 1, 1), starts=np.array([0]), ends=np.array([4]),
        far=np.array([8]), axes=np.array([1]), scales=np.array([1, 1, 2, 2], np.float32),
    )  # fmt: skip


def branching() -> onnx.ModelProto:
    return from_text(
        """branching (bool flag, float[1,4,6,6] image) => (out) {
        c = Conv (image, w)
        r = Relu (c)
        s = If <then_branch = a () => (float[1,8,6,6] t) { t = Conv (r, v) },
                else_branch = b () => (float[1,8,6,6] e) { n = Neg (r)  e = Abs (n) }> (flag)
        out = Conv (s, v)
    }""",
        w=_normal(1, 8, 4, 1, 1), v=_normal(2, 8, 8, 1, 1),
    )  # fmt: skip


def detector() -> onnx.ModelProto:
    """Sigmoid scores and class numbers, channels last at both ends."""
    return from_text(
        """detector (float[N,8,8,3] image) => (float[N,8,8,4] scores, int64[N,8,8] kinds) {
        planes = Transpose <perm = [0, 3, 1, 2]> (image)
        c1 = Conv <pads = [1, 1, 1, 1]> (planes, w1, b1)
        n1 = BatchNormalization (c1, g, b1, b1, g)
        p1 = PRelu (n1, slope)
        c2 = Conv <group = 8, pads = [1, 1, 1, 1]> (p1, w2)
        c3 = Conv (c2, w3)
        s3 = HardSwish (c3)
        c4 = Conv (s3, w4)
        map = Sigmoid (c4)
        scores = Transpose <perm = [0, 2, 3, 1]> (map)
        kinds = ArgMax <axis = 3, keepdims = 0> (scores)
    }""",
        w1=_normal(1, 8, 3, 3, 3), b1=_normal(2, 8), g=np.ones(8), slope=np.full((8, 1, 1), 0.2), w2=_normal(3, 8, 1, 3, 3),
        w3=_normal(4, 8, 8, 1, 1), w4=_normal(5, 4, 8, 1, 1),
    )  # fmt: skip


def fused() -> onnx.ModelProto:
    model = conv_net()
    relu = model.graph.node.pop(3)
    conv = model.graph.node[2]
    conv.op_type, conv.domain, conv.output[0] = "FusedConv", "com.microsoft", relu.output[0]
    conv.attribute.append(helper.make_attribute("activation", "LeakyRelu"))
    conv.attribute.append(helper.make_attribute("activation_params", [0.1]))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    return model


def quantised() -> onnx.ModelProto:
    return from_text(
        """quantised (float[1,4,6,6] image) => (out) {
        c = Conv (image, v)
        q = QuantizeLinear (c, s, z)
        l = QLinearConv (q, s, z, w, s, zw, s, z)
        d = DequantizeLinear (l, s, z)
        wf = DequantizeLinear (w, s, zw)
        out = Conv (d, wf)
    }""",
        v=_normal(1, 8, 4, 1, 1), s=np.float32(0.05), z=np.uint8(128), zw=np.int8(0),
        w=np.random.default_rng(2).integers(-50, 50, (8, 8, 1, 1)).astype(np.int8),
    )  # fmt: skip


def digits() -> onnx.ModelProto:
    return onnx.load(DIGITS)


MAKERS: tuple[Callable[[], onnx.ModelProto], ...] = (
    *(conv_net, residual_net, dynamic, listed, typed_stores, computed, branching, detector, fused, quantised),
    *((lambda seed=seed: RandomCnn(seed).model()) for seed in range(24)),
    digits,
)


@cache
def sound(number: int) -> bytes:
    """Return one of the models as a file."""
    return MAKERS[number]().SerializeToString(deterministic=True)
