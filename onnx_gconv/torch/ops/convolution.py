"""Conv, ConvTranspose and the matrix products."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from onnx_gconv.torch.node import Node, Results, operator

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}

Amounts = list[tuple[int, int]]  # before and behind, for each axis


def amounts(node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> Amounts:
    """Return how much each axis is padded: `pads`, or what `auto_pad` comes to at these sizes."""
    rank = len(kernel)
    mode = node.get("auto_pad", "NOTSET")
    if mode == "NOTSET":
        pads = node.get("pads", [0] * 2 * rank)
        return list(zip(pads[:rank], pads[rank:], strict=True))
    if mode == "VALID":
        return [(0, 0)] * rank
    strides, dilations = node.get("strides", [1] * rank), node.get("dilations", [1] * rank)
    result = []
    for size, width, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
        result.append(halves(total, upper=mode == "SAME_UPPER"))
    return result


def halves(total: int, *, upper: bool) -> tuple[int, int]:
    """Return `total` in two halves, the larger one behind if `upper`, else before."""
    small, large = total // 2, total - total // 2
    return (small, large) if upper else (large, small)


def padded(x: Tensor, pads: Amounts, value: float = 0.0) -> Tensor:
    """Return `x` with its last axes padded."""
    flat = [amount for pair in reversed(pads) for amount in pair]
    return F.pad(x, flat, value=value) if any(flat) else x


def is_symmetric(pads: Amounts) -> bool:
    """Return whether PyTorch can do this padding by itself."""
    return all(before == behind for before, behind in pads)


@operator("Conv")
def conv(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Results:
    kernel = weight.shape[2:]
    rank = len(kernel)
    pads = amounts(node, x.shape[2:], kernel)
    if not is_symmetric(pads):
        x, pads = padded(x, pads), [(0, 0)] * rank
    return CONV[rank](
        x,
        weight,
        bias,
        stride=node.get("strides", [1] * rank),
        padding=[before for before, _ in pads],
        dilation=node.get("dilations", [1] * rank),
        groups=node.get("group", 1),
    )


@operator("ConvTranspose")
def conv_transpose(node: Node, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Results:
    rank = weight.ndim - 2
    strides, dilations = node.get("strides", [1] * rank), node.get("dilations", [1] * rank)
    pads, extra = _transposed_amounts(node, x.shape[2:], weight.shape[2:])
    native = is_symmetric(pads)
    result = CONV_TRANSPOSE[rank](
        x,
        weight,
        bias,
        stride=strides,
        padding=[before for before, _ in pads] if native else 0,
        output_padding=extra,
        groups=node.get("group", 1),
        dilation=dilations,
    )
    return result if native else padded(result, [(-before, -behind) for before, behind in pads])


def _transposed_amounts(node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[Amounts, list[int]]:
    """Return how much of the result is cut off, and how much is added at its ends."""
    rank = len(kernel)
    mode, wanted = node.get("auto_pad", "NOTSET"), node.get("output_shape", None)
    extra = list(node.get("output_padding", [0] * rank))
    if wanted is None and mode in ("NOTSET", "VALID"):
        return amounts(node, sizes, kernel), extra
    strides, dilations = node.get("strides", [1] * rank), node.get("dilations", [1] * rank)
    pads = []
    for axis in range(rank):
        full = (sizes[axis] - 1) * strides[axis] + (kernel[axis] - 1) * dilations[axis] + 1 + extra[axis]
        target = wanted[axis - rank] if wanted is not None else sizes[axis] * strides[axis]
        pads.append(halves(max(full - target, 0), upper=mode == "SAME_UPPER"))
        extra[axis] += max(target - full, 0)
    return pads, extra


@operator("Gemm")
def gemm(node: Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> Results:
    left = a.T if node.get("transA", 0) else a
    right = b.T if node.get("transB", 0) else b
    product = left @ right
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    product = product if alpha == 1.0 else alpha * product
    return product if c is None else product + (c if beta == 1.0 else beta * c)


@operator("MatMul")
def matmul(node: Node, a: Tensor, b: Tensor) -> Results:
    return torch.matmul(a, b)


@operator("Einsum")
def einsum(node: Node, *inputs: Tensor) -> Results:
    return torch.einsum(node.attributes["equation"], *inputs)
