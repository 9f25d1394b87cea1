"""Operators that arrange elements anew, or make tensors from shapes."""

from itertools import accumulate

import numpy as np
import torch
from onnx import numpy_helper
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from onnx_gconv.torch.node import DTYPES, Node, Results, operator


@operator("Shape")
def shape(node: Node, x: Tensor) -> Results:
    # On the CPU, and so is all that is computed from it: shapes are needed as numbers.
    return torch.tensor(x.shape[node.get("start", 0) : node.get("end", None)], dtype=torch.int64)


@operator("Size")
def size(node: Node, x: Tensor) -> Results:
    return torch.tensor(x.numel(), dtype=torch.int64)


@operator("Reshape", numbers=(1,))
def reshape(node: Node, x: Tensor, sizes: Tensor) -> Results:
    wanted = sizes.tolist()
    if not node.get("allowzero", 0):
        wanted = [x.shape[axis] if size == 0 else size for axis, size in enumerate(wanted)]
    return x.reshape(wanted)


@operator("Flatten")
def flatten(node: Node, x: Tensor) -> Results:
    axis = node.get("axis", 1)
    return x.reshape(x.shape[: axis if axis >= 0 else x.ndim + axis].numel(), -1)


@operator("Squeeze", numbers=(1,))
def squeeze(node: Node, x: Tensor, axes: Tensor | None = None) -> Results:
    along = node.numbers("axes", axes)
    return x.squeeze() if along is None else x.squeeze(tuple(along))


@operator("Unsqueeze", numbers=(1,))
def unsqueeze(node: Node, x: Tensor, axes: Tensor | None = None) -> Results:
    along = node.numbers("axes", axes) or []
    rank = x.ndim + len(along)
    for axis in sorted(axis % rank for axis in along):
        x = x.unsqueeze(axis)
    return x


@operator("Transpose")
def transpose(node: Node, x: Tensor) -> Results:
    return x.permute(node.get("perm", list(reversed(range(x.ndim)))))


@operator("Concat")
def concat(node: Node, *inputs: Tensor) -> Results:
    return torch.cat(inputs, dim=node.get("axis", 1))


@operator("Split", numbers=(1,))
def split(node: Node, x: Tensor, sizes: Tensor | None = None) -> Results:
    axis, parts = node.get("axis", 0), node.numbers("split", sizes)
    if parts is None:
        count = node.get("num_outputs", len(node.outputs))
        each = -(-x.shape[axis] // count)
        ends = [min(end, x.shape[axis]) for end in accumulate([each] * count)]
        parts = [end - begin for begin, end in zip([0, *ends], ends, strict=False)]
    return torch.split(x, parts, dim=axis)


@operator("Expand", numbers=(1,))
def expand(node: Node, x: Tensor, sizes: Tensor) -> Results:
    return x.expand(np.broadcast_shapes(tuple(x.shape), tuple(sizes.tolist())))


@operator("Tile", numbers=(1,))
def tile(node: Node, x: Tensor, repeats: Tensor) -> Results:
    return x.repeat(repeats.tolist())


@operator("ConstantOfShape", numbers=(0,))
def constant_of_shape(node: Node, sizes: Tensor) -> Results:
    value = node.get("value", None)
    if value is None:
        return torch.zeros(sizes.tolist())
    return torch.full(sizes.tolist(), numpy_helper.to_array(value).reshape(-1)[0].item(), dtype=DTYPES[value.data_type])


@operator("Range", numbers=(0, 1, 2))
def arithmetic_range(node: Node, start: Tensor, limit: Tensor, delta: Tensor) -> Results:
    return torch.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype)


@operator("EyeLike")
def eye_like(node: Node, x: Tensor) -> Results:
    rows, columns = x.shape
    offset = node.get("k", 0)
    return torch.ones_like(x).tril(offset).triu(offset) if rows and columns else torch.zeros_like(x)


@operator("Trilu", numbers=(1,))
def triangle(node: Node, x: Tensor, k: Tensor | None = None) -> Results:
    offset = 0 if k is None else int(k.item())
    return torch.triu(x, offset) if node.get("upper", 1) else torch.tril(x, offset)


@operator("DepthToSpace")
def depth_to_space(node: Node, x: Tensor) -> Results:
    block = node.attributes["blocksize"]
    if node.get("mode", "DCR") == "CRD":
        return F.pixel_shuffle(x, block)
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, block, block, channels // block**2, height, width).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(batch, channels // block**2, height * block, width * block)


@operator("SpaceToDepth")
def space_to_depth(node: Node, x: Tensor) -> Results:
    block = node.attributes["blocksize"]
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, channels, height // block, block, width // block, block).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(batch, channels * block**2, height // block, width // block)


@operator("Pad", numbers=(1, 2, 3))
def pad(node: Node, x: Tensor, pads: Tensor | None = None, value: Tensor | None = None, axes: Tensor | None = None) -> Results:
    given = node.numbers("pads", pads) or []
    along = [axis % x.ndim for axis in axes.tolist()] if axes is not None else list(range(x.ndim))
    before, behind = given[: len(along)], given[len(along) :]
    amounts = [(0, 0)] * x.ndim
    for axis, low, high in zip(along, before, behind, strict=True):
        amounts[axis] = (low, high)
    mode = node.get("mode", "constant")
    if mode == "constant":
        filling = node.get("value", 0.0) if value is None else value.item()
        return F.pad(x, [amount for pair in reversed(amounts) for amount in pair], value=filling)
    for axis, (low, high) in enumerate(amounts):
        if low or high:
            x = x.index_select(axis, _source_positions(mode, x.shape[axis], low, high).to(x.device))
    return x


def _source_positions(mode: str, length: int, low: int, high: int) -> Tensor:
    """Return where each element of a padded axis is taken from."""
    positions = torch.arange(-low, length + high)
    if mode == "edge":
        return positions.clamp(0, length - 1)
    if mode == "wrap":
        return positions % length
    period = max(2 * (length - 1), 1)  # reflect: back and forth without repeating the border
    return (positions % period - (length - 1)).abs().neg() + length - 1
