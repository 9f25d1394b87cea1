"""One change to a model, on the level of protobuf or of bytes, or to any JSON or .npz file."""

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError, Message

Rng = np.random.Generator
# None between: a model of 65536 pixels is no malformed one, only a slow one.
WHOLE = (0, 1, -1, 2, 3, 7, 8, 16, 255, -8, 2**31 - 1, -(2**31))
LONG = (*WHOLE, 2**31, 2**40, 2**62, 2**63 - 1, -(2**63))
REAL = (0.0, -1.0, 1e30, -1e-30, float("nan"), float("inf"))
OPS = (
    *("Conv", "Relu", "Identity", "Add", "Concat", "Slice", "Split", "Reshape", "Transpose", "Gemm", "MatMul", "Resize", "Pad"),
    *("BatchNormalization", "Constant", "ConstantOfShape", "If", "Loop", "Softmax", "ConvTranspose", "Shape", "Gather", "Clip"),
    *("Expand", "Tile", "Squeeze", "Flatten", "ReduceMean", "Cast", "Nonsense", "LSTM", "QLinearConv", "ConvInteger", "Range"),
)  # fmt: skip


def pick(rng: Rng, items: Any) -> Any:
    return items[int(rng.integers(len(items)))]


def mutated_model(content: bytes, rng: Rng) -> bytes:
    """Return the file with one to three changes."""
    for _ in range(int(rng.choice([1, 1, 1, 2, 3]))):
        if rng.random() < 0.15:
            content = changed_bytes(content, rng)
            continue
        model = onnx.ModelProto()
        try:
            model.ParseFromString(content)
        except Exception:  # bytes were changed before
            return content
        try:
            pick(rng, MUTATORS)(model, rng)
        except (IndexError, ValueError, UnicodeError, TypeError, DecodeError, onnx.shape_inference.InferenceError):
            continue  # nothing of its kind here, or a value that the field does not take
        content = model.SerializeToString()
    return content


# --- bytes ----------------------------------------------------------------------------------------------------------------


def changed_bytes(content: bytes, rng: Rng) -> bytes:
    """Return bytes flipped, cut, doubled, or put elsewhere."""
    data = bytearray(content)
    at = int(rng.integers(max(1, len(data))))
    length = int(rng.choice([1, 2, 4, 16, 256]))
    kind = int(rng.integers(6))
    if kind == 0:
        for _ in range(int(rng.integers(1, 5))):
            data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        del data[at : at + length]
    elif kind == 2:
        data[at:at] = rng.bytes(length)
    elif kind == 3:
        del data[at:]
    elif kind == 4:
        data[at:at] = data[at : at + length]
    else:
        data[at : at + length] = b"\xff" * length
    return bytes(data)


# --- protobuf -------------------------------------------------------------------------------------------------------------


def messages(message: Message) -> Iterator[Message]:
    yield message
    for field, value in message.ListFields():
        if field.type == Field.TYPE_MESSAGE:
            for each in (value,) if isinstance(value, Message) else value:
                yield from messages(each)


def any_field(model: onnx.ModelProto, rng: Rng) -> None:
    """Change a field of a message, whichever."""
    message = pick(rng, list(messages(model)))
    field = pick(rng, message.DESCRIPTOR.fields)
    if isinstance(getattr(message, field.name), int | float | str | bytes):
        setattr(message, field.name, _value(field, model, rng))
    elif field.type == Field.TYPE_MESSAGE and isinstance(getattr(message, field.name), Message):
        message.ClearField(field.name)
    else:
        _change_list(getattr(message, field.name), field, model, rng)


def set_field(model: onnx.ModelProto, rng: Rng) -> None:
    """Change a field that is set."""
    message = pick(rng, list(messages(model)))
    field, value = pick(rng, message.ListFields())
    if rng.random() < 0.3:
        message.ClearField(field.name)
    elif isinstance(value, int | float | str | bytes):
        setattr(message, field.name, _value(field, model, rng))
    elif not isinstance(value, Message):
        _change_list(value, field, model, rng)


