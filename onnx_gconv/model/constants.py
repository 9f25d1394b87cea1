"""What of a graph is constant, and its value: initializers, Constant nodes, Identity, and what folds."""

from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from onnx_gconv.errors import ModelError

QUANTISING = frozenset({"DequantizeLinear", "QuantizeLinear"})
RANDOM = frozenset({"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"})
STANDARD_DOMAINS = ("", "ai.onnx")


def inner_graphs(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the bodies of an If, Loop or Scan."""
    for attribute in node.attribute:
        if attribute.HasField("g"):
            yield attribute.g
        yield from attribute.graphs


def outer_reads(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield every tensor name that an inner graph reads, its own ones included."""
    for node in graph.node:
        yield from node.input
        for inner in inner_graphs(node):
            yield from outer_reads(inner)
    yield from (value.name for value in graph.output)


class Constants:
    """The constant tensors of a model's main graph, by name.

    An initializer that is also a graph input counts as constant: that is how exporters before IR 4 wrote weights.
    """

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self._tensors: dict[str, onnx.TensorProto] = {tensor.name: tensor for tensor in model.graph.initializer}
        self._producers: dict[str, onnx.NodeProto] = {name: node for node in model.graph.node for name in node.output if name}
        for tensor in self._tensors:
            self._producers.pop(tensor, None)
        self._constant: dict[str, bool] = {}
        # Nodes are in topological order, so one pass settles every tensor.
        for node in model.graph.node:
            settled = _foldable(node) and all(self.is_constant(name) for name in node.input if name)
            self._constant.update((name, settled) for name in node.output if name)

    def is_constant(self, name: str) -> bool:
        """Return whether the tensor depends on constants only."""
        return name in self._tensors or self._constant.get(name, False)

    def origin(self, name: str) -> str:
        """Return the name of the tensor that holds the value, past Identity nodes: shared weights have one origin."""
        node = self._producers.get(name)
        while node is not None and node.op_type == "Identity":
            name = node.input[0]
            node = self._producers.get(name)
        return name

    def is_stored(self, name: str) -> bool:
        """Return whether the tensor's own value is in the file: an initializer or a Constant node."""
        return self._stored(name) is not None

    def readers(self, origin: str) -> set[tuple[str, int]]:
        """Return who reads the tensor, itself or past Identity: (node's first output, input slot), ("", -1) for others.

        Others are graph outputs and inner graphs.
        """
        return self._readers.get(origin, set())

    @cached_property
    def _readers(self) -> dict[str, set[tuple[str, int]]]:
        found: dict[str, set[tuple[str, int]]] = defaultdict(set)
        for node in self._model.graph.node:
            if node.op_type != "Identity":
                for slot, name in enumerate(node.input):
                    found[self.origin(name)].add((node.output[0], slot))
            for inner in inner_graphs(node):
                for name in outer_reads(inner):
                    found[self.origin(name)].add(("", -1))
        for value in self._model.graph.output:
            found[self.origin(value.name)].add(("", -1))
        return found

    def stored_in(self, name: str) -> set[str]:
        """Return the stored tensors that a constant is made of: itself, if it is one."""
        name = self.origin(name)
        if self.is_stored(name):
            return {name}
        return {tensor for node in self._upstream(name) for tensor in (*node.input, *node.output) if self.is_stored(tensor)}

    def quantised(self, name: str) -> bool:
        """Return whether the tensor comes out of a QuantizeLinear or DequantizeLinear."""
        return any(node.op_type in QUANTISING for node in self._upstream(name))

    def value(self, name: str) -> NDArray[np.generic]:
        """Return the tensor's value; fold it with ONNX's reference evaluator if a computation makes it."""
        tensor = self._stored(self.origin(name))
        if tensor is not None:
            return numpy_helper.to_array(tensor)
        return self._fold(name)

    def _stored(self, name: str) -> onnx.TensorProto | None:
        if name in self._tensors:
            return self._tensors[name]
        node = self._producers.get(name)
        if node is not None and node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    tensor: onnx.TensorProto = attribute.t
                    return tensor
        return None

    def _upstream(self, name: str) -> Iterator[onnx.NodeProto]:
        """Yield the nodes that `name` is computed from, consumers before producers."""
        seen: set[str] = set()
        stack = [name]
        while stack:
            node = self._producers.get(stack.pop())
            if node is not None and node.output[0] not in seen:
                seen.add(node.output[0])
                yield node
                stack.extend(name for name in node.input if name)

    def _fold(self, name: str) -> NDArray[np.generic]:
        wanted = {node.output[0] for node in self._upstream(name)}
        nodes = [node for node in self._model.graph.node if node.output and node.output[0] in wanted]
        inputs = {tensor for node in nodes for tensor in node.input}
        graph = onnx.helper.make_graph(
            nodes,
            "fold",
            [],
            [onnx.helper.make_empty_tensor_value_info(name)],
            [self._tensors[tensor] for tensor in sorted(inputs & self._tensors.keys())],
        )
        piece = onnx.helper.make_model(graph, opset_imports=self._model.opset_import, ir_version=self._model.ir_version)
        try:
            return np.asarray(next(iter(ReferenceEvaluator(piece).run([name], {}))))
        except Exception as error:  # the evaluator raises whatever NumPy or its op raised
            why = " ".join(str(error).split())[:200]  # some tell the whole graph
            raise ModelError(f"the constant {name!r} cannot be folded: {why}.", hint="simplify the model first") from error


def _foldable(node: onnx.NodeProto) -> bool:
    return (
        node.domain in STANDARD_DOMAINS
        and node.op_type not in RANDOM
        and not any(attribute.HasField("g") for attribute in node.attribute)
    )
