"""Channel spaces that can be narrowed, and residual branches that can be dropped.

A space is one atom of the channel axes: every tensor that has its channels loses the same ones. What sums over channels, a
Conv say, reads it; what makes new channels writes it; everything between them handles each channel by itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.model.attributes import integer
from onnx_gconv.model.constants import STANDARD_DOMAINS, Constants, inner_graphs, outer_reads
from onnx_gconv.model.shapes import Shape
from onnx_gconv.model.spaces import Spaces, Tie, consumers
from onnx_gconv.model.transposed import CONVOLVING

Channels = NDArray[np.int64]
WRITING = frozenset({"Conv", "ConvTranspose", "Gemm", "MatMul"})


@dataclass(frozen=True)
class Space:
    """Channels that can become fewer, named by the first tensor that has them."""

    name: str
    label: str  # of the node that writes that tensor
    channels: int
    atom: int
    writers: tuple[str, ...]  # the nodes that make these channels, by first output
    readers: tuple[str, ...]  # the nodes that sum over them
    passing: tuple[str, ...] = ()  # the depthwise Convs between them
    is_alone: bool = True  # whether no tensor has other channels beside these


@dataclass(frozen=True)
class Branch:
    """A residual branch, named by its last Conv: without it, its Add has only a constant to add to the shortcut."""

    name: str
    label: str
    end: str  # what the Add reads: the Conv's result, or that of the normalization behind it
    add: str  # what the Add gives
    shortcut: str
    nodes: frozenset[str]  # the nodes that nobody else needs, by first output
    spaces: tuple[str, ...]  # the spaces inside


@dataclass(frozen=True)
class Widths:
    """What of a model can be narrowed or dropped."""

    spaces: tuple[Space, ...]
    branches: tuple[Branch, ...]
    refused: Mapping[int, str]  # the other atoms, and why they cannot be narrowed


def find_widths(model: onnx.ModelProto, constants: Constants, spaces: Spaces, shapes: Mapping[str, Shape]) -> Widths:
    """Return the spaces that can be narrowed and the branches that can be dropped, in graph order."""
    nodes = {node.output[0]: node for node in model.graph.node if node.output}
    named: dict[int, str] = {}
    for node in model.graph.node:
        for tensor in node.output:
            axis = spaces.axes.get(tensor)
            if axis is not None and axis.repeat == 1 and len(axis.atoms) == 1:
                named.setdefault(axis.atoms[0], tensor)
    readers: dict[int, list[str]] = {}
    writers: dict[int, list[str]] = {}
    for tie in spaces.ties:
        if nodes[tie.node].op_type in WRITING and tie.slot == 1:
            found = readers if is_read(tie) else writers
            for atom in spaces.axes[tie.tensor].atoms:
                if tie.node not in found.setdefault(atom, []):
                    found[atom].append(tie.node)
    joined = {atom for axis in spaces.axes.values() if len(axis.atoms) > 1 for atom in axis.atoms}
    passing = _depthwise(spaces, nodes)
    candidates = [
        Space(
            name=name,
            label=_label(nodes, name),
            channels=spaces.sizes[atom],
            atom=atom,
            writers=tuple(output for output in writers.get(atom, ()) if output not in passing),
            readers=tuple(readers.get(atom, ())),
            passing=tuple(output for output in writers.get(atom, ()) if output in passing),
            is_alone=atom not in joined,
        )
        for atom, name in named.items()
    ]
    refused = {space.atom: reason for space in candidates if (reason := _why_not(space, spaces))}
    found_spaces = tuple(space for space in candidates if space.atom not in refused)
    return Widths(found_spaces, tuple(_branches(model, constants, spaces, found_spaces, shapes)), refused)


def _why_not(space: Space, spaces: Spaces) -> str:
    """Return why a space cannot be narrowed, "" if it can."""
    if space.atom in spaces.pinned:
        return "a graph input or output has these channels, or an op that is not channel-wise"
    if space.atom in spaces.sized:
        return spaces.sized[space.atom]
    if not space.readers:
        return "nothing sums over them"
    if not space.writers:
        return "nothing makes them"
    if set(space.readers) & set(space.writers):
        return "a Conv leads from these channels into themselves"
    return ""


def is_read(tie: Tie) -> bool:
    """Return whether a constant follows the channels that its node reads, and not those that it gives."""
    return tie.tensor != tie.node


def input_dim(node: onnx.NodeProto) -> int:
    """Return the axis of a node's weight that its inputs lie on."""
    if node.op_type == "Gemm":
        return 1 if integer(node, "transB", 0) else 0
    return 1 if node.op_type == "Conv" else 0


