"""The shape of every tensor at one fixed input shape."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import onnx

from onnx_gconv.errors import ModelError
from onnx_gconv.model.bodies import bodies, times_made
from onnx_gconv.model.shell import shell

Shape = tuple[int, ...]
# "1x3x224x224" or "NAME=1x3x224x224", several of them, (1, 3, 224, 224), or shapes by input name.
ShapeLike = str | Sequence[str] | Sequence[int] | Mapping[str, Sequence[int]]

# What a dynamic axis counts as when nobody says: one image of ImageNet's size.
BATCH_HINT = 1
SPATIAL_HINT = 224
CHANNEL_HINT = 3
IMAGE_CHANNELS = (1, 3, 4)
NAMELESS = ("", "?", "*", "-1", "None")  # what exporters write where an axis has no name: two of them need not be the same
LARGEST_ELEMENTS = 2**31  # of one tensor: 8 GiB in float32
LARGEST_INPUT = 2**28


def free_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the graph inputs that a caller feeds: those that are not initializers."""
    constant = {tensor.name for tensor in model.graph.initializer}
    return [value for value in model.graph.input if value.name not in constant]


def declared_shape(value: onnx.ValueInfoProto) -> list[int | None] | None:
    """Return the shape as declared, None for each dynamic axis (exporters also write those as -1 or 0)."""
    if not value.type.tensor_type.HasField("shape"):
        return None
    return [dim.dim_value if dim.dim_value > 0 else None for dim in value.type.tensor_type.shape.dim]


def given_shapes(given: ShapeLike, model: onnx.ModelProto) -> dict[str, Shape]:
    """Return the shapes of the inputs that the user fixes: in words, as a tuple, or by name."""
    if isinstance(given, str):
        return parse_input_shapes([given], model)
    if isinstance(given, Mapping):
        return parse_input_shapes([f"{name}={'x'.join(map(str, shape))}" for name, shape in given.items()], model)
    texts = [part for part in given if isinstance(part, str)]
    return parse_input_shapes(texts if len(texts) == len(given) else ["x".join(map(str, given))], model)


def parse_input_shapes(texts: list[str], model: onnx.ModelProto) -> dict[str, Shape]:
    """Return the shapes that `--input-shape` gives: `1x3x224x224`, or `NAME=1x3x224x224` for one of several inputs."""
    names = [value.name for value in free_inputs(model)]
    shapes: dict[str, Shape] = {}
    for text in texts:
        name, equals, dims = text.rpartition("=")
        if not equals and len(names) != 1:
            raise ModelError(
                f"--input-shape {text!r} does not say which of the {len(names)} inputs it means.",
                hint=f"write NAME={text}; the inputs are {', '.join(names)}",
            )
        name = name or names[0]
        try:
            shape = tuple(int(dim) for dim in dims.replace(",", "x").split("x"))
        except ValueError as error:
            raise ModelError(f"--input-shape {text!r} is not a shape.", hint="write it like 1x3x224x224") from error
        declared = next((declared_shape(value) for value in free_inputs(model) if value.name == name), None)
        if name not in names:
            raise ModelError(f"the model has no input {name!r}.", hint=f"its inputs are {', '.join(names)}")
        if min(shape) < 1 or (
            declared is not None
            and (len(declared) != len(shape) or any(want not in (None, dim) for want, dim in zip(declared, shape, strict=True)))
        ):
            wanted = "x".join("?" if dim is None else str(dim) for dim in declared or [])
            raise ModelError(f"input {name!r} cannot have the shape {dims}.", hint=f"the model declares {wanted}")
        shapes[name] = shape
    return shapes


def input_shapes(model: onnx.ModelProto, given: Mapping[str, Shape], *, spatial: int = SPATIAL_HINT) -> dict[str, Shape]:
    """Return a fixed shape for each input: as given, else as declared with hints for its dynamic axes.

    A name is one size everywhere: as given for one input, the batch if it is an axis of samples somewhere, else the first hint.
    """
    sizes: dict[str, int] = {}
    hints = [hint for value in free_inputs(model) for hint in _hints(value, model, given, spatial)]
    for hint in sorted(hints, key=lambda hint: hint.rank):
        sizes.setdefault(hint.symbol, hint.size)
    shapes = {}
    for value in free_inputs(model):
        declared = declared_shape(value)
        if value.name in given:
            shapes[value.name] = given[value.name]
        elif declared is not None:
            own = _hints(value, model, given, spatial)
            shapes[value.name] = tuple(
                dim if dim is not None else sizes[hint.symbol] if hint.symbol else hint.size
                for dim, hint in zip(declared, own, strict=True)
            )
    require_affordable(shapes, LARGEST_INPUT)
    return shapes


