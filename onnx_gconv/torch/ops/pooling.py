"""Pooling."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from onnx_gconv.torch.node import Node, Results, operator
from onnx_gconv.torch.ops.convolution import amounts, is_symmetric, padded

MAX_POOL = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE_POOL = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


@operator("MaxPool")
def max_pool(node: Node, x: Tensor) -> Results:
    if len(node.outputs) > 1:
        raise NotImplementedError("the indices of a MaxPool are not supported")
    kernel = node.attributes["kernel_shape"]
    rank = len(kernel)
    pads = amounts(node, x.shape[2:], kernel)
    if not is_symmetric(pads) or any(2 * before > width for (before, _), width in zip(pads, kernel, strict=True)):
        x, pads = padded(x, pads, -torch.inf), [(0, 0)] * rank
    return MAX_POOL[rank](
        x,
        kernel,
        stride=node.get("strides", [1] * rank),
        padding=[before for before, _ in pads],
        dilation=node.get("dilations", [1] * rank),
        ceil_mode=bool(node.get("ceil_mode", 0)),
    )


@operator("AveragePool")
def average_pool(node: Node, x: Tensor) -> Results:
    kernel = node.attributes["kernel_shape"]
    rank = len(kernel)
    if any(dilation != 1 for dilation in node.get("dilations", [1] * rank)):
        raise NotImplementedError("an AveragePool with dilations is not supported")
    pool, stride = AVERAGE_POOL[rank], node.get("strides", [1] * rank)
    ceil, include = bool(node.get("ceil_mode", 0)), bool(node.get("count_include_pad", 0))
    pads = amounts(node, x.shape[2:], kernel)
    if is_symmetric(pads) and all(2 * before <= width for (before, _), width in zip(pads, kernel, strict=True)):
        return pool(x, kernel, stride, [before for before, _ in pads], ceil, include)
    total = pool(padded(x, pads), kernel, stride, 0, ceil, False)
    if include:
        return total
    # The mean over what is not padding: the mean over all, divided by the share that is not.
    return total / pool(padded(torch.ones_like(x[:1, :1]), pads), kernel, stride, 0, ceil, False)


@operator("LpPool")
def lp_pool(node: Node, x: Tensor) -> Results:
    kernel, p = node.attributes["kernel_shape"], node.get("p", 2)
    rank = len(kernel)
    powers = padded(x.abs().pow(p), amounts(node, x.shape[2:], kernel))
    ceil = bool(node.get("ceil_mode", 0))
    means = AVERAGE_POOL[rank](powers, kernel, node.get("strides", [1] * rank), 0, ceil, False)
    return (means * torch.Size(kernel).numel()).pow(1 / p)


@operator("GlobalAveragePool")
def global_average_pool(node: Node, x: Tensor) -> Results:
    return x.mean(dim=tuple(range(2, x.ndim)), keepdim=True)


@operator("GlobalMaxPool")
def global_max_pool(node: Node, x: Tensor) -> Results:
    return x.amax(dim=tuple(range(2, x.ndim)), keepdim=True)
