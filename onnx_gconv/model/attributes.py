"""Parameters of nodes, which the opsets keep now in attributes, now in constant inputs."""

import math

import onnx

from onnx_gconv.model.constants import Constants


def integer(node: onnx.NodeProto, name: str, default: int) -> int:
    """Return an integer attribute."""
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == name), default)


def floating(node: onnx.NodeProto, name: str, default: float) -> float:
    """Return a floating-point attribute."""
    return next((float(attribute.f) for attribute in node.attribute if attribute.name == name), default)


def integers(node: onnx.NodeProto, name: str) -> list[int] | None:
    """Return a list of integers; None if the node does not say."""
    return next((list(attribute.ints) for attribute in node.attribute if attribute.name == name), None)


def clip_range(node: onnx.NodeProto, constants: Constants) -> tuple[float, float] | None:
    """Return a Clip's least and largest value; None if one is not constant, or not one number."""
    if any(name and not constants.is_constant(name) for name in node.input[1:3]):
        return None
    if any(constants.value(name).ndim for name in node.input[1:3] if name):
        return None
    low, high = (floating(node, name, default) for name, default in (("min", -math.inf), ("max", math.inf)))
    bounds = [float(constants.value(name)) if name else None for name in [*node.input[1:3], "", ""][:2]]
    return low if bounds[0] is None else bounds[0], high if bounds[1] is None else bounds[1]


def axes(node: onnx.NodeProto, constants: Constants) -> list[int] | None:
    """Return the axes of a reduction or squeeze; None if there are none or they are not constant."""
    told = integers(node, "axes")
    if told is not None:
        return told
    if len(node.input) > 1 and node.input[1] and constants.is_constant(node.input[1]):
        return _integers(node.input[1], constants)
    return None


def pads(node: onnx.NodeProto, constants: Constants) -> list[int] | None:
    """Return a Pad's amounts, all begins then all ends; None if they are not constant or only for some axes."""
    for attribute in node.attribute:
        if attribute.name in ("pads", "paddings"):
            return list(attribute.ints)
    if len(node.input) < 2 or not constants.is_constant(node.input[1]) or (len(node.input) > 3 and node.input[3]):
        return None
    return _integers(node.input[1], constants)


def slices(node: onnx.NodeProto, constants: Constants, rank: int) -> dict[int, tuple[int, int, int]] | None:
    """Return a Slice's start, end and step by axis; None if one is not constant."""
    if not rank:
        return None
    lists: list[list[int]] = []
    if len(node.input) == 1:  # before opset 10: attributes
        found = {attribute.name: list(attribute.ints) for attribute in node.attribute}
        starts, ends = found.get("starts", []), found.get("ends", [])
        lists = [starts, ends, found.get("axes", list(range(len(starts)))), [1] * len(starts)]
    else:
        for slot, name in enumerate([*node.input[1:], "", ""][:4]):
            if name and not constants.is_constant(name):
                return None
            count = len(lists[0]) if lists else 0
            default = list(range(count)) if slot == 2 else [1] * count
            lists.append(_integers(name, constants) if name else default)
    if len(set(map(len, lists))) > 1 or 0 in lists[3]:
        return None
    return {axis % rank: (start, end, step) for start, end, axis, step in zip(*lists, strict=True)}


def _integers(name: str, constants: Constants) -> list[int]:
    return [int(value) for value in constants.value(name).reshape(-1)]
