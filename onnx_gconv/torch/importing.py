"""An ONNX model taken apart: what PyTorch runs, what is learned, what is constant."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from torch import Tensor

from onnx_gconv.errors import ModelError
from onnx_gconv.model.constants import Constants, inner_graphs
from onnx_gconv.model.count import LEARNED_INPUTS, MULTIPLYING
from onnx_gconv.model.shapes import free_inputs
from onnx_gconv.torch import ops  # noqa: F401  (fills the table)
from onnx_gconv.torch.module import Body, OnnxModule, Program, Tensors, Values, explained, reads, run_node
from onnx_gconv.torch.node import DTYPES, TABLE, Node, read_node, read_opsets

FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.DOUBLE)
STATISTICS = (3, 4)  # the slots of a BatchNormalization's mean and variance
# A learned tensor may lie behind these: they change its form, not its numbers.
FORMING = frozenset({"Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


@dataclass(frozen=True)
class Trained:
    """The stored tensors that a training changes."""

    learned: frozenset[str]  # by gradients
    statistics: frozenset[str]  # by following the batches

    @property
    def all(self) -> frozenset[str]:
        return self.learned | self.statistics


def build(model: onnx.ModelProto, trained: Trained | None = None) -> OnnxModule:
    """Return the module of a model, not yet compared with anything; `trained` is found in the graph if it is not given."""
    stored = stored_tensors(model)
    trained = trained or find_trained(model)
    learned, statistics = trained.learned, trained.statistics
    graph = _Graph(read_opsets(model))
    graph.learned = {name: to_torch(stored[name]) for name in stored if name in learned}
    graph.statistics = {name: to_torch(stored[name]) for name in stored if name in statistics}
    for name, tensor in stored.items():
        if name not in learned and name not in statistics and tensor.data_type in DTYPES:
            graph.fixed[name] = to_torch(tensor)
    inputs = {
        value.name: DTYPES[value.type.tensor_type.elem_type]
        for value in free_inputs(model)
        if value.type.tensor_type.elem_type in DTYPES
    }
    graph.known = {*graph.learned, *graph.statistics, *inputs}
    for proto in model.graph.node:
        if not (proto.op_type == "Constant" and proto.output[0] in stored):
            graph.add(proto)
    outputs = graph.outputs([value.name for value in model.graph.output])
    _require_weights(model, graph)
    nodes = _alive(graph.nodes, outputs)
    makers = {name: node.op for node in nodes for name in node.outputs}
    program = Program(tuple(nodes), inputs, tuple(outputs), {name: makers.get(name, "") for name in outputs})
    return OnnxModule(program, _tensors(graph, program))


def stored_tensors(model: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """Return the tensors whose data is in the file: initializers, and values of Constant nodes."""
    stored = {tensor.name: tensor for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == "Constant":
            stored.update((node.output[0], attribute.t) for attribute in node.attribute if attribute.name == "value")
    return stored


def to_torch(tensor: onnx.TensorProto) -> Tensor:
    """Return a tensor's value in the type that it is computed in."""
    array = numpy_helper.to_array(tensor)
    if array.dtype.name in ("float16", "bfloat16"):
        array = array.astype(np.float32)
    elif array.dtype.name in ("uint16", "uint32"):
        array = array.astype(np.int64)
    return torch.from_numpy(np.array(array)).to(DTYPES[tensor.data_type])


def find_trained(model: onnx.ModelProto) -> Trained:
    """Return the names of what gradients train, and of what follows the batches.

    Learned are the tensors that count as parameters, and what is added to a product: a bias in all but name. Other
    constants are part of the function, like the 6 of a Relu6; training must not touch them.
    """
    origins = {name: name for name, tensor in stored_tensors(model).items() if tensor.data_type in FLOATS}
    makers = {name: node.op_type for node in model.graph.node for name in node.output}
    constants = Constants(model)
    learned: set[str] = set()
    statistics: set[str] = set()
    for node in model.graph.node:
        if node.op_type in FORMING and node.input[0] in origins and all(map(constants.is_constant, filter(None, node.input))):
            origins[node.output[0]] = origins[node.input[0]]
        slots = LEARNED_INPUTS.get(node.op_type, ())
        if node.op_type == "Add" and any(makers.get(name) in MULTIPLYING for name in node.input):
            slots = (0, 1)
        learned |= {origins[node.input[slot]] for slot in slots if slot < len(node.input) and node.input[slot] in origins}
        if node.op_type == "BatchNormalization":
            statistics |= {origins[node.input[slot]] for slot in STATISTICS if node.input[slot] in origins}
    return Trained(frozenset(learned - statistics), frozenset(statistics))