def _change_list(values: Any, field: Any, model: onnx.ModelProto, rng: Rng) -> None:
    kind = int(rng.integers(4))
    if kind == 0 and len(values):
        del values[int(rng.integers(len(values)))]
    elif kind == 1 and len(values):
        values.append(pick(rng, values))
    elif field.type == Field.TYPE_MESSAGE:
        if kind == 2:
            values.add()
        else:
            values.reverse()
    elif kind == 2 or not len(values):
        values.append(_value(field, model, rng))
    else:
        values[int(rng.integers(len(values)))] = _value(field, model, rng)


def _value(field: Any, model: onnx.ModelProto, rng: Rng) -> Any:
    if field.type == Field.TYPE_STRING:
        return pick(rng, ["", "x", "\u202e", "a" * 300, "../../x", *_names(model)])
    if field.type == Field.TYPE_BYTES:
        return pick(rng, [b"", b"\xff\xfe", b"SAME_UPPER", rng.bytes(64)])
    if field.type == Field.TYPE_ENUM:
        return pick(rng, [value.number for value in field.enum_type.values])
    if field.type in (Field.TYPE_FLOAT, Field.TYPE_DOUBLE):
        return pick(rng, REAL)
    return pick(rng, WHOLE if field.type == Field.TYPE_INT32 else [n for n in LONG if field.type == Field.TYPE_INT64 or n >= 0])


def _names(model: onnx.ModelProto) -> list[str]:
    names = [name for node in model.graph.node for name in (*node.input, *node.output)]
    return [name for name in names if isinstance(name, str)] or ["x"]  # bytes are what is no text any more


def dims(model: onnx.ModelProto, rng: Rng) -> None:
    tensor = pick(rng, model.graph.initializer)
    kind = int(rng.integers(4))
    if kind == 0:
        tensor.dims[int(rng.integers(len(tensor.dims)))] = pick(rng, LONG)
    elif kind == 1:
        tensor.dims.append(pick(rng, (1, 2, 0)))
    elif kind == 2:
        tensor.dims.reverse()  # the same number of values, in another shape
    else:
        del tensor.dims[-1]


def reshaped(model: onnx.ModelProto, rng: Rng) -> None:
    """Give a weight another shape, with as many numbers as that has."""
    tensor = pick(rng, model.graph.initializer)
    place = int(rng.integers(len(tensor.dims)))
    tensor.dims[place] = pick(rng, (1, 2, 3, 4, 8, 16))
    count = int(np.prod(tensor.dims))
    for name in ("raw_data", "float_data", "int64_data", "int32_data"):
        tensor.ClearField(name)
    values = rng.standard_normal(count) if tensor.data_type == 1 else rng.integers(0, 4, count)
    tensor.raw_data = values.astype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).tobytes()


def raw_data(model: onnx.ModelProto, rng: Rng) -> None:
    tensor = pick(rng, model.graph.initializer)
    kind = int(rng.integers(5))
    if kind == 0:
        tensor.raw_data = tensor.raw_data[: int(rng.integers(len(tensor.raw_data) + 1))]
    elif kind == 1:
        tensor.raw_data += rng.bytes(int(rng.choice([1, 4, 400])))
    elif kind == 2:
        tensor.ClearField("raw_data")
    elif kind == 3:
        tensor.raw_data = rng.bytes(len(tensor.raw_data))  # NaN and infinity among them
    else:
        tensor.float_data.extend([1.0, 2.0])


def small_values(model: onnx.ModelProto, rng: Rng) -> None:
    """Change what a Slice, Resize, Reshape or the like is told."""
    small = [each for each in model.graph.initializer if each.data_type == 7 and each.raw_data]
    tensor = pick(rng, small)
    values = np.frombuffer(tensor.raw_data, np.int64).copy()
    values[int(rng.integers(len(values)))] = pick(rng, LONG)
    tensor.raw_data = values.tobytes()


def data_type(model: onnx.ModelProto, rng: Rng) -> None:
    pick(rng, model.graph.initializer).data_type = int(rng.integers(-1, 40))


def external(model: onnx.ModelProto, rng: Rng) -> None:
    tensor = pick(rng, model.graph.initializer)
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key in ("location", "offset", "length"):
        if rng.random() < 0.7:
            value = (
                pick(rng, ["bad.onnx", "", "/etc/passwd", "missing.bin"]) if key == "location" else pick(rng, ["0", "8", "-1", "x"])
            )
            tensor.external_data.add(key=key, value=value)


