"""Whether a file that parses is a model: what no runtime would take is refused here, so that nothing after this has to think of it.

Texts are UTF-8, tensors hold what they say, attributes have the value of their type, and nodes have the inputs, outputs and
attributes that their op's schema asks for. Who reads what is the subject of `order`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NoReturn

import onnx
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from onnx import AttributeProto, TensorProto, TypeProto, numpy_helper
from onnx.defs import OpSchema, SchemaError, get_all_schemas, get_schema
from onnx.external_data_helper import uses_external_data

from onnx_gconv.errors import ModelError
from onnx_gconv.model.attributes import integer, integers
from onnx_gconv.model.constants import STANDARD_DOMAINS
from onnx_gconv.model.shapes import LARGEST_ELEMENTS

HINT = "the model is malformed: export or download it again"
DAMAGED = "the file is damaged: export or download it again"
MOST_NUMBERS = 32  # of a shape, or the amounts of a Pad
UNKNOWN_DIM = -1  # as some exporters write it
LARGEST_DIM = 2**40  # what NumPy refuses even where another axis is empty
SCHEMA_DOMAINS = (*STANDARD_DOMAINS, "ai.onnx.ml")
# Where a type's numbers are if they are not raw bytes, and how many entries one of them takes.
STORES: Mapping[int, tuple[str, int]] = {
    TensorProto.FLOAT: ("float_data", 1),
    TensorProto.COMPLEX64: ("float_data", 2),
    TensorProto.DOUBLE: ("double_data", 1),
    TensorProto.COMPLEX128: ("double_data", 2),
    TensorProto.INT64: ("int64_data", 1),
    TensorProto.UINT32: ("uint64_data", 1),
    TensorProto.UINT64: ("uint64_data", 1),
    TensorProto.STRING: ("string_data", 1),
}
ALL_STORES = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data", "string_data")
# Types of less than a byte: several to one.
BITS = {name: bits for bits, names in ((4, ("INT4", "UINT4", "FLOAT4E2M1")), (2, ("INT2", "UINT2"))) for name in names}
VALUE_FIELDS = {
    AttributeProto.FLOAT: "f",
    AttributeProto.INT: "i",
    AttributeProto.STRING: "s",
    AttributeProto.TENSOR: "t",
    AttributeProto.GRAPH: "g",
    AttributeProto.SPARSE_TENSOR: "sparse_tensor",
    AttributeProto.TYPE_PROTO: "tp",
    AttributeProto.FLOATS: "floats",
    AttributeProto.INTS: "ints",
    AttributeProto.STRINGS: "strings",
    AttributeProto.TENSORS: "tensors",
    AttributeProto.GRAPHS: "graphs",
    AttributeProto.SPARSE_TENSORS: "sparse_tensors",
    AttributeProto.TYPE_PROTOS: "type_protos",
}

# An empty list is a value, and so is what is not said of a number or text.
MESSAGE_FIELDS = ("t", "g", "sparse_tensor", "tp")


def require_sound(model: onnx.ModelProto, where: str) -> None:
    """Refuse a model that is malformed; `where` begins the message. Its texts are sound, and its tensors were read."""
    # A node that calls a function of the model is held to no schema.
    called = {(function.domain, function.name) for function in model.functions}
    _Check(where, _opsets(model.opset_import, where), called).graph(model.graph)
    for function in model.functions:
        check = _Check(f"{where}: function {function.name!r}", _opsets(function.opset_import, where), called)
        check.nodes(function.node)


def require_located(tensors: Iterable[onnx.TensorProto], where: str) -> None:
    """Refuse weights in another file that do not say where; those that do not say how long they are get their length."""
    for tensor in tensors:
        if not uses_external_data(tensor):
            continue
        told = {entry.key: entry.value for entry in tensor.external_data}
        if not told.get("location"):
            _refuse(where, f"the tensor {tensor.name!r} lies in another file, and 'location' does not say in which")
        for key in ("offset", "length"):
            if not told.get(key, "0").isdecimal():
                _refuse(where, f"the tensor {tensor.name!r} lies in another file with the {key} {told[key]!r}")
        if "length" not in told:
            tensor.external_data.add(key="length", value=str(_bytes_needed(tensor, where)))


def require_texts(message: Message, where: str, place: str = "") -> None:
    """Refuse names and other texts that are not UTF-8: they could not even be told."""
    here = place
    if isinstance(message, TensorProto):  # to list the fields of a tensor would copy its data
        texts = [("name", message.name), ("doc_string", message.doc_string)]
        inner: list[Any] = list(message.external_data)
    else:
        fields = message.ListFields()
        texts = [(field.name, value) for field, value in fields if field.type == FieldDescriptor.TYPE_STRING]
        inner = [value for field, value in fields if field.type == FieldDescriptor.TYPE_MESSAGE]
    for name, value in texts:
        for text in (value,) if isinstance(value, str | bytes) else value:
            if isinstance(text, bytes):  # what protobuf gives where it cannot decode
                kind = message.DESCRIPTOR.name.removesuffix("Proto")
                _refuse(where, f"{place}the {name} of a {kind} is not UTF-8 text: {text[:40]!r}")
    if isinstance(message, onnx.NodeProto):
        here = f"{_described(message)}: "
    for value in inner:
        for each in (value,) if isinstance(value, Message) else value:
            require_texts(each, where, here)


def _described(node: onnx.NodeProto) -> str:
    return f"the {node.op_type} node {node.name or next(filter(None, node.output), '')!r}"


def _refuse(where: str, what: str) -> NoReturn:
    raise ModelError(f"{where}: {what}.", hint=HINT)


def _opsets(imports: Iterable[onnx.OperatorSetIdProto], where: str) -> dict[str, int]:
    result: dict[str, int] = {}
    for entry in imports:
        domain = "" if entry.domain in STANDARD_DOMAINS else entry.domain
        if not 1 <= entry.version < 2**31:  # what onnx takes
            _refuse(where, f"the version of the opset {domain or 'ai.onnx'!r} is {entry.version}")
        result[domain] = max(entry.version, result.get(domain, 0))
    return result


class _Check:
    """One walk through a graph and those inside it."""

    def __init__(self, where: str, opsets: Mapping[str, int], called: set[tuple[str, str]]) -> None:
        self._where = where
        self._opsets = opsets
        self._called = called
        self._tensors: dict[str, onnx.TensorProto] = {}  # that are stored, in graphs around this one too

    def graph(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            if not tensor.name:
                _refuse(self._where, "an initializer has no name")
            require_tensor(tensor, self._where)
            self._tensors[tensor.name] = tensor
        for sparse in graph.sparse_initializer:
            self._sparse(sparse)
        for value in (*graph.input, *graph.output, *graph.value_info):
            self._value(value)
        self.nodes(graph.node)

    def nodes(self, nodes: Sequence[onnx.NodeProto]) -> None:
        rules = {
            "Conv": self._conv,
            "ConvTranspose": self._conv,
            "ConstantOfShape": self._claim,
            "Pad": self._pad,
            "Slice": self._slice,
        }
        for node in nodes:
            if not node.op_type:
                _refuse(self._where, f"the node {node.name or next(iter(node.output), '')!r} has no op type")
            if not any(node.output):
                _refuse(self._where, f"{_described(node)} has no outputs")
            self._attributes(node)
            self._schema(node)
            if node.op_type == "Constant":
                self._tensors.update((node.output[0], each.t) for each in node.attribute if each.name == "value")
        for node in nodes:
            if node.domain in STANDARD_DOMAINS and (node.domain, node.op_type) not in self._called:
                self._window(node)
                if node.op_type in rules:
                    rules[node.op_type](node)

    def _value(self, value: onnx.ValueInfoProto) -> None:
        if not value.name:
            _refuse(self._where, "an input, output or value has no name")
        for dim in value.type.tensor_type.shape.dim:
            if not UNKNOWN_DIM <= dim.dim_value <= LARGEST_DIM:  # on which ONNX's own check aborts the process
                _refuse(self._where, f"an axis of the tensor {value.name!r} has the size {dim.dim_value}")
        for element in _elements(value.type):
            if element not in _known_types():
                _refuse(self._where, f"the tensor {value.name!r} has the unknown type {element}")

    def _sparse(self, sparse: onnx.SparseTensorProto) -> None:
        for part in (sparse.values, sparse.indices):
            require_tensor(part, self._where)
        if any(dim < 0 for dim in sparse.dims):
            _refuse(self._where, f"the tensor {sparse.values.name!r} has the shape {'x'.join(map(str, sparse.dims))}")

    def _attributes(self, node: onnx.NodeProto) -> None:
        seen: set[str] = set()
        for attribute in node.attribute:
            if not attribute.name or attribute.name in seen:
                _refuse(
                    self._where,
                    f"{_described(node)} has {'two attributes' if attribute.name else 'an attribute'} {attribute.name!r}",
                )
            seen.add(attribute.name)
            self._attribute(attribute, f"{_described(node)}: the attribute {attribute.name!r}")

    def _attribute(self, attribute: onnx.AttributeProto, place: str) -> None:
        if attribute.ref_attr_name:  # it stands for one of the call
            return
        field = VALUE_FIELDS.get(attribute.type)
        there = [name for name in VALUE_FIELDS.values() if _is_there(attribute, name)]
        if field is None:
            _refuse(self._where, f"{place} has no known type")
        # An empty list is a value, and so is what is not said of a number.
        if set(there) - {field} or (
            not there and field in ("t", "g", "s", "sparse_tensor", "tp") and not attribute.HasField(field)
        ):
            kind = AttributeProto.AttributeType.Name(attribute.type)
            _refuse(self._where, f"{place} is of type {kind} and holds {' and '.join(there) or 'nothing'}")
        texts = (*attribute.strings, *([attribute.s] if field == "s" else []))
        try:
            for text in texts:
                text.decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self._where}: {place} is not UTF-8 text: {error.object[:40]!r}.", hint=HINT) from error
        for tensor in (*([attribute.t] if field == "t" else []), *attribute.tensors):
            require_tensor(tensor, self._where, place)
        for sparse in (*([attribute.sparse_tensor] if field == "sparse_tensor" else []), *attribute.sparse_tensors):
            self._sparse(sparse)
        for graph in (*([attribute.g] if field == "g" else []), *attribute.graphs):
            self.graph(graph)

    def _window(self, node: onnx.NodeProto) -> None:
        """Refuse steps of nothing, which somebody would divide by, and sizes beyond anything, on which ONNX Runtime aborts."""
        for name, least in (("kernel_shape", 1), ("strides", 1), ("dilations", 1), ("pads", -LARGEST_ELEMENTS)):
            numbers = integers(node, name)
            if numbers is not None and not all(least <= number <= LARGEST_ELEMENTS for number in numbers):
                _refuse(self._where, f"{_described(node)}: {name!r} is {numbers}")

    def _conv(self, node: onnx.NodeProto) -> None:
        groups = integer(node, "group", 1)
        weight = self._dims(node.input[1])
        if groups < 1:
            _refuse(self._where, f"{_described(node)}: 'group' is {groups}")
        if weight is None:
            return
        shape = "x".join(map(str, weight))
        # Of a transposed Conv the weight has the inputs first.
        if len(weight) < 3 or 0 in weight or weight[0] % groups:
            _refuse(self._where, f"{_described(node)}: its weight {node.input[1]!r} has the shape {shape}, in {groups} groups")
        kernel = integers(node, "kernel_shape")
        if kernel is not None and tuple(kernel) != weight[2:]:
            _refuse(
                self._where,
                f"{_described(node)}: 'kernel_shape' is {kernel}, and its weight {node.input[1]!r} has the shape {shape}",
            )
        bias = self._dims(node.input[2]) if len(node.input) > 2 else None
        outputs = weight[0] if node.op_type == "Conv" else weight[1] * groups
        if bias is not None and bias != (outputs,):
            shape = "x".join(map(str, bias))
            _refuse(self._where, f"{_described(node)}: its bias {node.input[2]!r} has the shape {shape}, for {outputs} channels")

    def _claim(self, node: onnx.NodeProto) -> None:
        """Refuse a tensor of one number that no machine has room for."""
        shape = self._numbers(node.input[0])
        if any(dim < 0 for dim in shape) or math.prod(shape) > LARGEST_ELEMENTS:
            _refuse(self._where, f"{_described(node)} claims the shape {'x'.join(map(str, shape))}")

    def _pad(self, node: onnx.NodeProto) -> None:
        amounts = self._numbers(node.input[1]) if len(node.input) > 1 else []
        if any(abs(amount) > LARGEST_ELEMENTS for amount in amounts):
            _refuse(self._where, f"{_described(node)} pads by {amounts}")

    def _numbers(self, name: str) -> list[int]:
        """Return a short list of whole numbers that is stored, an empty one for anything else."""
        told = self._tensors.get(name)
        if told is None or len(told.dims) != 1 or told.dims[0] > MOST_NUMBERS or told.data_type != TensorProto.INT64:
            return []
        numbers: list[int] = numpy_helper.to_array(told).tolist()
        return numbers

    def _dims(self, name: str) -> tuple[int, ...] | None:
        return tuple(self._tensors[name].dims) if name in self._tensors else None

    def _slice(self, node: onnx.NodeProto) -> None:
        told = {each.name: len(each.ints) for each in node.attribute}
        names = ("starts", "ends", "axes", "steps")
        stored = {each: self._dims(name) for each, name in zip(names, node.input[1:], strict=False)}
        told |= {each: dims[0] for each, dims in stored.items() if dims}
        found = {name: told[name] for name in names if name in told}
        steps = self._numbers(node.input[4]) if len(node.input) > 4 else []
        if 0 in steps:
            _refuse(self._where, f"{_described(node)} has the steps {steps}")
        if len(set(found.values())) > 1:
            _refuse(self._where, f"{_described(node)} has {' and '.join(f'{count} {name}' for name, count in found.items())}")

    def _schema(self, node: onnx.NodeProto) -> None:
        """Hold a node to what its op is defined as; an op that nobody knows here is for the runtime to judge."""
        if node.domain not in SCHEMA_DOMAINS or (node.domain, node.op_type) in self._called:
            return
        domain = "" if node.domain in STANDARD_DOMAINS else node.domain
        if domain not in self._opsets:
            _refuse(self._where, f"{_described(node)} is of an opset {domain or 'ai.onnx'!r} whose version the model does not say")
        schema = _find_schema(node.op_type, self._opsets[domain], domain)
        if schema is None:
            return
        for kind, names, least, most, formal in (
            ("inputs", node.input, schema.min_input, schema.max_input, schema.inputs),
            ("outputs", node.output, schema.min_output, schema.max_output, schema.outputs),
        ):
            if not least <= len(names) <= most:
                wanted = f"{least}" if least == most else f"{least} to {most}" if most < 2**31 - 1 else f"at least {least}"
                _refuse(self._where, f"{_described(node)} has {len(names)} {kind}, and its op takes {wanted}")
            for name, parameter in zip(names, formal, strict=False):
                if not name and parameter.option == OpSchema.FormalParameterOption.Single:
                    _refuse(self._where, f"{_described(node)} has nothing as {parameter.name!r}, one of its {kind}")
        given = {attribute.name: attribute.type for attribute in node.attribute}
        known = _formal_attributes(schema)
        for name in given:
            # Those of a newer opset than ours may have attributes that we do not know.
            if name not in known and not name.startswith("__") and self._opsets[domain] <= _newest(domain):
                _refuse(self._where, f"{_described(node)} has the attribute {name!r}, which its op does not know")
        for name, formal_attribute in known.items():
            if name not in given and formal_attribute.required:
                _refuse(self._where, f"{_described(node)} has no attribute {name!r}")
            wanted_type = formal_attribute.type.value
            if name in given and given[name] != wanted_type:
                kinds = [AttributeProto.AttributeType.Name(kind) for kind in (given[name], wanted_type)]
                _refuse(
                    self._where, f"{_described(node)}: the attribute {name!r} is of type {kinds[0]}, and its op takes {kinds[1]}"
                )


def require_tensor(tensor: onnx.TensorProto, where: str, place: str = "") -> None:
    """Refuse a tensor that does not hold as many numbers as its shape says."""
    called = f"{place}: the tensor {tensor.name!r}" if place else f"the tensor {tensor.name!r}"
    needed = _bytes_needed(tensor, where, called)
    elements = math.prod(tensor.dims)
    stores = [name for name in ALL_STORES if len(getattr(tensor, name))]
    if tensor.HasField("raw_data"):
        held = len(tensor.raw_data)
        if stores or tensor.data_type == TensorProto.STRING:
            _refuse(where, f"{called} has raw data and {stores[0] if stores else 'is made of strings'}")
        if held != needed:
            raise ModelError(
                f"{where}: {called} needs {needed:,} bytes and holds {held:,}.",
                hint="the file is damaged: export or download it again",
            )
        return
    store, entries = STORES.get(tensor.data_type, ("int32_data", 1))
    per_entry = 8 // BITS.get(TensorProto.DataType.Name(tensor.data_type), 8)
    wanted = -(-elements * entries // per_entry)
    if [name for name in stores if name != store] or len(getattr(tensor, store)) != wanted:
        found = ", ".join(f"{len(getattr(tensor, name)):,} in {name}" for name in stores) or "none"
        raise ModelError(f"{where}: {called} needs {wanted:,} numbers in {store} and holds {found}.", hint=DAMAGED)
    try:
        for text in tensor.string_data:
            text.decode()
    except UnicodeDecodeError as error:
        raise ModelError(f"{where}: {called} holds what is not UTF-8 text: {error.object[:40]!r}.", hint=HINT) from error


def _bytes_needed(tensor: onnx.TensorProto, where: str, called: str = "") -> int:
    """Return how long the raw data of a tensor is, or refuse its type or shape."""
    called = called or f"the tensor {tensor.name!r}"
    if tensor.data_type not in _known_types() - {TensorProto.UNDEFINED}:
        raise ModelError(f"{where}: {called} has the unknown type {tensor.data_type}.", hint="update onnx, or export it again")
    if any(not 0 <= dim <= LARGEST_DIM for dim in tensor.dims):
        _refuse(where, f"{called} has the shape {'x'.join(map(str, tensor.dims))}")
    elements: int = math.prod(tensor.dims)
    bits = BITS.get(TensorProto.DataType.Name(tensor.data_type))
    if bits is not None:
        return -(-elements * bits // 8)
    size: int = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
    return elements * size


def _elements(kind: onnx.TypeProto) -> Iterator[int]:
    """Yield the element types that a type is made of; 0 where nothing is said."""
    which = kind.WhichOneof("value")
    if which in ("tensor_type", "sparse_tensor_type"):
        yield getattr(kind, which).elem_type
    elif which == "map_type":
        yield kind.map_type.key_type
        yield from _elements(kind.map_type.value_type)
    elif which in ("sequence_type", "optional_type"):
        inner: TypeProto = getattr(kind, which).elem_type
        yield from _elements(inner)


def _is_there(attribute: onnx.AttributeProto, field: str) -> bool:
    value = getattr(attribute, field)
    return bool(len(value)) if isinstance(value, Sequence) and not isinstance(value, bytes) else attribute.HasField(field)


@cache
def _known_types() -> frozenset[int]:
    """Return the element types that NumPy has an array for."""
    known = []
    for element in TensorProto.DataType.values():
        try:
            onnx.helper.tensor_dtype_to_np_dtype(element)
        except KeyError:
            continue
        known.append(element)
    return frozenset((TensorProto.UNDEFINED, *known))


@cache
def _find_schema(op_type: str, version: int, domain: str) -> OpSchema | None:
    try:
        return get_schema(op_type, version, domain)
    except SchemaError:
        return None


@cache
def _newest(domain: str) -> int:
    """Return the newest version of an opset that we know."""
    return max((schema.since_version for schema in get_all_schemas() if schema.domain == domain), default=0)


@cache
def _formal_attributes(schema: OpSchema) -> dict[str, Any]:
    """Return the attributes that an op knows. Once a schema: each time onnx makes them anew."""
    return dict(schema.attributes)
