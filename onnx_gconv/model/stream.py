"""The bytes of a model file, tensor by tensor: serialising a model whole takes two to three times its size in memory."""

from collections.abc import Iterator, Sequence

import onnx

LENGTH_DELIMITED = 2  # protobuf's wire type of messages and strings


def serialised(model: onnx.ModelProto, initializers: Sequence[onnx.TensorProto] | None = None) -> Iterator[bytes]:
    """Yield what `model.SerializeToString()` returns, in pieces; with these initialisers, if given, in place of its own.

    Protobuf writes the fields in the order of their numbers, and a message in a field after its tag and its length.
    """
    tensors = model.graph.initializer if initializers is None else initializers
    head, tail = _around(model, "graph")
    graph_head, graph_tail = _around(model.graph, "initializer")
    length = len(graph_head) + sum(len(_initializer(tensor)) for tensor in tensors) + len(graph_tail)
    yield head
    yield _varint(model.DESCRIPTOR.fields_by_name["graph"].number << 3 | LENGTH_DELIMITED) + _varint(length)
    yield graph_head
    for tensor in tensors:
        yield _initializer(tensor)
    yield graph_tail
    yield tail


def copy_field(target: onnx.ModelProto | onnx.GraphProto, name: str, value: object) -> None:
    """Set a field that is no single message: a number, a string, or a list of anything."""
    if isinstance(value, (str, int)):
        setattr(target, name, value)
    else:
        getattr(target, name).extend(value)


def _around(message: onnx.ModelProto | onnx.GraphProto, name: str) -> tuple[bytes, bytes]:
    """Return the bytes of the fields before and after this one."""
    middle = message.DESCRIPTOR.fields_by_name[name].number
    head, tail = type(message)(), type(message)()
    for field, value in message.ListFields():
        if field.number != middle:
            copy_field(head if field.number < middle else tail, field.name, value)
    return head.SerializeToString(deterministic=True), tail.SerializeToString(deterministic=True)


def _initializer(tensor: onnx.TensorProto) -> bytes:
    """Return the tensor as a field of its graph, tag and length included."""
    data: bytes = onnx.GraphProto(initializer=[tensor]).SerializeToString(deterministic=True)
    return data


def _varint(number: int) -> bytes:
    """Return the number as protobuf has it: seven bits a byte, the lowest first, the top bit set on all but the last."""
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)