def kept_places(spaces: Spaces, tensor: str, keeps: Mapping[int, Sequence[int] | Channels]) -> Channels:
    """Return which places of a tensor's channel axis are left, when these atoms keep only some of their channels."""
    axis = spaces.axes[tensor]
    parts, start = [], 0
    for atom in axis.atoms:
        size = spaces.sizes[atom]
        parts.append(start + np.asarray(keeps.get(atom, np.arange(size)), dtype=np.int64))
        start += size
    return np.concatenate(parts) if parts else np.arange(0)


def _label(nodes: Mapping[str, onnx.NodeProto], tensor: str) -> str:
    return (nodes[tensor].name or tensor) if tensor in nodes else tensor


def _depthwise(spaces: Spaces, nodes: Mapping[str, onnx.NodeProto]) -> set[str]:
    """Return the Convs that only pass channels on, each by itself: their weight follows nothing that they read."""
    weighted = {tie.node for tie in spaces.ties if tie.slot == 1 and nodes[tie.node].op_type in WRITING}
    return weighted - {tie.node for tie in spaces.ties if is_read(tie)}


def _branches(
    model: onnx.ModelProto, constants: Constants, spaces: Spaces, found: Sequence[Space], shapes: Mapping[str, Shape]
) -> list[Branch]:
    nodes = {name: node for node in model.graph.node for name in node.output if name}
    readers = consumers(model)
    outputs = {value.name for value in model.graph.output}
    outputs |= {name for node in model.graph.node for graph in inner_graphs(node) for name in outer_reads(graph)}
    result = []
    for node in model.graph.node:
        if node.op_type != "Add" or node.domain not in STANDARD_DOMAINS or len(set(node.input)) != 2:
            continue
        ends = [name for name in node.input if _is_end(name, nodes, constants, readers, outputs)]
        for end in ends:
            (shortcut,) = (name for name in node.input if name != end)
            if constants.is_constant(shortcut) or shortcut not in shapes or shapes[shortcut] != shapes.get(node.output[0]):
                continue
            last = _last_conv(end, nodes)
            inside = _exclusive(end, nodes, readers, outputs, constants)
            convs = [name for name in inside if nodes[name].op_type in WRITING and name != last]
            spaces_inside = [space for space in found if {*space.writers, *space.readers} <= inside]
            # Every Conv in it must shrink to nothing with it, so that its MACs are those of no channels.
            covered = {name for space in spaces_inside for name in (*space.writers, *space.readers)}
            if convs and {*convs, last} <= covered | _passing(inside, spaces, nodes, spaces_inside):
                names = tuple(space.name for space in spaces_inside)
                result.append(Branch(last, _label(nodes, last), end, node.output[0], shortcut, frozenset(inside), names))
    return result


def _passing(inside: set[str], spaces: Spaces, nodes: Mapping[str, onnx.NodeProto], found: Sequence[Space]) -> set[str]:
    """Return the depthwise Convs inside that work on these spaces."""
    atoms = {space.atom for space in found}
    convs = [name for name in inside if nodes[name].op_type in CONVOLVING and name in spaces.axes]
    return {name for name in convs if set(spaces.axes[name].atoms) <= atoms}


def _is_end(
    name: str,
    nodes: Mapping[str, onnx.NodeProto],
    constants: Constants,
    readers: Mapping[str, list[onnx.NodeProto]],
    outputs: set[str],
) -> bool:
    """Return whether only the Add reads a tensor that a Conv makes, or the BatchNormalization that alone reads a Conv."""
    node = nodes.get(name)
    if node is None or name in outputs or len(readers[name]) != 1 or node.domain not in STANDARD_DOMAINS:
        return False
    if node.op_type == "BatchNormalization":
        plain = not any(node.output[1:]) and not integer(node, "training_mode", 0)
        plain = plain and all(constants.is_constant(constant) for constant in node.input[1:5])
        source = node.input[0]
        return plain and source in nodes and nodes[source].op_type == "Conv" and _is_end(source, nodes, constants, readers, outputs)
    return node.op_type == "Conv"


def _last_conv(end: str, nodes: Mapping[str, onnx.NodeProto]) -> str:
    return end if nodes[end].op_type == "Conv" else str(nodes[end].input[0])


def _exclusive(
    end: str,
    nodes: Mapping[str, onnx.NodeProto],
    readers: Mapping[str, list[onnx.NodeProto]],
    outputs: set[str],
    constants: Constants,
) -> set[str]:
    """Return the nodes that only this tensor needs, itself among them, by first output."""
    inside = {end}
    # Backwards: a node whose every result goes into the branch alone belongs to it.
    stack = list(nodes[end].input)
    while stack:
        name = stack.pop()
        node = nodes.get(name)
        if node is None or node.output[0] in inside or constants.is_constant(name):
            continue
        results = [output for output in node.output if output]
        if any(output in outputs for output in results):
            continue
        if all(reader.output[0] in inside for output in results for reader in readers.get(output, [])):
            inside.add(node.output[0])
            stack.extend(node.input)
    return inside
