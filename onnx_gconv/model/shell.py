"""The structure of a model without its weights' data: cheap to copy, infer shapes on, and take apart."""

import math

import onnx

# Shapes, axes and scalars stay: shape inference reads their values.
SMALL_ELEMENTS = 1024


def shell(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with every node and name, in order, but without the data of large tensors."""
    result = onnx.ModelProto(ir_version=model.ir_version)
    result.opset_import.extend(model.opset_import)
    result.functions.extend(model.functions)
    graph = result.graph
    graph.name = model.graph.name
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.sparse_initializer.extend(model.graph.sparse_initializer)
    for tensor in model.graph.initializer:
        _copy_tensor(tensor, graph.initializer.add())
    for node in model.graph.node:
        copy = graph.node.add()
        if node.op_type == "Constant" and any(attribute.HasField("t") for attribute in node.attribute):
            _copy_constant(node, copy)
        else:
            copy.CopyFrom(node)
    return result


def is_large(tensor: onnx.TensorProto) -> bool:
    """Return whether a shell leaves out the tensor's data."""
    elements: int = math.prod(tensor.dims)
    return elements > SMALL_ELEMENTS


def _copy_constant(node: onnx.NodeProto, copy: onnx.NodeProto) -> None:
    copy.op_type, copy.name, copy.domain = node.op_type, node.name, node.domain
    copy.output.extend(node.output)
    for attribute in node.attribute:
        target = copy.attribute.add()
        if attribute.HasField("t"):
            target.name, target.type = attribute.name, attribute.type
            _copy_tensor(attribute.t, target.t)
        else:
            target.CopyFrom(attribute)


def _copy_tensor(tensor: onnx.TensorProto, target: onnx.TensorProto) -> None:
    if not is_large(tensor):
        target.CopyFrom(tensor)
        return
    target.name, target.data_type = tensor.name, tensor.data_type
    target.dims.extend(tensor.dims)
