"""Where a graph has the number of channels: what must be told when a space is narrowed, and what cannot be.

Only for channels that could be narrowed at all: where the order is pinned, the number stays as well.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import onnx

from onnx_gconv.model.attributes import integer, integers, pads, slices
from onnx_gconv.model.axes import Axis
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.shapes import Shape

ELSEWHERE = ("", -1)  # a reader that is no node: a graph output, an inner graph


@dataclass(frozen=True)
class Measure:
    """Number `index` of the whole numbers in input `slot` of the node (-1: its attribute `split`) is the channels of `tensor`."""

    node: str  # its first output
    slot: int
    index: int
    tensor: str


class Measuring:
    """One pass over the nodes, once every tensor has its axis."""

    def __init__(
        self,
        model: onnx.ModelProto,
        constants: Constants,
        shapes: Mapping[str, Shape],
        axes: Mapping[str, Axis],
        blocked: Collection[str],
    ) -> None:
        self.measures: list[Measure] = []
        self.sized: dict[int, str] = {}  # atoms whose number of channels must stay, and why
        self._constants = constants
        self._shapes = shapes
        self._axes = axes
        self._blocked = blocked
        self._producers = {name: node for node in model.graph.node for name in node.output if name}
        handlers: dict[str, Callable[[onnx.NodeProto], None]] = {
            "Conv": self._conv,
            "ConvTranspose": self._conv,
            "Pad": self._pad,
            "Reshape": self._reshape,
            "Resize": self._resize,
            "Shape": self._shape,
            "Size": lambda node: self._size(node.input[0], "something is computed from how many there are"),
            "Slice": self._slice,
            "Split": self._split,
        }
        for node in model.graph.node:
            if node.op_type in handlers and not constants.is_constant(node.output[0]):
                handlers[node.op_type](node)

    def _size(self, name: str, reason: str) -> None:
        """Note that these channels may change their order, but not their number."""
        for atom in self._axes[name].atoms if name in self._axes else ():
            self.sized.setdefault(atom, reason)

    def _conv(self, node: onnx.NodeProto) -> None:
        if node.output[0] in self._blocked:
            for name in (node.input[0], node.output[0]):
                self._size(name, "a Conv with groups of its own reads or writes them")

    def _pad(self, node: onnx.NodeProto) -> None:
        rank = len(self._shapes.get(node.input[0], ()))
        padded = pads(node, self._constants)
        if padded is not None and rank > 1 and len(padded) == 2 * rank and (padded[1] or padded[1 + rank]):
            for name in (node.input[0], node.output[0]):
                self._size(name, "a Pad makes more channels of them")

    def _slice(self, node: onnx.NodeProto) -> None:
        if 1 in (slices(node, self._constants, len(self._shapes.get(node.input[0], ()))) or ()):
            self._size(node.input[0], "a Slice counts them")

    def _split(self, node: onnx.NodeProto) -> None:
        rank = len(self._shapes.get(node.input[0], ()))
        if not rank or integer(node, "axis", 0) % rank != 1:
            return
        slot = 1 if len(node.input) > 1 and self._constants.is_constant(node.input[1]) else -1
        if slot < 0 and integers(node, "split") is None:
            self._size(node.input[0], "a Split takes equal parts of them")
        self.measures += [Measure(node.output[0], slot, index, name) for index, name in enumerate(node.output)]

    def _reshape(self, node: onnx.NodeProto) -> None:
        """Only a Reshape that flattens: any other one has pinned what it reads."""
        wanted = node.input[1] if len(node.input) > 1 else ""
        if self._constants.is_constant(wanted):
            target = self._constants.value(wanted).reshape(-1)
            if len(target) == 2 and target[1] > 0:  # -1 is whatever is left
                self.measures.append(Measure(node.output[0], 1, 1, node.output[0]))
            return
        join = self._producers.get(wanted)
        last = join.input[-1] if join is not None and join.op_type == "Concat" else ""
        if not (self._constants.is_constant(last) and self._constants.value(last).reshape(-1)[-1] == -1):
            self._size(node.input[0], "a Reshape counts them")

    def _resize(self, node: onnx.NodeProto) -> None:
        sizes = node.input[3] if len(node.input) > 3 else ""
        rank = len(self._shapes.get(node.input[0], ()))
        axes = integers(node, "axes") or list(range(rank))
        index = next((index for index, axis in enumerate(axes) if axis % rank == 1), None)
        if not sizes or index is None:
            return
        if self._constants.is_constant(sizes):
            self.measures.append(Measure(node.output[0], 3, index, node.output[0]))
        elif not self._begins_with_channels_of(sizes, node.input[0]):
            self._size(node.output[0], "a Resize counts them")

    def _begins_with_channels_of(self, sizes: str, tensor: str) -> bool:
        """Return whether these sizes begin with batch and channels of a tensor: exporters let them be as many as they are so."""
        join = self._producers.get(sizes)
        first = self._producers.get(join.input[0]) if join is not None and join.op_type == "Concat" else None
        if first is None or first.op_type != "Slice" or slices(first, self._constants, 1) != {0: (0, 2, 1)}:
            return False
        shape = self._producers.get(first.input[0])
        return shape is not None and shape.op_type == "Shape" and self._axes.get(shape.input[0]) == self._axes.get(tensor)

    def _shape(self, node: onnx.NodeProto) -> None:
        rank = len(self._shapes.get(node.input[0], ()))
        if not rank or any(attribute.name in ("start", "end") for attribute in node.attribute):
            told = True
        else:
            told = any(self._takes_channels(reader, rank) for reader in self._readers(node.output[0]))
        if told:
            self._size(node.input[0], "something is computed from how many there are")

    def _readers(self, name: str) -> "list[onnx.NodeProto | None]":
        """Return the nodes that read a tensor; None among them stands for whoever else does."""
        return [self._producers.get(reader) for reader, _ in self._constants.readers(name)]

    def _takes_channels(self, node: onnx.NodeProto | None, rank: int) -> bool:
        """Return whether somebody takes the number of channels out of a shape, but to resize these very channels."""
        if node is None:
            return True
        if node.op_type == "Gather" and self._constants.is_constant(node.input[1]):
            return bool((self._constants.value(node.input[1]) % rank == 1).any())
        ranges = slices(node, self._constants, 1) if node.op_type == "Slice" else None
        if ranges is None or 0 not in ranges:
            return True
        return 1 in range(rank)[slice(*ranges[0])] and not self._only_resizes(node.output[0])

    def _only_resizes(self, taken: str) -> bool:
        """Return whether these numbers go nowhere but into sizes of Resizes, which look after their channels themselves."""
        joins = self._readers(taken)
        ends = [
            (join.output[0], end)
            for join in joins
            if join is not None and join.op_type == "Concat"
            for end in self._readers(join.output[0])
        ]
        return all(join is not None and join.op_type == "Concat" for join in joins) and all(
            end is not None and end.op_type == "Resize" and self._begins_with_channels_of(sizes, end.input[0])
            for sizes, end in ends
        )