def element_type(model: onnx.ModelProto, rng: Rng) -> None:
    value = pick(rng, [*model.graph.input, *model.graph.output, *model.graph.value_info])
    value.type.tensor_type.elem_type = int(rng.integers(-1, 30))


def input_dim(model: onnx.ModelProto, rng: Rng) -> None:
    dim = pick(rng, pick(rng, [*model.graph.input, *model.graph.output]).type.tensor_type.shape.dim)
    if rng.random() < 0.4:
        dim.dim_param = pick(rng, ["N", "S", "", "?", "batch"])
    else:
        dim.dim_value = pick(rng, (0, 1, 2, 3, 4, 5, 16, 33, -1, 2**20, 2**31, 2**62))


def attribute(model: onnx.ModelProto, rng: Rng) -> None:
    node = pick(rng, [each for each in model.graph.node if each.attribute])
    chosen = pick(rng, node.attribute)
    kind = int(rng.integers(6))
    if kind == 0:
        node.attribute.remove(chosen)
    elif kind == 1:
        chosen.type = int(rng.integers(15))
    elif kind == 2:
        chosen.i = pick(rng, LONG)
    elif kind == 3 and chosen.ints:
        chosen.ints[int(rng.integers(len(chosen.ints)))] = pick(rng, LONG)
    elif kind == 4:
        chosen.ints.append(pick(rng, WHOLE))
    else:
        chosen.name = pick(rng, ["group", "axis", "pads", "value", "activation", "x"])


def groups(model: onnx.ModelProto, rng: Rng) -> None:
    node = pick(rng, [each for each in model.graph.node if "Conv" in each.op_type])
    kept = [each for each in node.attribute if each.name != "group"]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute("group", int(pick(rng, (0, -1, 2, 3, 4, 8, 1000))))])


def node_order(model: onnx.ModelProto, rng: Rng) -> None:
    nodes = list(model.graph.node)
    if rng.random() < 0.5:
        order = rng.permutation(len(nodes))
    else:
        order = np.arange(len(nodes))
        one, other = rng.integers(len(nodes), size=2)
        order[[one, other]] = order[[other, one]]
    copy = onnx.GraphProto(node=[nodes[index] for index in order])
    del model.graph.node[:]
    model.graph.node.extend(copy.node)


def edge(model: onnx.ModelProto, rng: Rng) -> None:
    """Let a node read something else, or nothing."""
    node = pick(rng, model.graph.node)
    names = [*_names(model), *(tensor.name for tensor in model.graph.initializer), ""]
    if rng.random() < 0.7:
        node.input[int(rng.integers(len(node.input)))] = pick(rng, names)
    else:
        node.input.append(pick(rng, names))


def result(model: onnx.ModelProto, rng: Rng) -> None:
    """Let a node make something else, or nothing."""
    node = pick(rng, model.graph.node)
    kind = int(rng.integers(3))
    if kind == 0:
        del node.output[:]
    elif kind == 1:
        node.output[0] = pick(rng, [*_names(model), "", "new"])
    else:
        node.output.append(pick(rng, [*_names(model), "", "new"]))


def graph_output(model: onnx.ModelProto, rng: Rng) -> None:
    if rng.random() < 0.2:
        del model.graph.output[:]
    else:
        model.graph.output.append(onnx.helper.make_empty_tensor_value_info(pick(rng, _names(model))))


def node_gone(model: onnx.ModelProto, rng: Rng) -> None:
    del model.graph.node[int(rng.integers(len(model.graph.node)))]


def node_twice(model: onnx.ModelProto, rng: Rng) -> None:
    node = onnx.NodeProto()
    node.CopyFrom(pick(rng, model.graph.node))
    if rng.random() < 0.7 and node.output:
        node.output[0] = f"{node.output[0]}_again"
    model.graph.node.append(node)


