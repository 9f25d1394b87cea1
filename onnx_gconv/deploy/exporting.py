"""Models as a target reads them: its opset and IR version, int32 indices, fixed input shapes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
import onnx.inliner
from onnx import numpy_helper

from onnx_gconv.deploy.opset import lower_opset, nodes_of, standard_opset
from onnx_gconv.errors import ModelError
from onnx_gconv.model.constants import STANDARD_DOMAINS
from onnx_gconv.model.shapes import Shape, declared_shape, free_inputs, infer

ExportTarget = Literal["tx2", "tensorrt", "ort-cpu"]


@dataclass(frozen=True)
class Reads:
    """The newest that a target reads, None for no limit, and whether int64 indices cost it a cast."""

    opset: int | None
    ir_version: int | None
    wants_int32: bool


TARGETS: dict[ExportTarget, Reads] = {
    # TensorRT 8.2 of JetPack 4.6, the last one for the TX2.
    "tx2": Reads(opset=13, ir_version=7, wants_int32=True),
    "tensorrt": Reads(opset=None, ir_version=None, wants_int32=True),
    "ort-cpu": Reads(opset=None, ir_version=None, wants_int32=False),
}


@dataclass(frozen=True)
class Conversion:
    """A model for a target, and what was done to it, for people."""

    model: onnx.ModelProto
    remarks: tuple[str, ...]


def convert(model: onnx.ModelProto, target: ExportTarget, *, shapes: Mapping[str, Shape]) -> Conversion:
    """Return the model as the target reads it, these inputs at these fixed shapes; the argument stays as it is."""
    reads = TARGETS[target]
    result, remarks = onnx.ModelProto(), []
    result.CopyFrom(model)
    opset = standard_opset(model)
    if reads.opset is not None and opset > reads.opset:
        problems = lower_opset(result, reads.opset)
        if problems:
            more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
            raise ModelError(
                f"{target} reads opset {reads.opset}, in which these have no form: {', '.join(problems[:3])}{more}.",
                hint=f"export the model from its framework with opset {reads.opset}",
            )
        remarks.append(f"opset {opset} to {reads.opset}")
    if reads.ir_version is not None and result.ir_version > reads.ir_version:
        if result.functions:  # IR versions before 8 know none
            result = onnx.inliner.inline_local_functions(result)
        remarks.append(f"IR version {result.ir_version} to {reads.ir_version}")
        result.ir_version = reads.ir_version
    if reads.wants_int32:
        remarks += _int32_indices(result)
    if shapes:
        _fix_shapes(result, shapes)
        remarks.append("input " + ", ".join(f"{name}={'x'.join(map(str, shape))}" for name, shape in shapes.items()))
    return Conversion(result, tuple(remarks))


def batch_shapes(model: onnx.ModelProto, batch: int) -> dict[str, Shape]:
    """Return the inputs with their batch fixed; refuse where another axis stays open, or the batch is fixed already."""
    shapes = {}
    for value in free_inputs(model):
        declared = declared_shape(value)
        if not declared or None in declared[1:]:
            raise ModelError(
                f"input {value.name!r} has dynamic axes besides the batch.", hint="fix all of them with --input-shape 1x3x224x224"
            )
        if declared[0] not in (None, batch):
            raise ModelError(
                f"input {value.name!r} has the fixed batch {declared[0]}.",
                hint="export the model from its framework with a dynamic batch",
            )
        shapes[value.name] = (batch, *(dim for dim in declared[1:] if dim is not None))
    return shapes


def _int32_indices(model: onnx.ModelProto) -> list[str]:
    """Make the constant indices of Gathers int32 where nothing else reads them; return what was done."""
    graph = model.graph
    reads: dict[str, int] = {}
    for node in nodes_of(graph):
        for name in node.input:
            reads[name] = reads.get(name, 0) + 1
    for value in graph.output:
        reads[value.name] = reads.get(value.name, 0) + 1
    indices = [node.input[1] for node in graph.node if node.op_type == "Gather" and node.domain in STANDARD_DOMAINS]
    only_gathers = {name for name in indices if indices.count(name) == reads[name]}
    listed = {value.name: value for value in graph.input}
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute and node.attribute[0].HasField("t"):
            tensors[node.output[0]] = node.attribute[0].t
    changed = 0
    for name in only_gathers & tensors.keys():
        tensor = tensors[name]
        if tensor.data_type == onnx.TensorProto.INT64:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.int32), tensor.name))
            if name in listed:  # IR 3 lists initializers as inputs
                listed[name].type.tensor_type.elem_type = onnx.TensorProto.INT32
            changed += indices.count(name)
    del graph.value_info[:]  # some name the old type
    return [f"int32 indices in {changed} Gathers"] if changed else []


def _fix_shapes(model: onnx.ModelProto, shapes: Mapping[str, Shape]) -> None:
    for value in model.graph.input:
        if value.name in shapes:
            _set_shape(value, shapes[value.name])
    known = infer(model, shapes)
    del model.graph.value_info[:]
    for value in model.graph.output:
        if value.name in known and value.type.HasField("tensor_type"):
            _set_shape(value, known[value.name])


def _set_shape(value: onnx.ValueInfoProto, shape: Shape) -> None:
    value.type.tensor_type.ClearField("shape")
    for dim in shape:
        value.type.tensor_type.shape.dim.add().dim_value = dim
