"""The Convs of a model as a sweep sees them: each one's shape, and the widths and groups at which to time it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import onnx

from onnx_gconv.deploy.one_layer import LayerShape, conv_shape
from onnx_gconv.errors import ModelError
from onnx_gconv.model.attributes import integer
from onnx_gconv.model.constants import STANDARD_DOMAINS, Constants
from onnx_gconv.model.network import FLOATS, Network
from onnx_gconv.model.shapes import Shape
from onnx_gconv.model.spaces import find_spaces
from onnx_gconv.model.widths import find_widths
from onnx_gconv.search.latency import behind
from onnx_gconv.search.target import is_aligned

SHARES = (0.25, 0.5)  # of a side's channels: with all of them and the least, the corners between which times are interpolated
HALF = 0.5


@dataclass(frozen=True)
class Point:
    """A Conv that can be timed: a shape, and its groups."""

    shape: LayerShape
    groups: int


@dataclass(frozen=True)
class SweptConv:
    """One Conv of the main graph, named by its output."""

    name: str
    shape: LayerShape
    groups: int
    legal_groups: tuple[int, ...]  # that it could have instead
    is_open_in: bool  # whether its input can have fewer channels
    is_open_out: bool

    @property
    def ins(self) -> int:
        return self.shape.input[1]

    @property
    def outs(self) -> int:
        return self.shape.out_channels

    @property
    def is_depthwise(self) -> bool:
        return self.groups == self.ins > 1

    def at(self, ins: int, outs: int, groups: int) -> Point:
        """Return the Conv with so many channels and groups."""
        batch, _, *pixels = self.shape.input
        return Point(replace(self.shape, input=(batch, ins, *pixels), out_channels=outs), groups)

    @property
    def as_it_is(self) -> Point:
        return self.at(self.ins, self.outs, self.groups)

    def depthwise_at(self, ins: int) -> Point:
        """Return the depthwise Conv with so many channels."""
        return self.at(ins, ins * (self.outs // self.ins), ins)

    def widths(self, step: int) -> tuple[list[int], list[int]]:
        """Return the widths of both sides at which to time it."""
        is_open_in = self.is_open_in and self.groups == 1
        is_open_out = self.is_open_out and self.groups == 1
        return corners(self.ins, step, is_open=is_open_in), corners(self.outs, step, is_open=is_open_out)

    def depthwise_widths(self, step: int) -> list[int]:
        return corners(self.ins, step, is_open=self.is_open_in or self.is_open_out)

    def grouped(self, block: int, step: int) -> Iterator[tuple[int, int, int]]:
        """Yield the widths and groups at which to time it with groups: as wide as it is, and half as wide where that fits."""
        half = (_share(self.ins, HALF, step), _share(self.outs, HALF, step))
        is_open = self.is_open_in and self.is_open_out and self.groups == 1
        for groups in self.legal_groups:
            for ins, outs in ((self.ins, self.outs), *([half] if is_open else [])):
                fits = ins % groups == 0 == outs % groups
                if groups > self.groups and fits and is_aligned(groups, block, in_channels=ins, out_channels=outs):
                    yield ins, outs, groups

    def points(self, block: int, step: int, *, with_groups: bool = True) -> list[Point]:
        """Return all that is to be timed of it, itself first."""
        if self.is_depthwise:
            return [self.depthwise_at(ins) for ins in reversed(self.depthwise_widths(step))]
        across, along = self.widths(step)
        dense = [self.at(ins, outs, self.groups) for ins in reversed(across) for outs in reversed(along)]
        return [*dense, *(self.at(*each) for each in self.grouped(block, step) if with_groups)]


def corners(channels: int, step: int, *, is_open: bool) -> list[int]:
    """Return the widths of a side at which a Conv is timed, ascending: all its channels, shares of them, and the least."""
    if not is_open:
        return [channels]
    return sorted({channels, *(_share(channels, share, step) for share in (0.0, *SHARES))})


def _share(channels: int, share: float, step: int) -> int:
    return min(channels, max(1, math.ceil(channels * share / step)) * step)


def find_swept(model: onnx.ModelProto, network: Network, *, with_ranks: bool = False) -> list[SweptConv]:
    """Return every Conv whose weight is stored and whose shape is known, depthwise ones too, in graph order.

    With ranks, a Conv that may get a low one has fewer outputs then, and is followed by the 1x1 Conv that it would have behind it.
    """
    constants = Constants(model)
    spaces = find_spaces(model, constants, network.shapes)
    narrow = {space.atom for space in find_widths(model, constants, spaces, network.shapes).spaces}
    legal = {layer.name: layer.legal_groups for layer in network.layers}
    ranked = {layer.name for layer in network.layers if layer.groups == 1 and layer.name in network.shapes}

    def is_open(tensor: str) -> bool:
        return tensor in spaces.axes and bool(narrow & set(spaces.axes[tensor].atoms))

    found = []
    for node in model.graph.node:
        if node.op_type != "Conv" or node.domain not in STANDARD_DOMAINS or not constants.is_constant(node.input[1]):
            continue
        try:
            weight = constants.value(node.input[1])
        except ModelError:
            continue
        name = node.output[0]
        shape = conv_shape(node, weight.shape, weight.dtype.name, network.shapes)
        if shape is not None and weight.dtype.name in FLOATS and weight.ndim > 2 and not constants.quantised(node.input[1]):
            groups = integer(node, "group", 1)
            conv = SweptConv(name, shape, groups, legal.get(name, (groups,)), is_open(node.input[0]), is_open(name))
            found += _with_rank(conv, tuple(network.shapes[name])) if with_ranks and name in ranked else [conv]
    return found


def _with_rank(conv: SweptConv, output: Shape) -> list[SweptConv]:
    """Return the two Convs that one becomes, each as wide as it can be."""
    axes = len(conv.shape.kernel)
    ones, zeros = (1,) * axes, (0,) * 2 * axes
    point = LayerShape(output, conv.outs, ones, ones, zeros, ones, "NOTSET", conv.shape.bias, conv.shape.dtype)
    return [replace(conv, is_open_out=True), SweptConv(behind(conv.name), point, 1, (1,), True, conv.is_open_out)]


def distinct(points: Sequence[Point]) -> list[Point]:
    """Return the points without those that are there before: Convs of equal shape are timed once."""
    return list(dict.fromkeys(points))
