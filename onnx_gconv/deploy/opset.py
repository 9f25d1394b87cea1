"""Older opsets: the same graph in words that an older reader knows.

onnx's own version converter has no way down for BatchNormalization, Shape, If, Split and others, so it fails on nearly every
real model. Most newer versions of an operator only take more types, or have a new attribute that is seldom used: then the node
can stay as it is, less attributes at their default. Whoever calls this compares both models by running them.
"""

from collections.abc import Iterator

import onnx

from onnx_gconv.model.constants import STANDARD_DOMAINS, Constants, inner_graphs


def lower_opset(model: onnx.ModelProto, opset: int) -> list[str]:
    """Change the model, in place, to an older opset of ONNX's own operators; return what has no form there, by name."""
    newer = standard_opset(model)
    constants = Constants(model)
    problems = []
    for node in nodes_of(model.graph):
        if node.domain in STANDARD_DOMAINS:
            problem = _lower(node, newer, opset, constants)
            if problem:
                problems.append(f"{node.op_type} {node.name or node.output[0]!r} ({problem})")
    for entry in model.opset_import:
        if entry.domain in STANDARD_DOMAINS:
            entry.version = opset
    return problems


def standard_opset(model: onnx.ModelProto) -> int:
    """Return the version of ONNX's own operators that the model uses."""
    return next((entry.version for entry in model.opset_import if entry.domain in STANDARD_DOMAINS), 1)


def nodes_of(graph: onnx.GraphProto) -> Iterator[onnx.NodeProto]:
    """Yield every node, those inside If, Loop and Scan too."""
    for node in graph.node:
        yield node
        for inner in inner_graphs(node):
            yield from nodes_of(inner)


def _lower(node: onnx.NodeProto, newer: int, older: int, constants: Constants) -> str:
    """Change a node to its older form; return what stands in the way, or nothing."""
    if not onnx.defs.has(node.op_type, newer, ""):
        return "ONNX has no such op"
    if not onnx.defs.has(node.op_type, older, ""):
        return f"it exists only from opset {_first_version(node.op_type)} on"
    new, old = (onnx.defs.get_schema(node.op_type, version, "") for version in (newer, older))
    if new.since_version == old.since_version:
        return ""
    if len(node.input) > old.max_input and node.op_type.startswith("Reduce") and not _axes_to_attribute(node, constants):
        return "its axes are computed at run time"
    if len(node.input) > old.max_input or len(node.output) > old.max_output:
        return f"it has {len(node.input)} inputs and {len(node.output)} outputs"
    kept = [attribute for attribute in node.attribute if attribute.name in old.attributes]
    for attribute in node.attribute:
        if attribute.name not in old.attributes and not _is_default(attribute, new) and attribute.name != "num_outputs":
            return f"its attribute {attribute.name} is newer"
    # A Split without sizes makes equal parts in old opsets; newer ones have to be told their number.
    del node.attribute[:]
    node.attribute.extend(kept)
    return ""


def _axes_to_attribute(node: onnx.NodeProto, constants: Constants) -> bool:
    """Move the axes of a reduction from its second input, where opset 18 has them, into an attribute."""
    name = node.input[1]
    if name and not constants.is_constant(name):
        return False
    if name:
        node.attribute.append(onnx.helper.make_attribute("axes", [int(axis) for axis in constants.value(name).reshape(-1)]))
    del node.input[1:]
    return True


def _is_default(attribute: onnx.AttributeProto, schema: onnx.defs.OpSchema) -> bool:
    default = schema.attributes[attribute.name].default_value
    return bool(onnx.helper.get_attribute_value(attribute) == onnx.helper.get_attribute_value(default)) if default.type else False


def _first_version(kind: str) -> int:
    return min(int(schema.since_version) for schema in onnx.defs.get_all_schemas_with_history() if schema.name == kind)
