"""The bodies of If, Loop and Scan nodes, each as a model of its own, so that what is done to a main graph can be done to them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import onnx

from onnx_gconv.model.constants import Constants, inner_graphs, stored
from onnx_gconv.model.listed import FREE_INITIALIZERS_IR
from onnx_gconv.model.transposed import CONVOLVING

STEERED = ("If", "Loop", "Scan")
Place = tuple[int, ...]  # the numbers of node and inner graph, from the main graph inwards


@dataclass(frozen=True, eq=False)
class Body:
    """One inner graph, at any depth; `graph` is the one in `whole`, not a copy."""

    whole: onnx.ModelProto
    node: onnx.NodeProto
    graph: onnx.GraphProto
    enclosing: tuple[onnx.GraphProto, ...]  # from the main graph inwards
    place: Place

    @property
    def where(self) -> str:
        return f"the {self.node.op_type} node {self.node.name or self.node.output[0]!r}"

    @cached_property
    def model(self) -> onnx.ModelProto:
        """The body as a model. Every name of the rest of the whole is an input: it may be read here, and must not be taken."""
        result = onnx.ModelProto(ir_version=self.whole.ir_version)
        result.opset_import.extend(self.whole.opset_import)
        result.graph.CopyFrom(self.graph)
        others = dict.fromkeys(name for name in names(self.whole.graph) if name and name not in self.own)
        result.graph.input.extend(onnx.ValueInfoProto(name=name) for name in others)
        return result

    @cached_property
    def own(self) -> set[str]:
        """Every name in the body, and in bodies inside it."""
        return set(names(self.graph))

    @cached_property
    def constants(self) -> Constants:
        return Constants(self.model)

    def replace(self, edited: onnx.ModelProto) -> None:
        """Put what was made of `model` in the body's place, for good."""
        for field in ("node", "initializer", "value_info"):
            self.graph.ClearField(field)
            getattr(self.graph, field).extend(getattr(edited.graph, field))


def bodies(model: onnx.ModelProto) -> list[Body]:
    """Return all bodies of a model, those inside others before these."""
    return list(_bodies(model, (model.graph,), ()))


def _bodies(model: onnx.ModelProto, enclosing: tuple[onnx.GraphProto, ...], place: Place) -> Iterator[Body]:
    for number, node in enumerate(enclosing[-1].node):
        for index, graph in enumerate(inner_graphs(node)):
            here = (*place, number, index)
            yield from _bodies(model, (*enclosing, graph), here)
            yield Body(model, node, graph, enclosing, here)


def names(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield every tensor and node name, those of inner graphs too."""
    for tensor in graph.initializer:
        yield tensor.name
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.name
    for node in graph.node:
        yield node.name
        yield from node.output
        for inner in inner_graphs(node):
            yield from names(inner)


def times_made(graph: onnx.GraphProto) -> Counter[str]:
    """Return how many tensors go by each name, in this graph and inside it."""
    inputs = {value.name for value in graph.input}
    made = Counter([*inputs, *(tensor.name for tensor in graph.initializer if tensor.name not in inputs)])
    for node in graph.node:
        made.update(node.output)
        for inner in inner_graphs(node):
            made.update(times_made(inner))
    return made


def with_own_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with every weight and bias that the Convs of one body alone read in that body; itself if they are.

    Only then can they be changed with the Conv, by whoever sees the body alone.
    """
    moves = _moves(model)
    if not moves:
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for body in bodies(result):
        for name in moves.get(body.place, ()):
            body.graph.initializer.append(_taken_out(body, name))
    return result


def _moves(model: onnx.ModelProto) -> dict[Place, list[str]]:
    """Return the tensors to bring into each body."""
    inner = bodies(model)
    if not inner or model.ir_version < FREE_INITIALIZERS_IR:  # where every initializer must be an input, a body has none
        return {}
    made, readers = times_made(model.graph), Counter(_reads(model.graph))
    moves: dict[Place, list[str]] = {}
    for body in inner:
        own = times_made(body.graph)
        read = Counter(name for node in body.graph.node if node.op_type in CONVOLVING for name in node.input[1:] if name)
        moves[body.place] = [
            name
            for name, times in read.items()
            if name not in own and made[name] == 1 and readers[name] == times and _holder(body, name) is not None
        ]
    return {place: found for place, found in moves.items() if found}


def _reads(graph: onnx.GraphProto) -> Iterator[str]:
    yield from (value.name for value in graph.output)
    for node in graph.node:
        yield from node.input
        for inner in inner_graphs(node):
            yield from _reads(inner)


def _holder(body: Body, name: str) -> onnx.GraphProto | None:
    """Return the graph around the body that stores a tensor and does not let a caller feed another."""
    for graph in body.enclosing:
        if name not in {value.name for value in graph.input} and name in stored(graph):
            return graph
    return None


def _taken_out(body: Body, name: str) -> onnx.TensorProto:
    """Return a tensor, under its name, that is in the graph around the body no more."""
    graph = _holder(body, name)
    assert graph is not None
    tensor = onnx.TensorProto()
    tensor.CopyFrom(stored(graph)[name])
    tensor.name = name
    for field in ("node", "initializer"):
        for index, each in enumerate(getattr(graph, field)):
            if name in (each.output if field == "node" else [each.name]):
                del getattr(graph, field)[index]
                break
    return tensor