@dataclass(frozen=True)
class _Hint:
    """What an axis would be by itself; the lower its rank, the more it has to say on others of its name."""

    symbol: str  # "" for an axis without a name
    size: int
    rank: int


def _hints(value: onnx.ValueInfoProto, model: onnx.ModelProto, given: Mapping[str, Shape], spatial: int) -> list[_Hint]:
    dims = value.type.tensor_type.shape.dim
    channels = len(dims) - 1 if _is_channels_last(value, model) else 1
    result = []
    for axis, dim in enumerate(dims):
        symbol = "" if dim.dim_param in NAMELESS else dim.dim_param
        if value.name in given and len(given[value.name]) == len(dims):
            result.append(_Hint(symbol, given[value.name][axis], 0))
        elif axis == 0:
            result.append(_Hint(symbol, BATCH_HINT, 1 if len(dims) > 1 else 3))
        else:
            result.append(_Hint(symbol, CHANNEL_HINT if axis == channels and len(dims) >= 4 else spatial, 2))
    return result


def _is_channels_last(value: onnx.ValueInfoProto, model: onnx.ModelProto) -> bool:
    """Return whether an image has its channels on the last axis: it has so many there, or is transposed before anything else."""
    declared = declared_shape(value) or []
    if len(declared) < 4 or declared[1] is not None:
        return False
    if declared[-1] in IMAGE_CHANNELS:
        return True
    first = next((node for node in model.graph.node if value.name in node.input), None)
    perm = next((list(each.ints) for each in first.attribute if each.name == "perm"), []) if first is not None else []
    return first is not None and first.op_type == "Transpose" and perm[:2] == [0, len(declared) - 1]


def dynamic_inputs(model: onnx.ModelProto) -> list[str]:
    """Return the inputs with an axis that the model leaves open, the batch too."""
    declared = {value.name: declared_shape(value) for value in free_inputs(model)}
    return [name for name, shape in declared.items() if shape is None or None in shape]


def has_dynamic_axes(model: onnx.ModelProto, given: Mapping[str, Shape]) -> bool:
    """Return whether any axis but the batch is dynamic and not given: then MACs rest on a hint."""
    return any(None in (declared_shape(value) or [])[1:] for value in free_inputs(model) if value.name not in given)


def require_affordable(shapes: Mapping[str, Shape], most: int = LARGEST_ELEMENTS) -> None:
    """Refuse tensors that no machine has room for: a small file can claim anything."""
    for name, shape in shapes.items():
        if math.prod(shape) > most:
            raise ModelError(
                f"the tensor {name!r} would have the shape {'x'.join(map(str, shape))}: more than {most:,} numbers.",
                hint="give a smaller --input-shape if the model allows it; else the file is damaged",
            )


def infer(model: onnx.ModelProto, inputs: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shape of every tensor that ONNX's shape inference can settle at these input shapes.

    Of tensors in bodies, those that no other tensor shares the name with.
    """
    structure = shell(model)
    for value in structure.graph.input:
        if value.name in inputs:
            del value.type.tensor_type.shape.dim[:]
            for size in inputs[value.name]:
                value.type.tensor_type.shape.dim.add().dim_value = size
    # Declared output shapes may hold the dynamic axes' names, or a stale batch size: infer them afresh.
    for value in structure.graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    shapes = {tensor.name: tuple(tensor.dims) for tensor in model.graph.initializer}
    shapes.update(inputs)
    inferred = _inferred(structure)
    if inferred is None:
        return shapes
    inner = [body.graph for body in bodies(inferred)]
    made = times_made(inferred.graph) if inner else {}
    told = [value for graph in inner for value in (*graph.value_info, *graph.output) if made[value.name] == 1]
    shapes |= {each.name: tuple(each.dims) for graph in inner for each in graph.initializer if made[each.name] == 1}
    for value in (*told, *inferred.graph.value_info, *inferred.graph.output):
        shape = declared_shape(value)
        # A zero-sized axis is dropped by declared_shape as dynamic: such tensors do not carry channels.
        if shape is not None and None not in shape:
            shapes[value.name] = tuple(dim for dim in shape if dim is not None)
    return shapes


def _inferred(structure: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return the model with the shapes that ONNX's inference finds; None if it gives up.

    It does so, with several types of exceptions, on one malformed op, or where it loses its way in computing sizes.
    """
    for computing_sizes in (True, False):
        with suppress(Exception):
            return onnx.shape_inference.infer_shapes(structure, data_prop=computing_sizes)
    return None
