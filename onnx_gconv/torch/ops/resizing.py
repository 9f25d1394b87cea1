"""Resize and Upsample: every axis by itself, from the coordinates that the ONNX text defines.

PyTorch's own interpolation knows only some of the coordinate modes, and not all combinations of them; taking elements by
position knows all, and gradients flow through it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from onnx_gconv.torch.node import Node, Results, operator

NEAREST: dict[str, Callable[[Tensor], Tensor]] = {
    "round_prefer_floor": lambda position: torch.ceil(position - 0.5),
    "round_prefer_ceil": lambda position: torch.floor(position + 0.5),
    "floor": torch.floor,
    "ceil": torch.ceil,
}


@operator("Resize", numbers=(1, 2, 3))
def resize(node: Node, x: Tensor, *rest: Tensor | None) -> Results:
    if node.opset < 11:  # (X, scales)
        return _resized(node, x, _scales(x, rest[0].tolist() if rest[0] is not None else []))
    _, scales, sizes = (*rest, None, None, None)[:3]
    axes = [axis % x.ndim for axis in node.get("axes", range(x.ndim))]
    if node.get("antialias", 0) or node.get("keep_aspect_ratio_policy", "stretch") != "stretch":
        raise NotImplementedError("a Resize that smooths or keeps the aspect ratio is not supported")
    if sizes is not None and sizes.numel():
        targets = dict(zip(axes, sizes.tolist(), strict=True))
        return _resized(node, x, {axis: (size, size / x.shape[axis]) for axis, size in targets.items()})
    assert scales is not None
    return _resized(node, x, _scales(x, scales.tolist(), axes))


@operator("Upsample", numbers=(1,))
def upsample(node: Node, x: Tensor, scales: Tensor | None = None) -> Results:
    return _resized(node, x, _scales(x, node.numbers("scales", scales) or []))


Targets = dict[int, tuple[int, float]]  # by axis: the new length, and the scale


def _scales(x: Tensor, scales: list[float], axes: list[int] | None = None) -> Targets:
    along = axes if axes is not None else range(x.ndim)
    return {axis: (int(x.shape[axis] * scale), scale) for axis, scale in zip(along, scales, strict=True)}


def _resized(node: Node, x: Tensor, targets: Targets) -> Tensor:
    mode = node.get("mode", "nearest")
    for axis, (length, scale) in targets.items():
        if length == x.shape[axis] and scale == 1:
            continue
        position = _coordinates(node, length, x.shape[axis], scale)
        if mode == "nearest":
            x = _taken(x, axis, _nearest(node, position, scale))
            continue
        floor = torch.floor(position)
        offsets = (0, 1) if mode in ("linear", "bilinear") else (-1, 0, 1, 2)
        weights = _linear(position - floor) if len(offsets) == 2 else _cubic(position - floor, node.get("cubic_coeff_a", -0.75))
        if node.get("exclude_outside", 0):
            weights = _without_outside(weights, floor, offsets, x.shape[axis])
        shape = [-1, *[1] * (x.ndim - axis - 1)]
        parts = [
            _taken(x, axis, floor + offset) * weight.to(x).reshape(shape) for offset, weight in zip(offsets, weights, strict=True)
        ]
        x = torch.stack(parts).sum(0)
    return x


def _taken(x: Tensor, axis: int, position: Tensor) -> Tensor:
    return x.index_select(axis, position.clamp(0, x.shape[axis] - 1).long().to(x.device))


def _coordinates(node: Node, length: int, original: int, scale: float) -> Tensor:
    """Return where on the original axis each new element lies."""
    default = "asymmetric" if node.opset < 11 or node.op == "Upsample" else "half_pixel"
    mode = node.get("coordinate_transformation_mode", default)
    new = torch.arange(length, dtype=torch.float64)
    if mode == "asymmetric":
        return new / scale
    if mode == "half_pixel" or (mode == "pytorch_half_pixel" and length > 1):
        return (new + 0.5) / scale - 0.5
    if mode == "half_pixel_symmetric":
        centre = original / 2 * (1 - length / (scale * original))
        return centre + (new + 0.5) / scale - 0.5
    if mode == "pytorch_half_pixel":
        return new * 0
    if mode == "align_corners":
        return new * ((original - 1) / (length - 1)) if length > 1 else new * 0
    raise NotImplementedError(f"a Resize in the coordinate mode {mode!r} is not supported")


def _nearest(node: Node, position: Tensor, scale: float) -> Tensor:
    if node.opset < 11 or node.op == "Upsample":  # as ONNX Runtime does; the text of these opsets leaves it open
        return torch.ceil(position) if scale < 1 else torch.floor(position)
    return NEAREST[node.get("nearest_mode", "round_prefer_floor")](position)


def _linear(share: Tensor) -> list[Tensor]:
    return [1 - share, share]


def _cubic(share: Tensor, a: float) -> list[Tensor]:
    """Return the weights of the four neighbours (Keys' kernel)."""

    def near(t: Tensor) -> Tensor:
        return ((a + 2) * t - (a + 3)) * t * t + 1

    def far(t: Tensor) -> Tensor:
        return ((a * t - 5 * a) * t + 8 * a) * t - 4 * a

    return [far(share + 1), near(share), near(1 - share), far(2 - share)]


def _without_outside(weights: list[Tensor], floor: Tensor, offsets: tuple[int, ...], length: int) -> list[Tensor]:
    inside = [
        torch.where((floor + offset < 0) | (floor + offset >= length), 0.0, weight)
        for offset, weight in zip(offsets, weights, strict=True)
    ]
    total = torch.stack(inside).sum(0)
    return [weight / total for weight in inside]
