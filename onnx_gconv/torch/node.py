"""One node of an ONNX graph as the importer runs it, and the table of operators it knows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import onnx
import torch
from torch import Tensor

from onnx_gconv.model.constants import STANDARD_DOMAINS

# Half precision trains in float32 and is rounded when it is written back: small updates would be lost in float16.
DTYPES: dict[int, torch.dtype] = {
    onnx.TensorProto.FLOAT: torch.float32,
    onnx.TensorProto.FLOAT16: torch.float32,
    onnx.TensorProto.BFLOAT16: torch.float32,
    onnx.TensorProto.DOUBLE: torch.float64,
    onnx.TensorProto.BOOL: torch.bool,
    onnx.TensorProto.INT8: torch.int8,
    onnx.TensorProto.INT16: torch.int16,
    onnx.TensorProto.INT32: torch.int32,
    onnx.TensorProto.INT64: torch.int64,
    onnx.TensorProto.UINT8: torch.uint8,
    # PyTorch has next to no arithmetic on wider unsigned types.
    onnx.TensorProto.UINT16: torch.int32,
    onnx.TensorProto.UINT32: torch.int64,
}

Results: TypeAlias = Tensor | Sequence[Tensor]


@dataclass(frozen=True, eq=False)
class Node:
    """An operator with its attributes, and the names of the tensors it reads ("" for none) and makes."""

    op: str  # with its domain in front, if it has one
    label: str  # for messages
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]
    opset: int

    def get(self, name: str, default: Any) -> Any:
        """Return an attribute, or `default` where the node does not have it."""
        return self.attributes.get(name, default)

    def numbers(self, name: str, given: Tensor | None) -> list[Any] | None:
        """Return a list that an input holds in newer opsets and an attribute in older ones; None where neither does."""
        if given is not None:
            values = given.tolist()
            return values if isinstance(values, list) else [values]
        return list(self.attributes[name]) if name in self.attributes else None


@dataclass(frozen=True)
class Operator:
    """How one kind of node is run."""

    run: Callable[..., Results]  # (node, *inputs)
    numbers: frozenset[int]  # input slots that are read as plain numbers: those tensors stay on the CPU
    modal: bool  # whether it behaves differently in training, and takes the keyword `training`


TABLE: dict[str, Operator] = {}


def operator(
    *names: str, numbers: Sequence[int] = (), modal: bool = False
) -> Callable[[Callable[..., Results]], Callable[..., Results]]:
    """Enter a function of (node, *inputs) into the table under these operators' names."""

    def enter(run: Callable[..., Results]) -> Callable[..., Results]:
        TABLE.update((name, Operator(run, frozenset(numbers), modal)) for name in names)
        return run

    return enter


def read_node(proto: onnx.NodeProto, opsets: Mapping[str, int]) -> Node:
    """Return the node that a NodeProto stands for."""
    domain = "" if proto.domain in STANDARD_DOMAINS else proto.domain
    return Node(
        op=f"{domain}:{proto.op_type}" if domain else proto.op_type,
        label=proto.name or (proto.output[0] if proto.output else proto.op_type),
        inputs=tuple(proto.input),
        outputs=tuple(proto.output),
        attributes={attribute.name: _value(attribute) for attribute in proto.attribute},
        opset=opsets.get(domain, 1),
    )


def _value(attribute: onnx.AttributeProto) -> Any:
    value = onnx.helper.get_attribute_value(attribute)
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def read_opsets(model: onnx.ModelProto) -> dict[str, int]:
    """Return the version of each operator set that the model imports."""
    return {"" if entry.domain in STANDARD_DOMAINS else entry.domain: entry.version for entry in model.opset_import}
