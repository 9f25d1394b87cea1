"""Operators that reduce axes, search along them, or add up along them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from onnx_gconv.torch.node import Node, Results, operator

REDUCE: dict[str, Callable[[Tensor, list[int], bool], Tensor]] = {
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: x.square().sum(axes, keepdim=keep).sqrt(),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keepdim=keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "ReduceProd": lambda x, axes, keep: _product(x, axes, keep),
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keepdim=keep, dtype=x.dtype),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keepdim=keep),
}


def _product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.ndim for axis in axes), reverse=True):
        x = x.prod(axis, keepdim=keep, dtype=x.dtype)
    return x


@operator(*REDUCE, numbers=(1,))
def reduced(node: Node, x: Tensor, axes: Tensor | None = None) -> Results:
    along = node.numbers("axes", axes)
    if not along and node.get("noop_with_empty_axes", 0):
        return x
    return REDUCE[node.op](x, along or list(range(x.ndim)), bool(node.get("keepdims", 1)))


@operator("ArgMax", "ArgMin")
def arg_extreme(node: Node, x: Tensor) -> Results:
    axis, keep = node.get("axis", 0), bool(node.get("keepdims", 1))
    find = torch.argmax if node.op == "ArgMax" else torch.argmin
    if not node.get("select_last_index", 0):
        return find(x, dim=axis, keepdim=keep)
    return x.shape[axis] - 1 - find(x.flip(axis), dim=axis, keepdim=keep)


@operator("TopK", numbers=(1,))
def top_k(node: Node, x: Tensor, k: Tensor | None = None) -> Results:
    count: Any = node.attributes["k"] if k is None else int(k.item())
    largest, ordered = bool(node.get("largest", 1)), bool(node.get("sorted", 1))
    return tuple(torch.topk(x, count, dim=node.get("axis", -1), largest=largest, sorted=ordered))


@operator("CumSum", numbers=(1,))
def cumulative_sum(node: Node, x: Tensor, axis: Tensor) -> Results:
    dim = int(axis.item())
    x = x.flip(dim) if node.get("reverse", 0) else x
    total = torch.cumsum(x, dim, dtype=x.dtype)
    total = total - x if node.get("exclusive", 0) else total
    return total.flip(dim) if node.get("reverse", 0) else total
