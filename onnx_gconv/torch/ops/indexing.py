"""Operators that pick elements, or put them."""

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from onnx_gconv.torch.node import Node, Results, operator

REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _from_the_front(indices: Tensor, length: int) -> Tensor:
    indices = indices.long()
    return torch.where(indices < 0, indices + length, indices)


@operator("Gather")
def gather(node: Node, x: Tensor, indices: Tensor) -> Results:
    axis = node.get("axis", 0) % x.ndim
    picked = x.index_select(axis, _from_the_front(indices, x.shape[axis]).reshape(-1))
    return picked.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


@operator("GatherElements")
def gather_elements(node: Node, x: Tensor, indices: Tensor) -> Results:
    axis = node.get("axis", 0)
    return torch.gather(x, axis, _from_the_front(indices, x.shape[axis]))


@operator("GatherND")
def gather_nd(node: Node, x: Tensor, indices: Tensor) -> Results:
    batch = node.get("batch_dims", 0)
    shared = x.shape[:batch]
    flat_x = x.reshape(shared.numel(), *x.shape[batch:])
    flat_indices = indices.long().reshape(shared.numel(), *indices.shape[batch:])
    number = torch.arange(shared.numel(), device=x.device).reshape(-1, *[1] * (flat_indices.ndim - 2))
    picked = flat_x[(number.expand(flat_indices.shape[:-1]), *flat_indices.unbind(-1))]
    return picked.reshape([*shared, *picked.shape[1:]])


@operator("ScatterND")
def scatter_nd(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Results:
    places = indices.long().unbind(-1)
    reduction = node.get("reduction", "none")
    if reduction not in ("none", "add"):
        raise NotImplementedError(f"a ScatterND with the reduction {reduction!r} is not supported")
    return x.index_put(places, updates, accumulate=reduction == "add")


@operator("ScatterElements", "Scatter")
def scatter_elements(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> Results:
    axis, reduction = node.get("axis", 0), node.get("reduction", "none")
    places = _from_the_front(indices, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, places, updates)
    return x.scatter_reduce(axis, places, updates, REDUCTIONS[reduction])


@operator("Slice", numbers=(1, 2, 3, 4))
def slice_axes(
    node: Node,
    x: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Results:
    begins, limits = node.numbers("starts", starts) or [], node.numbers("ends", ends) or []
    along = node.numbers("axes", axes) or list(range(len(begins)))
    strides = node.numbers("steps", steps) or [1] * len(begins)
    for begin, limit, axis, step in zip(begins, limits, along, strides, strict=True):
        picked = range(*slice(begin, limit, step).indices(x.shape[axis]))
        if step > 0:
            x = x[(*[slice(None)] * (axis % x.ndim), slice(picked.start, picked.stop, picked.step))]
        else:  # PyTorch does not slice backwards
            x = x.index_select(axis, torch.tensor(list(picked), dtype=torch.int64, device=x.device))
    return x


@operator("NonZero")
def non_zero(node: Node, x: Tensor) -> Results:
    return torch.nonzero(x).T


@operator("OneHot", numbers=(1,))
def one_hot(node: Node, indices: Tensor, depth: Tensor, values: Tensor) -> Results:
    count = int(depth.item())
    hot = F.one_hot(indices.long() % count, count).movedim(-1, node.get("axis", -1)).bool()
    return torch.where(hot, values[1], values[0])


@operator("GridSample")
def grid_sample(node: Node, x: Tensor, grid: Tensor) -> Results:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(node.get("mode", "bilinear"), node.get("mode", "bilinear"))
    return F.grid_sample(x, grid, mode, node.get("padding_mode", "zeros"), bool(node.get("align_corners", 0)))
