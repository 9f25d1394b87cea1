"""Operators that work on each element by itself."""

from collections.abc import Callable
from functools import reduce
from typing import Any

import onnx
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from onnx_gconv.torch.node import DTYPES, Node, Results, operator

UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Asinh": torch.asinh,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Ceil": torch.ceil,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Erf": torch.erf,
    "Exp": torch.exp,
    "Floor": torch.floor,
    "HardSwish": F.hardswish,
    "Identity": lambda x: x,
    "IsInf": torch.isinf,
    "IsNaN": torch.isnan,
    "Log": torch.log,
    "Mish": F.mish,
    "Neg": torch.neg,
    "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal,
    "Relu": F.relu,
    "Round": torch.round,
    "Sigmoid": torch.sigmoid,
    "Sign": torch.sign,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
    "Softplus": F.softplus,
    "Softsign": F.softsign,
    "Sqrt": torch.sqrt,
    "Tan": torch.tan,
    "Tanh": torch.tanh,
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add,
    "And": torch.logical_and,
    "Equal": torch.eq,
    "Greater": torch.gt,
    "GreaterOrEqual": torch.ge,
    "Less": torch.lt,
    "LessOrEqual": torch.le,
    "Mul": torch.mul,
    "Or": torch.logical_or,
    "Sub": torch.sub,
    "Xor": torch.logical_xor,
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
}
VARIADIC: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"Max": torch.maximum, "Min": torch.minimum, "Sum": torch.add}


def _enter_tables() -> None:
    for name, unary in UNARY.items():
        operator(name)(lambda node, x, f=unary: f(x))
    for name, binary in BINARY.items():
        operator(name)(lambda node, a, b, f=binary: f(a, b))
    for name, binary in VARIADIC.items():
        operator(name)(lambda node, *inputs, f=binary: reduce(f, inputs))


_enter_tables()


@operator("Div")
def divide(node: Node, a: Tensor, b: Tensor) -> Results:
    return torch.div(a, b) if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


@operator("Pow")
def power(node: Node, a: Tensor, b: Tensor) -> Results:
    return torch.pow(a, b).to(a.dtype)


@operator("Mod")
def modulo(node: Node, a: Tensor, b: Tensor) -> Results:
    return torch.fmod(a, b) if node.get("fmod", 0) else torch.remainder(a, b)


@operator("Mean")
def mean(node: Node, *inputs: Tensor) -> Results:
    return reduce(torch.add, inputs) / len(inputs)


@operator("Where")
def where(node: Node, condition: Tensor, a: Tensor, b: Tensor) -> Results:
    return torch.where(condition, a, b)


@operator("Cast")
def cast(node: Node, x: Tensor) -> Results:
    wanted = node.attributes["to"]
    if wanted not in DTYPES:
        raise NotImplementedError(f"PyTorch has no type for {onnx.TensorProto.DataType.Name(wanted)}")
    return x.to(DTYPES[wanted])


@operator("CastLike")
def cast_like(node: Node, x: Tensor, like: Tensor) -> Results:
    return x.to(like.dtype)


@operator("Clip", numbers=(1, 2))
def clip(node: Node, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Results:
    least = node.get("min", None) if low is None else low.item()
    most = node.get("max", None) if high is None else high.item()
    return x if least is None and most is None else torch.clamp(x, least, most)


@operator("Dropout", numbers=(1, 2), modal=True)
def dropout(node: Node, x: Tensor, ratio: Tensor | None = None, mode: Tensor | None = None, *, training: bool) -> Results:
    share = node.get("ratio", 0.5) if ratio is None else float(ratio.item())
    result = F.dropout(x, share, training)
    return (result, torch.ones_like(x, dtype=torch.bool)) if len(node.outputs) > 1 else result


@operator("LeakyRelu")
def leaky_relu(node: Node, x: Tensor) -> Results:
    return F.leaky_relu(x, node.get("alpha", 0.01))


@operator("PRelu")
def prelu(node: Node, x: Tensor, slope: Tensor) -> Results:
    return torch.where(x < 0, slope * x, x)


@operator("Elu")
def elu(node: Node, x: Tensor) -> Results:
    return F.elu(x, node.get("alpha", 1.0))


@operator("Celu")
def celu(node: Node, x: Tensor) -> Results:
    return F.celu(x, node.get("alpha", 1.0))


@operator("Selu")
def selu(node: Node, x: Tensor) -> Results:
    alpha, gamma = node.get("alpha", 1.67326319217681884765625), node.get("gamma", 1.05070102214813232421875)
    return gamma * F.elu(x, alpha)


@operator("HardSigmoid")
def hard_sigmoid(node: Node, x: Tensor) -> Results:
    return torch.clamp(node.get("alpha", 0.2) * x + node.get("beta", 0.5), 0, 1)


@operator("ThresholdedRelu")
def thresholded_relu(node: Node, x: Tensor) -> Results:
    return F.threshold(x, node.get("alpha", 1.0), 0.0)


@operator("Shrink")
def shrink(node: Node, x: Tensor) -> Results:
    limit, bias = node.get("lambd", 0.5), node.get("bias", 0.0)
    return torch.where(x < -limit, x + bias, torch.where(x > limit, x - bias, torch.zeros_like(x)))


@operator("Gelu", "com.microsoft:Gelu")
def gelu(node: Node, x: Tensor) -> Results:
    return F.gelu(x, approximate=node.get("approximate", "none"))


@operator("Swish")
def swish(node: Node, x: Tensor) -> Results:
    return x * torch.sigmoid(node.get("alpha", 1.0) * x)


@operator("com.microsoft:QuickGelu")
def quick_gelu(node: Node, x: Tensor) -> Results:
    return x * torch.sigmoid(node.get("alpha", 1.702) * x)


@operator("Softmax", "LogSoftmax")
def softmax(node: Node, x: Tensor) -> Results:
    apply: Callable[..., Tensor] = F.softmax if node.op == "Softmax" else F.log_softmax
    if node.opset >= 13:
        return apply(x, dim=node.get("axis", -1))
    # Before opset 13 all axes from `axis` on are taken as one.
    axis: Any = node.get("axis", 1)
    return apply(x.flatten(axis % max(x.ndim, 1)), dim=-1).reshape(x.shape)
