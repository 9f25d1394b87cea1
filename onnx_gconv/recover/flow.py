"""How values flow through a graph, and the pieces of it that compute some tensors from others."""

import functools
import operator
from collections.abc import Collection, Iterator, Mapping

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from onnx_gconv.model.constants import inner_graphs, outer_reads
from onnx_gconv.model.shapes import free_inputs

Values = Mapping[str, NDArray[np.generic]]


class Flow:
    """The main graph of a model as producers and readers; nodes are known by their place in the graph."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._model = model
        self.nodes: list[onnx.NodeProto] = list(model.graph.node)
        self.inputs = [value.name for value in free_inputs(model)]
        self.outputs = [value.name for value in model.graph.output]
        self._tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self.producer = {name: place for place, node in enumerate(self.nodes) for name in node.output if name}
        self.readers: dict[str, list[int]] = {}
        self._moving: set[str] = set(self.inputs)  # tensors that depend on the inputs
        for place, node in enumerate(self.nodes):
            for name in set(node_reads(node)):
                self.readers.setdefault(name, []).append(place)
            if any(name in self._moving for name in node_reads(node)):
                self._moving.update(name for name in node.output if name)

    def is_moving(self, name: str) -> bool:
        """Return whether the tensor depends on the model's inputs."""
        return name in self._moving

    def places_before(self, wanted: Collection[str], known: Collection[str]) -> list[int]:
        """Return which nodes have to run to get from the known tensors to the wanted ones, in graph order."""
        found: set[int] = set()
        stack = [name for name in wanted if name not in known]
        while stack:
            place = self.producer.get(stack.pop())
            if place is not None and place not in found:
                found.add(place)
                stack.extend(name for name in node_reads(self.nodes[place]) if name not in known)
        return sorted(found)

    def counts_after(self, marked: Collection[str]) -> dict[str, int]:
        """Return, for each tensor, how many of the marked ones are computed from it, itself not counted."""
        bits = {name: 1 << number for number, name in enumerate(marked)}
        after: dict[str, int] = {}  # as sets of bits, for branches meet again
        for place in reversed(range(len(self.nodes))):
            outputs = self.nodes[place].output
            found = functools.reduce(operator.or_, (after.get(name, 0) | bits.get(name, 0) for name in outputs), 0)
            for name in node_reads(self.nodes[place]):
                after[name] = after.get(name, 0) | found
        return {name: found.bit_count() for name, found in after.items()}

    def piece(self, places: Collection[int], given: Values, wanted: Collection[str], constants: Values) -> onnx.ModelProto:
        """Return these nodes as a model from the given tensors to the wanted ones.

        `given` holds an example of each input, for its type and rank; `constants` stand in for what the model stores
        under their names.
        """
        nodes = [self.nodes[place] for place in sorted(places)]
        nodes = [node for node in nodes if not any(name in constants or name in given for name in node.output)]
        made = {name for node in nodes for name in node.output}
        reads = sorted({name for node in nodes for name in node_reads(node) if name and name not in made})
        graph = onnx.helper.make_graph(
            nodes,
            "piece",
            [_declare(name, given[name]) for name in reads if name in given],
            [onnx.helper.make_empty_tensor_value_info(name) for name in wanted],
            [
                numpy_helper.from_array(np.asarray(constants[name]), name) if name in constants else self._tensors[name]
                for name in reads
                if name not in given and (name in constants or name in self._tensors)
            ],
        )
        model: onnx.ModelProto = onnx.helper.make_model(
            graph,
            opset_imports=self._model.opset_import,
            ir_version=max(self._model.ir_version, 4),  # below, weights would have to be inputs
            functions=self._model.functions,
        )
        return model


def node_reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the tensors that a node reads, from inside its inner graphs too."""
    yield from (name for name in node.input if name)
    for inner in inner_graphs(node):
        yield from outer_reads(inner)


def _declare(name: str, example: NDArray[np.generic]) -> onnx.ValueInfoProto:
    """Declare a tensor like the example: its type and rank, and the channels of an image, which never change."""
    element = onnx.helper.np_dtype_to_tensor_dtype(example.dtype)
    axes = [example.shape[1] if axis == 1 and example.ndim > 2 else f"{name}:{axis}" for axis in range(example.ndim)]
    return onnx.helper.make_tensor_value_info(name, element, axes)
