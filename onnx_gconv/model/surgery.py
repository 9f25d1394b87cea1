"""Editing a model with onnx-graphsurgeon, and losing nothing on the way.

An onnx-graphsurgeon import and export drops metadata, value infos, node doc strings and initializers listed as inputs,
and fails on outputs that are sequences or maps. So the graph it edits is a shell of the model (names and structure), and
`finish` takes from it only what the edit changed: every other node and tensor comes from the source, byte for byte.
"""

from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from numpy.typing import NDArray
from onnx import numpy_helper
from onnx_graphsurgeon.logger import G_LOGGER

from onnx_gconv.model.bodies import names
from onnx_gconv.model.constants import Constants, inner_graphs, outer_reads
from onnx_gconv.model.shell import shell
from onnx_gconv.model.stream import copy_field

# graphsurgeon prints its warnings to stdout, which belongs to our result.
G_LOGGER.severity = G_LOGGER.ERROR

# Below this IR version an initializer has to be listed as a graph input as well.
FREE_INITIALIZERS_IR = 4
NOTHING: Mapping[str, int] = MappingProxyType({})


class Surgery:
    """One edit of one model: change `graph`, make constants with `constant`, then `finish`."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._source = model
        structure = shell(model)
        for value in (*structure.graph.input, *structure.graph.output):
            value.ClearField("type")  # by name only: graphsurgeon cannot express every type
        self.graph: gs.Graph = gs.import_onnx(structure)
        self._origins: dict[int, onnx.NodeProto] = dict(zip(map(id, self.graph.nodes), model.graph.node, strict=True))
        self._attributes = {id(node): dict(node.attrs) for node in self.graph.nodes}
        self._values: dict[str, NDArray[np.generic]] = {}
        self._constants = Constants(model)
        self._names = set(names(model.graph))
        self._by_output: dict[str, gs.Node] = {}

    def unique(self, name: str) -> str:
        """Return `name`, numbered if the model has it already, and reserve it."""
        candidate, number = name, 1
        while candidate in self._names:
            number += 1
            candidate = f"{name}_{number}"
        self._names.add(candidate)
        return candidate

    def constant(self, name: str, value: NDArray[np.generic]) -> gs.Tensor:
        """Return a constant tensor of this very name; it replaces one that the model may have under it."""
        self._values[name] = value
        return self.tensor(name)

    def value(self, tensor: gs.Tensor) -> NDArray[np.generic]:
        """Return the value of a constant: one made here, or one that the model stores."""
        if tensor.name in self._values:
            return self._values[tensor.name]
        return self._constants.value(tensor.name)

    def tensor(self, name: str) -> gs.Tensor:
        """Return the constant that was made under this name."""
        # By name only: nodes and tensors refer to each other, so the graph outlives this edit until Python collects cycles.
        return gs.Variable(name)

    def variable(self, name: str) -> gs.Variable:
        """Return a new tensor under a unique name."""
        return gs.Variable(self.unique(name))

    def node_of(self, output: str) -> gs.Node:
        """Return the node whose first output has this name."""
        found = self._by_output.get(output)
        if found is None or not found.outputs or found.outputs[0].name != output:  # not looked for yet, or edited since
            self._by_output = {node.outputs[0].name: node for node in reversed(self.graph.nodes) if node.outputs}
        return self._by_output[output]

    def insert(self, new: gs.Node, *, before: gs.Node | None = None, after: gs.Node | None = None) -> None:
        """Put a node beside another one, so that the list stays in topological order."""
        anchor = before if before is not None else after
        index = next(i for i, node in enumerate(self.graph.nodes) if node is anchor)
        self.graph.nodes.insert(index if before is not None else index + 1, new)

    def finish(self, channels: Mapping[str, int] = NOTHING) -> onnx.ModelProto:
        """Return the edited model: the source but for the nodes and constants that changed or became unused.

        `channels` are those of tensors that have fewer of them now, so that no stale shape is written.
        The end of the edit: each constant goes as its copy in the model is made, so that no weight is held twice.
        """
        source = self._source.graph
        nodes = [self._node(node) for node in self.graph.nodes if not self._is_replaced(node)]
        used_before = set(_reads(source.node)) | {value.name for value in source.output}
        nodes, used = _without_orphans(nodes, used_before, {value.name for value in source.output})
        kept = [tensor for tensor in source.initializer if tensor.name in used or tensor.name not in used_before]
        stored = {tensor.name for tensor in source.initializer}
        new = [name for name in self._values if name in used and name not in stored]
        return self._assemble(nodes, kept, new, channels)

    def _is_replaced(self, node: gs.Node) -> bool:
        """Return whether a Constant node's output is now an initializer under the same name."""
        return node.op == "Constant" and node.outputs[0].name in self._values

    def _node(self, node: gs.Node) -> onnx.NodeProto:
        origin: onnx.NodeProto | None = self._origins.get(id(node))
        attributes = self._attributes.get(id(node), {})
        if (
            origin is not None
            and [tensor.name for tensor in node.inputs] == list(origin.input)
            and [tensor.name for tensor in node.outputs] == list(origin.output)
            and node.attrs.keys() == attributes.keys()
            and all(node.attrs[key] is attributes[key] for key in attributes)
        ):
            return origin
        inputs, outputs = ([tensor.name for tensor in side] for side in (node.inputs, node.outputs))
        proto: onnx.NodeProto = onnx.helper.make_node(node.op, inputs, outputs, name=node.name, domain=node.domain or "")
        # What is as it was is copied: of an empty list, say, nobody could tell the type.
        kept = {attribute.name: attribute for attribute in origin.attribute} if origin is not None else {}
        for key, value in sorted(node.attrs.items()):
            is_kept = key in kept and key in attributes and value is attributes[key]
            proto.attribute.append(kept[key] if is_kept else onnx.helper.make_attribute(key, value))
        if origin is not None:
            proto.doc_string = origin.doc_string
            proto.metadata_props.extend(origin.metadata_props)
        return proto

    def _take(self, name: str) -> onnx.TensorProto:
        return numpy_helper.from_array(self._values.pop(name), name)

    def _assemble(
        self, nodes: list[onnx.NodeProto], kept: list[onnx.TensorProto], new: list[str], channels: Mapping[str, int]
    ) -> onnx.ModelProto:
        source = self._source
        result = onnx.ModelProto()
        for field, value in source.ListFields():
            if field.name != "graph":
                copy_field(result, field.name, value)
        present = {name for node in nodes for name in node.output} | {tensor.name for tensor in kept}
        constants = {tensor.name for tensor in source.graph.initializer}
        for field, value in source.graph.ListFields():
            if field.name not in ("node", "initializer", "input", "value_info"):
                copy_field(result.graph, field.name, value)
        # An initializer that was listed as an input and is gone leaves the inputs too.
        result.graph.input.extend(v for v in source.graph.input if v.name not in constants or v.name in present)
        result.graph.value_info.extend(v for v in source.graph.value_info if v.name in present)
        for value in result.graph.value_info:
            if value.name in channels and len(value.type.tensor_type.shape.dim) > 1:
                value.type.tensor_type.shape.dim[1].dim_value = channels[value.name]
        result.graph.node.extend(nodes)
        result.graph.initializer.extend(self._take(tensor.name) if tensor.name in self._values else tensor for tensor in kept)
        result.graph.initializer.extend(self._take(name) for name in new)
        if source.ir_version < FREE_INITIALIZERS_IR:
            added = result.graph.initializer[len(kept) :]
            result.graph.input.extend(onnx.helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in added)
        return result


def _reads(nodes: Iterable[onnx.NodeProto]) -> Iterator[str]:
    """Yield every tensor name that these nodes read, from inside their inner graphs too."""
    for node in nodes:
        yield from node.input
        for inner in inner_graphs(node):
            yield from outer_reads(inner)


def _without_orphans(
    nodes: list[onnx.NodeProto], used_before: set[str], outputs: set[str]
) -> tuple[list[onnx.NodeProto], set[str]]:
    """Return the nodes less those whose result the edit left unread, and the names that are read."""
    while True:
        used = set(_reads(nodes)) | outputs
        kept = [
            node
            for node in nodes
            if not any(name in used_before for name in node.output) or any(name in used for name in node.output)
        ]
        if len(kept) == len(nodes):
            return nodes, used
        nodes = kept