def node_between(model: onnx.ModelProto, rng: Rng) -> None:
    """Put a node between a tensor and one of its readers: constants become computed ones, and channels are touched."""
    index = int(rng.integers(len(model.graph.node)))
    reader = model.graph.node[index]
    slot = int(rng.integers(len(reader.input)))
    op_type = pick(
        rng, ("Identity", "Neg", "Relu", "Abs", "Softmax", "Flatten", "Transpose", "Shape", "ConstantOfShape", "Sigmoid")
    )
    node = onnx.helper.make_node(op_type, [reader.input[slot]], [f"between_{index}_{slot}"])
    reader.input[slot] = node.output[0]
    model.graph.node.insert(index, node)


def op_type(model: onnx.ModelProto, rng: Rng) -> None:
    node = pick(rng, model.graph.node)
    if rng.random() < 0.8:
        node.op_type = pick(rng, OPS)
    else:
        node.domain = pick(rng, ["ai.onnx", "com.microsoft", "my.ops", "ai.onnx.ml"])


def versions(model: onnx.ModelProto, rng: Rng) -> None:
    if rng.random() < 0.5:
        model.ir_version = pick(rng, (0, 1, 3, 4, 10, 99, -1))
    else:
        pick(rng, model.opset_import).version = pick(rng, (0, 1, 6, 9, 11, 13, 18, 22, 99, -1))


def claimed(model: onnx.ModelProto, rng: Rng) -> None:
    """Compute a weight out of nothing: as large as it is, or larger than any machine."""
    tensor = pick(rng, model.graph.initializer)
    shape = np.array(tensor.dims, np.int64)
    if rng.random() < 0.5 and len(shape):
        shape[0] *= int(pick(rng, (2, 1000, 10**6, 10**12)))
    name = tensor.name
    model.graph.initializer.remove(tensor)
    model.graph.initializer.append(onnx.numpy_helper.from_array(shape, "claimed_shape"))
    value = onnx.helper.make_tensor("value", 1, [1], [0.5])
    model.graph.node.insert(0, onnx.helper.make_node("ConstantOfShape", ["claimed_shape"], [name], value=value))


def weight_shared(model: onnx.ModelProto, rng: Rng) -> None:
    """Let one Conv read another's weight."""
    convs = [each for each in model.graph.node if each.op_type == "Conv" and len(each.input) > 1]
    pick(rng, convs).input[1] = pick(rng, convs).input[1]


def new_weights(model: onnx.ModelProto, rng: Rng) -> None:
    tensor = pick(rng, [each for each in model.graph.initializer if each.data_type == 1 and each.raw_data])
    tensor.raw_data = rng.standard_normal(len(tensor.raw_data) // 4).astype(np.float32).tobytes()


def activation(model: onnx.ModelProto, rng: Rng) -> None:
    """Replace one op of a number by another one."""
    node = pick(rng, [each for each in model.graph.node if len(each.input) == 1 and not each.attribute])
    node.op_type = pick(rng, ("Relu", "Sigmoid", "Tanh", "Abs", "Neg", "Softplus", "Identity", "Softmax", "Elu", "Not", "Exp"))


def same_shape_edge(model: onnx.ModelProto, rng: Rng) -> None:
    """Let a node read another tensor of the very shape, where shapes are known: often a model that still runs."""
    inferred = onnx.shape_inference.infer_shapes(model)
    shapes = {each.name: str(each.type.tensor_type.shape) for each in (*inferred.graph.value_info, *inferred.graph.input)}
    shapes |= {each.name: str(each.dims) for each in model.graph.initializer}
    node = pick(rng, model.graph.node)
    slot = int(rng.integers(len(node.input)))
    like = [name for name, shape in shapes.items() if shape == shapes.get(node.input[slot]) and name != node.input[slot]]
    node.input[slot] = pick(rng, like)


def depth(model: onnx.ModelProto, rng: Rng) -> None:
    """Name the nodes alike, take all names away, or say more about shapes than is true."""
    kind = int(rng.integers(3))
    for node in model.graph.node:
        node.name = "same" if kind == 0 else "" if kind == 1 else node.name
    if kind == 2:
        name = pick(rng, _names(model))
        model.graph.value_info.append(onnx.helper.make_tensor_value_info(name, 1, [int(pick(rng, (1, 2, 8))) for _ in range(4)]))


def not_text(model: onnx.ModelProto, rng: Rng) -> None:
    """Make a name no text: only in bytes, for protobuf would not take it."""
    name = pick(rng, [each for each in _names(model) if each]).encode()
    content = model.SerializeToString().replace(name, b"\xff" * len(name))
    model.ParseFromString(content)


MUTATORS: tuple[Callable[[onnx.ModelProto, Rng], None], ...] = (
    *(any_field, set_field, set_field, dims, reshaped, raw_data, small_values, data_type, external, element_type, input_dim),
    *(attribute, attribute, groups, node_order, edge, edge, result, graph_output, node_gone, node_twice, node_between, op_type),
    *(versions, claimed, weight_shared, not_text),
    # Often models that run: what is read wrongly is accepted then.
    *[new_weights, activation, same_shape_edge, same_shape_edge, node_order, node_order, node_between, depth, weight_shared] * 2,
)


# --- JSON -----------------------------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    2,
    3,
    10**9,
    10**40,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "../x",
    [],
    [0],
    [[]],
    {},
    {"a": 1},
)


