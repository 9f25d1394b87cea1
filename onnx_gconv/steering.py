"""Inputs that steer a model through the bodies of its If and Loop nodes, and which of these its outputs tell of."""

from collections.abc import Iterator, Mapping
from itertools import islice, product

import numpy as np
import onnx
import onnxruntime as ort
from onnx import numpy_helper

from onnx_gconv.errors import ModelError
from onnx_gconv.model.bodies import bodies
from onnx_gconv.model.constants import stored
from onnx_gconv.model.shapes import Shape, declared_shape, free_inputs
from onnx_gconv.model.transposed import CONVOLVING
from onnx_gconv.runtime import Feeds, feed_batches

Steering = Mapping[str, int]  # the value of each input that may steer

COMPARING = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
WHOLE = (onnx.TensorProto.BOOL, onnx.TensorProto.INT32, onnx.TensorProto.INT64)
MOST_STEERINGS = 32


def steerings(model: onnx.ModelProto) -> list[Steering]:
    """Return what to feed to inputs of one whole number or flag, so that every body with a Conv may run.

    Tried are 0, 1 and the constants that the model compares anything with, and their neighbours for an inequality. Without such
    bodies or inputs there is nothing to steer.
    """
    inner = [body for body in bodies(model) if any(node.op_type in CONVOLVING for node in body.graph.node)]
    steered = {value.name: value.type.tensor_type.elem_type for value in free_inputs(model) if inner and _is_one_number(value)}
    numbers = sorted({0, 1, *_compared(model)})
    choices = [[0, 1] if kind == onnx.TensorProto.BOOL else numbers for kind in steered.values()]
    return [dict(zip(steered, values, strict=True)) for values in islice(product(*choices), MOST_STEERINGS)]


def _is_one_number(value: onnx.ValueInfoProto) -> bool:
    shape = declared_shape(value)
    return value.type.tensor_type.elem_type in WHOLE and shape is not None and all(dim == 1 for dim in shape)


def _compared(model: onnx.ModelProto) -> Iterator[int]:
    graphs = [model.graph, *(body.graph for body in bodies(model))]
    known = {name: tensor for graph in graphs for name, tensor in stored(graph).items()}
    for node in (node for graph in graphs for node in graph.node if node.op_type in COMPARING):
        for tensor in (known[name] for name in node.input if name in known):
            if tensor.data_type in WHOLE and np.prod(tensor.dims) == 1:
                number = int(numpy_helper.to_array(tensor).item())
                yield from (number,) if node.op_type == "Equal" else (number - 1, number, number + 1)


def steered_batches(
    model: onnx.ModelProto, active: ort.InferenceSession, *, given: Mapping[str, Shape], seed: int, samples: int
) -> list[Feeds]:
    """Return seeded inputs for every steering with which the model runs at all; fail if it runs with none."""
    found: list[Feeds] = []
    failure: ModelError | None = None
    for steering in steerings(model):
        try:
            found += feed_batches(model, active, given=given, seed=seed, samples=samples, steering=steering)
        except ModelError as error:
            failure = failure or error
    if failure is not None and not found:
        raise failure
    return found
