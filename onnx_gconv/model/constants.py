"""What of a graph is constant, and its value: initializers, Constant nodes, Identity, and what folds."""

import math
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
# A computed constant may have so many numbers, and so many times those that the model stores.
FOLDED_FREELY = 2**27  # VGG's largest layer has 103 million: models with made-up weights are stored like that
FOLDED_TO_STORED = 4
SMALL_ELEMENTS = 1024  # what may be a shape, axes or repeats, on which a size depends
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


def stored(graph: onnx.GraphProto) -> dict[str, onnx.TensorProto]:
    """Return the tensors that a graph itself stores: initializers and Constant nodes."""
    found = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant":
            for attribute in node.attribute:
                if attribute.name == "value":
                    found[node.output[0]] = attribute.t
    return found


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
        return self._inside.get(name) if node is None else None

    @cached_property
    def _inside(self) -> dict[str, onnx.TensorProto]:
        """The tensors that bodies store: theirs is the value, wherever else the name is not known."""
        return {name: tensor for node in self._model.graph.node for graph in inner_graphs(node) for name, tensor in _deep(graph)}

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
        values: dict[str, NDArray[np.generic]] = {"": np.zeros(0)}
        try:
            for node in self._model.graph.node:
                if node.output[0] in wanted:
                    own = {
                        each: values[each] if each in values else numpy_helper.to_array(self._tensors[each]) for each in node.input
                    }
                    values |= self._computed(node, own)
            return values[name]
        except ModelError:
            raise
        except Exception as error:  # the evaluator raises whatever NumPy or its op raised
            why = " ".join(str(error).split())[:200]  # some tell the whole graph
            raise ModelError(f"the constant {name!r} cannot be folded: {why}.", hint="simplify the model first") from error

    def _computed(self, node: onnx.NodeProto, inputs: dict[str, NDArray[np.generic]]) -> dict[str, NDArray[np.generic]]:
        """Return the results of one node, after a look at how large they will be: a few bytes may claim gigabytes."""
        small = [numpy_helper.from_array(value, name) for name, value in inputs.items() if name and value.size <= SMALL_ELEMENTS]
        graph = onnx.helper.make_graph(
            [node],
            "fold",
            [
                onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
                for name, value in inputs.items()
                if name
            ],
            [onnx.helper.make_empty_tensor_value_info(name) for name in node.output if name],
            small,
        )
        piece = onnx.helper.make_model(graph, opset_imports=self._model.opset_import, ir_version=self._model.ir_version)
        inferred = onnx.shape_inference.infer_shapes(piece, data_prop=True)
        for value in inferred.graph.output:
            size = math.prod(dim.dim_value for dim in value.type.tensor_type.shape.dim)
            if size > self._most_folded:
                raise ModelError(
                    f"the constant {value.name!r} that the {node.op_type} node {node.name or node.output[0]!r} computes would have "
                    f"{size:,} numbers, far more than the file holds.",
                    hint="simplify the model first if it is meant so; else the file is damaged",
                )
        del graph.initializer[:]
        feeds = {each: value for each, value in inputs.items() if each}
        names = [each for each in node.output if each]
        return dict(zip(names, map(np.asarray, ReferenceEvaluator(piece).run(names, feeds)), strict=True))

    @cached_property
    def _most_folded(self) -> int:
        """How many numbers a computed constant may have."""
        stored: int = sum(math.prod(tensor.dims) for tensor in self._tensors.values())
        return FOLDED_FREELY + FOLDED_TO_STORED * stored


def _deep(graph: onnx.GraphProto) -> Iterator[tuple[str, onnx.TensorProto]]:
    """Yield what a graph stores, and what graphs inside it do."""
    yield from stored(graph).items()
    for node in graph.node:
        for inner in inner_graphs(node):
            yield from _deep(inner)


def _foldable(node: onnx.NodeProto) -> bool:
    return (
        node.domain in STANDARD_DOMAINS
        and node.op_type not in RANDOM
        and not any(attribute.HasField("g") for attribute in node.attribute)
    )