def mutated_json(content: bytes, rng: Rng) -> bytes:
    """Return a JSON file with one to three values changed, gone or doubled, or its bytes changed."""
    if rng.random() < 0.2:
        return changed_bytes(content, rng)
    data = json.loads(content)
    for _ in range(int(rng.choice([1, 1, 2, 3]))):
        places = list(_places(data))
        if not places:
            return json.dumps(data).encode()
        holder, key = pick(rng, places)
        kind = int(rng.integers(5))
        if kind == 0:
            del holder[key]
        elif kind == 1 and isinstance(holder, list):
            holder.append(holder[key])
        elif kind == 2 and isinstance(holder, list):
            holder.reverse()
        elif kind == 3 and isinstance(holder[key], int):
            holder[key] += int(rng.choice([-1, 1]))
        else:
            holder[key] = pick(rng, ODD)
    return json.dumps(data).encode()


def _places(data: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from _places(data[key])


# --- arrays ---------------------------------------------------------------------------------------------------------------


def mutated_arrays(arrays: dict[str, np.ndarray], rng: Rng) -> bytes:
    """Return an .npz file that is not quite these arrays."""
    arrays = dict(arrays)
    name = pick(rng, list(arrays))
    kind = int(rng.integers(10))
    if kind == 0:
        arrays[f"{name}x"] = arrays.pop(name)
    elif kind == 1:
        arrays[name] = arrays[name][..., : int(rng.integers(arrays[name].shape[-1]))]
    elif kind == 2:
        arrays[name] = arrays[name].astype(
            pick(rng, [np.float64, np.int8, np.complex64, "U3", object, bool, np.uint64, np.float16])
        )
    elif kind == 3:
        arrays[name] = np.where(rng.random(arrays[name].shape) < 0.1, np.nan, arrays[name])
    elif kind == 4:
        arrays[name] = np.asfortranarray(arrays[name])
    elif kind == 5:
        arrays[name] = pick(rng, [np.array(3), arrays[name][:0], arrays[name][None], arrays[name][0]])
    elif kind == 6:
        arrays["labels"] = rng.integers(-2, 99, int(rng.integers(1, 40)))
    elif kind == 7:
        arrays[name] = arrays[name] * 1e38
    file = io.BytesIO()
    np.savez(file, allow_pickle=True, **arrays)
    content = file.getvalue()
    if kind == 8:
        return _other_header(content, rng)
    return changed_bytes(content, rng) if kind == 9 else content


HEADERS = (
    *((b"'shape': (", b"'shape': (9"), (b"'shape': (", b"'shape': (-"), (b"False", b"True"), (b"{", b"("), (b"NUMPY", b"NUMPX")),
    *(
        (b"'<f4'", b"'<f9'"),
        (b"'<f4'", b"'|O'"),
        (b"'<f4'", b"[('a', '<f4')]"),
        (b"'descr'", b"'desc'"),
        (b"\x01\x00", b"\x09\x00"),
    ),
)


def _other_header(content: bytes, rng: Rng) -> bytes:
    """Return the archive with something wrong in the header of its arrays."""
    file = io.BytesIO()
    old, new = pick(rng, HEADERS)
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(file, "w") as target:
        for member in source.namelist():
            target.writestr(member, source.read(member).replace(old, new, 1))
    return file.getvalue()
