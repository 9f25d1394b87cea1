"""Channels of one tensor brought to the same size, for in int8 they share one scale.

Where only Adds, pools and Relus lie between Convs, a channel may be multiplied by any positive number if those that read it divide
by the same one. By powers of two the float model stays what it is, to the bit. docs/decisions.md has what that brings.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from onnx_gconv.model.attributes import integer
from onnx_gconv.model.constants import STANDARD_DOMAINS, inner_graphs, outer_reads
from onnx_gconv.runtime import Feeds, run, session, with_outputs

Doubles = NDArray[np.float64]
HOMOGENEOUS = frozenset({"Add", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "Identity", "MaxPool", "Relu"})
MOST = 2.0**6  # how much a channel may grow or shrink


@dataclass(frozen=True)
class Stream:
    """Tensors whose channels can be scaled together, and the Convs that write and read them."""

    tensors: tuple[str, ...]
    writers: tuple[onnx.NodeProto, ...]
    readers: tuple[onnx.NodeProto, ...]


def equalised(model: onnx.ModelProto, feeds: Iterable[Feeds]) -> onnx.ModelProto:
    """Return the same function with the channels of each stream as even as its readers' weights allow.

    Large channels are brought down and small ones up; the readers' columns go the other way and are rounded, too. The scale
    sqrt(column / size) shares the difference out between both.
    """
    streams = find_streams(model)
    names = [name for stream in streams for name in stream.tensors]
    if not names:
        return model
    sizes = _sizes(model, names, feeds)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    stored = {tensor.name: tensor for tensor in result.graph.initializer}
    for stream in streams:
        weights = [numpy_helper.to_array(stored[node.input[1]]) for node in stream.readers]
        seen = [sizes[name] for name in stream.tensors if name in sizes]
        # An Add that broadcasts over channels has tensors of another number of them.
        if len(seen) < len(stream.tensors) or {len(size) for size in seen} != {weight.shape[1] for weight in weights}:
            continue
        scale = _scale(np.max(seen, axis=0), np.max([_columns(weight) for weight in weights], axis=0))
        for node in stream.writers:
            for name in filter(None, node.input[1:]):
                _multiply(stored[name], scale, axis=0)
        for node in stream.readers:
            _multiply(stored[node.input[1]], 1 / scale, axis=1)
    return result


def find_streams(model: onnx.ModelProto) -> list[Stream]:
    """Return what can be scaled: only Convs with weights of their own write and read it, and readers have no groups."""
    graph = model.graph
    stored = {tensor.name: tensor for tensor in graph.initializer}
    used = Counter(name for node in graph.node for name in node.input)
    own = {name for name, tensor in stored.items() if used[name] == 1 and tensor.data_type == onnx.TensorProto.FLOAT}
    fixed = {value.name for value in (*graph.input, *graph.output)}
    fixed |= {name for node in graph.node for inner in inner_graphs(node) for name in outer_reads(inner)}
    first: dict[str, str] = {}  # of the tensors that belong together
    for node in graph.node:
        moving = [name for name in (*node.input, *node.output) if name and name not in stored]
        is_standard = node.domain in STANDARD_DOMAINS
        if is_standard and node.op_type in HOMOGENEOUS and not any(name in stored for name in node.input):
            for name in moving:
                first[_first(first, name)] = _first(first, moving[0])
        elif is_standard and node.op_type == "Conv" and all(name in own for name in filter(None, node.input[1:])):
            fixed.update(name for name in node.input[:1] if integer(node, "group", 1) != 1)
        else:
            fixed.update(moving)
    members: dict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys(name for node in graph.node for name in (*node.input, *node.output) if name and name not in stored):
        members[_first(first, name)].append(name)
    streams = (_stream(names, graph.node) for names in members.values() if not fixed & set(names))
    return [stream for stream in streams if stream.writers and stream.readers]


def _first(first: Mapping[str, str], name: str) -> str:
    while first.get(name, name) != name:
        name = first[name]
    return name


def _stream(names: Sequence[str], nodes: Iterable[onnx.NodeProto]) -> Stream:
    convs = [node for node in nodes if node.op_type == "Conv"]
    writers = tuple(node for node in convs if node.output[0] in names)
    readers = tuple(node for node in convs if node.input[0] in names)
    return Stream(tuple(names), writers, readers)


def _sizes(model: onnx.ModelProto, names: Sequence[str], feeds: Iterable[Feeds]) -> dict[str, Doubles]:
    """Return the root of the mean square of every channel; none of tensors that are no images, or not finite."""
    active = session(with_outputs(model, names))
    squares: dict[str, Doubles] = {}
    for batch in feeds:
        for name, values in run(active, batch).items():
            assert isinstance(values, np.ndarray)
            if values.ndim > 2:
                flat = values.reshape(*values.shape[:2], -1)
                mean = np.einsum("ncp,ncp->nc", flat, flat).mean(axis=0, dtype=np.float64) / flat.shape[2]
                squares[name] = squares.get(name, np.zeros(len(mean))) + mean
    return {name: np.sqrt(value) for name, value in squares.items() if np.isfinite(value).all()}


def _columns(weight: NDArray[np.float32]) -> Doubles:
    return np.asarray(np.sqrt(np.square(weight, dtype=np.float64).sum(axis=(0, *range(2, weight.ndim)))))


def _scale(sizes: Doubles, columns: Doubles) -> Doubles:
    """Return what each channel is multiplied by: a power of two, one on average; one where nothing comes or nothing is read."""
    ratio = np.ones_like(sizes)
    is_there = (sizes > 0) & (columns > 0)
    ratio[is_there] = np.sqrt(columns[is_there] / sizes[is_there])
    exponents = np.log2(ratio)
    exponents[is_there] -= exponents[is_there].mean() if is_there.any() else 0.0
    return np.asarray(np.exp2(np.rint(np.clip(exponents, -np.log2(MOST), np.log2(MOST)))))


def _multiply(tensor: onnx.TensorProto, scale: Doubles, *, axis: int) -> None:
    values = numpy_helper.to_array(tensor)
    shape = [-1 if at == axis else 1 for at in range(values.ndim)]
    tensor.CopyFrom(numpy_helper.from_array(values * scale.reshape(shape).astype(np.float32), tensor.name))