@dataclass
class _Graph:
    """A graph on its way in: constants are folded as they come, what PyTorch cannot do is set aside."""

    opsets: Mapping[str, int]
    learned: Values = field(default_factory=dict)
    statistics: Values = field(default_factory=dict)
    fixed: Values = field(default_factory=dict)
    known: set[str] = field(default_factory=set)  # tensors that will be there at run time
    nodes: list[Node] = field(default_factory=list)
    unknown: list[Node] = field(default_factory=list)  # cannot run, or read what is not there

    def add(self, proto: onnx.NodeProto) -> None:
        node = _with_bodies(read_node(proto, self.opsets), proto, self.opsets)
        inputs = [name for name in reads(node) if name]
        value = _constant(node)
        if value is not None:
            self.fixed[node.outputs[0]] = value
        elif not _is_known(node) or not all(name in self.known or name in self.fixed for name in inputs):
            self.unknown.append(node)
        elif node.inputs and all(name in self.fixed for name in inputs):
            with explained():
                run_node(node, self.fixed)
        else:
            self.nodes.append(node)
            self.known |= {name for name in node.outputs if name}

    def outputs(self, names: list[str]) -> list[str]:
        """Return the graph's outputs; for one that PyTorch cannot make, the last tensors before it instead."""
        if all(name in self.known or name in self.fixed for name in names):
            return names
        made = {name for node in self.nodes for name in node.outputs}
        last = [name for node in self.unknown for name in node.inputs if name in made]
        return list(dict.fromkeys([*(name for name in names if name in self.known), *last]))


def _is_known(node: Node) -> bool:
    bodies = [value for value in node.attributes.values() if isinstance(value, Body)]
    if node.op == "If":
        return len(bodies) == 2 and all(_is_known(inner) for body in bodies for inner in body.nodes)
    return node.op in TABLE


def _with_bodies(node: Node, proto: onnx.NodeProto, opsets: Mapping[str, int]) -> Node:
    """Return an If with its branches read; other nodes as they are."""
    if node.op != "If" or len(list(inner_graphs(proto))) != 2:
        return node
    attributes = {attribute.name: _body(attribute.g, opsets) for attribute in proto.attribute}
    return replace(node, attributes=attributes)


def _body(graph: onnx.GraphProto, opsets: Mapping[str, int]) -> Body:
    constants = {tensor.name: to_torch(tensor) for tensor in graph.initializer if tensor.data_type in DTYPES}
    nodes = []
    for proto in graph.node:
        node = _with_bodies(read_node(proto, opsets), proto, opsets)
        value = _constant(node)
        if value is not None:
            constants[node.outputs[0]] = value
        else:
            nodes.append(node)
    return Body(tuple(nodes), constants, tuple(value.name for value in graph.output))


def _constant(node: Node) -> Tensor | None:
    """Return the value of a Constant node, which has one of several attributes; None for text, and for other nodes."""
    if node.op != "Constant":
        return None
    for name, dtype in (("float", torch.float32), ("floats", torch.float32), ("int", torch.int64), ("ints", torch.int64)):
        if f"value_{name}" in node.attributes:
            return torch.tensor(node.attributes[f"value_{name}"], dtype=dtype)
    value = node.get("value", None)
    return to_torch(value) if value is not None and value.data_type in DTYPES else None


def _require_weights(model: onnx.ModelProto, graph: _Graph) -> None:
    """Refuse a model with weights where PyTorch cannot run it: they could not be trained."""
    lost = {node.outputs[0] for node in graph.unknown if node.op in MULTIPLYING}
    if graph.unknown and (lost or not graph.nodes):
        kinds = Counter(node.op for node in graph.unknown if not _is_known(node))
        listed = ", ".join(f"{kind} ({number} of them)" if number > 1 else kind for kind, number in kinds.items())
        raise ModelError(
            f"the model cannot be trained in PyTorch: the importer does not know {listed or 'the type of an input'}.",
            hint="tune the output of `mask` in the framework that the model came from; `apply` takes the result",
        )


def _alive(nodes: Iterable[Node], outputs: Iterable[str]) -> list[Node]:
    """Return the nodes that the outputs need."""
    needed = set(outputs)
    kept = []
    for node in reversed(list(nodes)):
        if needed & set(node.outputs):
            kept.append(node)
            needed |= set(reads(node))
    return kept[::-1]


def _tensors(graph: _Graph, program: Program) -> Tensors:
    """Return the constants that the program reads; those that it only reads as numbers apart."""
    read = {name for node in program.nodes for name in reads(node)} | set(program.outputs)
    data = {
        name
        for node in program.nodes
        for slot, name in enumerate(reads(node))
        if node.op not in TABLE or slot not in TABLE[node.op].numbers
    } | set(program.outputs)
    fixed = {name: value for name, value in graph.fixed.items() if name in read}
    # Whole numbers are mostly shapes and axes; the few that index data are moved when they are used.
    is_number = {name: name not in data or not value.is_floating_point() for name, value in fixed.items()}
    return Tensors(
        {name: value for name, value in graph.learned.items() if name in read},
        {name: value for name, value in graph.statistics.items() if name in read},
        {name: value for name, value in fixed.items() if not is_number[name]},
        {name: value for name, value in fixed.items() if is_number[name]},
    )
