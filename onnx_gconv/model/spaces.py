"""Channel spaces: which tensors share one order of channels, and which constants follow it.

A wrong guess here would corrupt a model, so an op that is not known to be channel-wise pins the order of all it touches.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx

from onnx_gconv.errors import ModelError
from onnx_gconv.model.attributes import axes, integer, pads, slices
from onnx_gconv.model.axes import Atoms, Axis
from onnx_gconv.model.channelwise import ELEMENTWISE, PER_CHANNEL, REDUCING, UNARY
from onnx_gconv.model.constants import STANDARD_DOMAINS, Constants, inner_graphs, outer_reads
from onnx_gconv.model.measures import Measure, Measuring
from onnx_gconv.model.shapes import Shape

ORDER_BLIND = frozenset({"Shape", "Size"})  # what they tell does not depend on the order


@dataclass(frozen=True)
class Tie:
    """Axis `dim` of the constant in input `slot` of the node follows the channels of `tensor`."""

    node: str  # its first output
    slot: int
    dim: int
    tensor: str


@dataclass(frozen=True)
class Junction:
    """A tensor whose channels are those of `source` between new, constant ones; its own order may be another one."""

    tensor: str
    source: str
    before: int
    after: int


@dataclass(frozen=True)
class Spaces:
    """The channel axis of every tensor that has one, and the constants tied to them."""

    axes: Mapping[str, Axis]
    pinned: frozenset[int]
    sizes: Mapping[int, int]
    ties: tuple[Tie, ...]
    blocked: frozenset[str]  # Convs that have groups already (but are not depthwise), by output
    junctions: tuple[Junction, ...]
    measures: tuple[Measure, ...]
    sized: Mapping[int, str]  # atoms whose number of channels must stay, and why


def find_spaces(model: onnx.ModelProto, constants: Constants, shapes: Mapping[str, Shape]) -> Spaces:
    """Return the channel spaces of the main graph."""
    walk = _Walk(constants, shapes)
    for value in model.graph.input:
        walk.fresh(value.name, pinned=True)
    for node in model.graph.node:
        walk.visit(node)
    for value in model.graph.output:
        walk.pin(value.name)
    for node in model.graph.node:
        for graph in inner_graphs(node):
            for name in outer_reads(graph):
                walk.pin(name)
    walk.require_fitting(model)
    atoms = walk.atoms
    axes = {name: Axis(atoms.expand(axis.atoms), axis.repeat) for name, axis in walk.axes.items()}
    measuring = Measuring(model, constants, shapes, axes, walk.blocked)
    leaves = {atom for axis in axes.values() for atom in axis.atoms}
    return Spaces(
        axes,
        frozenset(atom for atom in leaves if atoms.is_pinned(atom)),
        {atom: atoms.size(atom) for atom in leaves},
        tuple(walk.ties),
        frozenset(walk.blocked),
        tuple(walk.junctions),
        tuple(measuring.measures),
        measuring.sized,
    )


class _Walk:
    """One pass over the nodes in topological order."""

    def __init__(self, constants: Constants, shapes: Mapping[str, Shape]) -> None:
        self.atoms = Atoms()
        self.axes: dict[str, Axis] = {}
        self.ties: list[Tie] = []
        self.blocked: set[str] = set()
        self.junctions: list[Junction] = []
        self._constants = constants
        self._shapes = shapes
        self._handlers: dict[str, Callable[[onnx.NodeProto], bool]] = {
            "Concat": self._concat,
            "Conv": self._conv,
            "ConvTranspose": self._conv,
            "Flatten": self._flatten,
            "Gemm": self._gemm,
            "MatMul": self._matmul,
            "Pad": self._pad,
            "Reshape": self._flatten,
            "Resize": self._unary,
            "Slice": self._slice,
            "Split": self._split,
            "Squeeze": self._squeeze,
            "Unsqueeze": self._squeeze,
            "Upsample": self._unary,
        }
        self._handlers |= dict.fromkeys(UNARY, self._unary)
        self._handlers |= dict.fromkeys(ELEMENTWISE, self._elementwise)
        self._handlers |= dict.fromkeys(PER_CHANNEL, self._per_channel)
        self._handlers |= dict.fromkeys(REDUCING, self._reduce)

    def visit(self, node: onnx.NodeProto) -> None:
        """Give the node's outputs their axes; where its handler cannot, pin everything that it touches."""
        if all(self._constants.is_constant(name) for name in node.output if name) or node.op_type in ORDER_BLIND:
            return
        handler = self._handlers.get(node.op_type) if node.domain in STANDARD_DOMAINS else None
        if handler is None or not handler(node):
            for name in node.input:
                self.pin(name)
            for name in node.output:
                self.fresh(name, pinned=True)

    def require_fitting(self, model: onnx.ModelProto) -> None:
        """Refuse a constant that has another number of channels than the tensor whose channels it follows."""
        nodes = {node.output[0]: node for node in model.graph.node}
        for tie in self.ties:
            node, axis = nodes[tie.node], self.axes[tie.tensor]
            shape = self._shape(node.input[tie.slot])
            channels = self.atoms.length(axis.atoms) * axis.repeat
            if shape is not None and shape[tie.dim : tie.dim + 1] != (channels,):
                raise ModelError(
                    f"the {node.op_type} {node.name or tie.node!r} has {channels} channels at {tie.tensor!r}, which does not fit "
                    f"{node.input[tie.slot]!r} of {'x'.join(map(str, shape))}.",
                    hint="the model is malformed: export it again",
                )

    def fresh(self, name: str, *, pinned: bool = False) -> bool:
        """Give a tensor an axis of its own; False if it has no known channels."""
        shape = self._shapes.get(name)
        if not name or shape is None or len(shape) < 2:
            return False
        self.axes[name] = Axis((self.atoms.new(shape[1], pinned=pinned),))
        return True

    def pin(self, name: str) -> None:
        if name in self.axes:
            self.atoms.pin(self.axes[name].atoms)

    def _same(self, source: str, result: str) -> bool:
        """Give the result the axis of the source; False unless both have as many channels."""
        axis, shape = self.axes.get(source), self._shapes.get(result)
        if axis is None or shape is None or len(shape) < 2 or shape[1] != self.atoms.length(axis.atoms) * axis.repeat:
            return False
        self.axes[result] = axis
        return True

    def _unary(self, node: onnx.NodeProto) -> bool:
        # A second output (Dropout's mask, MaxPool's indices) would need an order of its own.
        if any(node.output[1:]):
            return False
        if self._axis_repeat(node.input[0]) != 1 and self._shapes.get(node.input[0]) != self._shapes.get(node.output[0]):
            return False
        return self._same(node.input[0], node.output[0])

    def _axis_repeat(self, name: str) -> int:
        return self.axes[name].repeat if name in self.axes else 1

    def _per_channel(self, node: onnx.NodeProto) -> bool:
        slots = PER_CHANNEL[node.op_type]
        if any(node.output[1:]) or not all(self._can_follow(node.input[slot]) for slot in slots):
            return False
        if self._axis_repeat(node.input[0]) != 1 or not self._same(node.input[0], node.output[0]):
            return False
        self.ties += [Tie(node.output[0], slot, 0, node.output[0]) for slot in slots]
        return True

    def _elementwise(self, node: onnx.NodeProto) -> bool:
        result = self._shapes.get(node.output[0])
        if result is None or len(result) < 2:
            return False
        members: list[str] = []
        ties: list[Tie] = []
        for slot, name in enumerate(node.input):
            shape = self._shape(name)
            if shape is None:
                return False
            dim = 1 - (len(result) - len(shape))  # NumPy broadcasting aligns shapes at the right
            if dim != 1 and name in self.axes:
                return False  # its channels become pixels here, whose order is fixed
            if dim < 0 or shape[dim] == 1 != result[1]:
                continue  # the same for every channel
            if self._constants.is_constant(name):
                if not self._can_follow(name):
                    return False
                ties.append(Tie(node.output[0], slot, dim, node.output[0]))
            elif dim != 1 or name not in self.axes or shape[1] != result[1]:
                return False
            else:
                members.append(name)
        if not members or any(self.axes[name].repeat != self.axes[members[0]].repeat for name in members):
            return False
        for name in members[1:]:
            self.atoms.unify(self.axes[members[0]].atoms, self.axes[name].atoms)
        if not self._same(members[0], node.output[0]):
            return False
        self.ties += ties
        return True

    def _shape(self, name: str) -> Shape | None:
        if name in self._shapes:
            return self._shapes[name]
        return self._constants.value(name).shape if self._constants.is_constant(name) else None

    def _conv(self, node: onnx.NodeProto) -> bool:
        weight = self._shape(node.input[1])
        source = self.axes.get(node.input[0])
        if weight is None or len(weight) < 3 or source is None or source.repeat != 1 or not self._is_plain(node):
            return False
        groups = integer(node, "group", 1)
        # The axis of the weight with all inputs, or all outputs, and that with those of one group.
        read, written = (0, 1) if node.op_type == "ConvTranspose" else (1, 0)
        ins, outs = (weight[dim] * (groups if dim == 1 else 1) for dim in (read, written))
        if (self._channels(node.input[0]), self._channels(node.output[0])) != (ins, outs):
            return False
        if groups == ins == outs and groups > 1:  # depthwise
            if not self._same(node.input[0], node.output[0]):
                return False
            written = 0
        else:
            if not self.fresh(node.output[0]):
                return False
            if groups > 1:
                self.blocked.add(node.output[0])
                return True  # its weight does not follow single channels: grouping rewrites it
            self.ties.append(Tie(node.output[0], 1, read, node.input[0]))
        self._tie_filters(node, written)
        return True

    def _channels(self, name: str) -> int | None:
        shape = self._shapes.get(name)
        return shape[1] if shape is not None and len(shape) > 1 else None

    def _is_plain(self, node: onnx.NodeProto) -> bool:
        """Return whether weight and bias can be permuted."""
        return all(self._can_follow(name) for name in node.input[1:] if name)

    def _can_follow(self, name: str) -> bool:
        """Return whether a constant can be permuted: plain, and read here only, or a second reader would need a copy.

        Exporters merge equal biases, most of them all zero: one number throughout needs no permuting, so no copy.
        """
        if not self._constants.is_constant(name) or self._constants.quantised(name):
            return False
        if len(self._constants.readers(self._constants.origin(name))) == 1:
            return True
        value = self._constants.value(name)
        return bool((value == value.flat[0]).all())

    def _tie_filters(self, node: onnx.NodeProto, dim: int) -> None:
        self.ties.append(Tie(node.output[0], 1, dim, node.output[0]))
        if len(node.input) > 2 and node.input[2]:
            self.ties.append(Tie(node.output[0], 2, 0, node.output[0]))

    def _gemm(self, node: onnx.NodeProto) -> bool:
        bias = self._shape(node.input[2]) if len(node.input) > 2 and node.input[2] else None
        if integer(node, "transA", 0) or node.input[0] not in self.axes or not self._is_plain(node):
            return False
        if bias is not None and len(bias) != 1 and bias != (1, self._shapes.get(node.output[0], (0, 0))[1]):
            return False
        if not self.fresh(node.output[0]):
            return False
        transposed = integer(node, "transB", 0)
        self.ties.append(Tie(node.output[0], 1, 1 if transposed else 0, node.input[0]))
        self.ties.append(Tie(node.output[0], 1, 0 if transposed else 1, node.output[0]))
        if bias is not None and bias[-1] != 1:
            self.ties.append(Tie(node.output[0], 2, len(bias) - 1, node.output[0]))
        return True

    def _matmul(self, node: onnx.NodeProto) -> bool:
        weight, data = self._shape(node.input[1]), self._shapes.get(node.input[0])
        if weight is None or data is None or len(data) != 2 or len(weight) != 2 or node.input[0] not in self.axes:
            return False
        if not self._is_plain(node) or not self.fresh(node.output[0]):
            return False
        self.ties += [Tie(node.output[0], 1, 0, node.input[0]), Tie(node.output[0], 1, 1, node.output[0])]
        return True

    def _flatten(self, node: onnx.NodeProto) -> bool:
        """Flatten, or a Reshape that is one: (N, C, pixels...) -> (N, C x pixels)."""
        data, result = self._shapes.get(node.input[0]), self._shapes.get(node.output[0])
        axis = self.axes.get(node.input[0])
        if data is None or result is None or axis is None or axis.repeat != 1 or len(result) != 2:
            return False
        pixels = int(np.prod(data[2:]))
        if result != (data[0], data[1] * pixels) or (node.op_type == "Flatten" and integer(node, "axis", 1) != 1):
            return False
        self.axes[node.output[0]] = Axis(axis.atoms, pixels)
        return True

    def _squeeze(self, node: onnx.NodeProto) -> bool:
        """Squeeze and Unsqueeze of pixel axes: channels stay axis 1."""
        data, result = self._shapes.get(node.input[0]), self._shapes.get(node.output[0])
        if data is None or result is None or min(len(data), len(result)) < 2 or data[:2] != result[:2]:
            return False
        squeezed = axes(node, self._constants)
        if squeezed is None or any(axis % max(len(data), len(result)) < 2 for axis in squeezed):
            return False
        return self._axis_repeat(node.input[0]) == 1 and self._same(node.input[0], node.output[0])

    def _reduce(self, node: onnx.NodeProto) -> bool:
        data = self._shapes.get(node.input[0])
        reduced = axes(node, self._constants)
        if data is None or reduced is None or any(axis % len(data) < 2 for axis in reduced):
            return False
        return self._axis_repeat(node.input[0]) == 1 and self._same(node.input[0], node.output[0])

    def _concat(self, node: onnx.NodeProto) -> bool:
        shape = self._shapes.get(node.output[0])
        if shape is None or len(shape) < 2:
            return False
        axis = integer(node, "axis", 1) % len(shape)
        parts = [self.axes.get(name) for name in node.input]
        if any(part is None or part.repeat != 1 for part in parts) or axis == 0:
            return False
        if axis == 1:
            joined = tuple(atom for part in parts if part is not None for atom in part.atoms)
            if self.atoms.length(joined) != shape[1]:
                return False
            self.axes[node.output[0]] = Axis(joined)
            return True
        for name in node.input[1:]:
            if self._shapes[name][1] != self._shapes[node.input[0]][1]:
                return False
            self.atoms.unify(self.axes[node.input[0]].atoms, self.axes[name].atoms)
        return self._same(node.input[0], node.output[0])

    def _split(self, node: onnx.NodeProto) -> bool:
        source, data = self.axes.get(node.input[0]), self._shapes.get(node.input[0])
        if source is None or data is None or source.repeat != 1 or any(name not in self._shapes for name in node.output):
            return False
        axis = integer(node, "axis", 0) % len(data)
        if axis != 1:
            return axis > 1 and all(self._same(node.input[0], name) for name in node.output)
        rest = source.atoms
        for name in node.output:
            part, rest = self.atoms.cut(rest, self._shapes[name][1])
            self.axes[name] = Axis(part)
        return True

    def _slice(self, node: onnx.NodeProto) -> bool:
        source, data = self.axes.get(node.input[0]), self._shapes.get(node.input[0])
        ranges = slices(node, self._constants, len(data) if data else 0)
        if source is None or data is None or ranges is None or source.repeat != 1 or 0 in ranges:
            return False
        start, end, step = ranges.get(1, (0, data[1], 1))
        start, end, step = slice(start, end, step).indices(data[1])
        if step != 1 or self._shapes.get(node.output[0], (0, -1))[1] != end - start:
            return False
        _, rest = self.atoms.cut(source.atoms, start)
        part, _ = self.atoms.cut(rest, end - start)
        self.axes[node.output[0]] = Axis(part)
        return True

    def _pad(self, node: onnx.NodeProto) -> bool:
        """Pixels may be padded in any way; channels only with a constant, which is the same in any order."""
        source, data = self.axes.get(node.input[0]), self._shapes.get(node.input[0])
        padded = pads(node, self._constants)
        if source is None or data is None or padded is None or source.repeat != 1 or len(padded) != 2 * len(data):
            return False
        before, after = padded[1], padded[1 + len(data)]
        mode = next((attribute.s for attribute in node.attribute if attribute.name == "mode"), b"constant")
        if padded[0] or padded[len(data)] or before < 0 or after < 0 or ((before or after) and mode != b"constant"):
            return False
        if self._channels(node.output[0]) != before + data[1] + after:
            return False
        if not before and not after:
            return self._same(node.input[0], node.output[0])
        # A shortcut that widens a residual stream: one Gather here sets all of the wider stream free.
        self.junctions.append(Junction(node.output[0], node.input[0], before, after))
        return self.fresh(node.output[0])


def consumers(model: onnx.ModelProto) -> dict[str, list[onnx.NodeProto]]:
    """Return the nodes that read each tensor."""
    result: dict[str, list[onnx.NodeProto]] = defaultdict(list)
    for node in model.graph.node:
        for name in dict.fromkeys(node.input):
            result[name].append(node)
    return result
