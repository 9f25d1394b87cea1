"""The shapes that tensors really have in a run, those in bodies of If, Loop and Scan nodes too."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import numpy as np
import onnx

from onnx_gconv.errors import ModelError
from onnx_gconv.model.bodies import STEERED
from onnx_gconv.model.constants import inner_graphs
from onnx_gconv.model.shapes import Shape
from onnx_gconv.runtime import NO_TENSORS, observe_shapes, random_feeds, run, session, steered
from onnx_gconv.steering import steerings

Taps = list[tuple[str, str]]  # a tensor of a body, and the one further outwards that has its shape


def observe(model: onnx.ModelProto, names: Sequence[str], inputs: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the shapes of these tensors in runs at these input shapes; of bodies that no run reaches, or tells of, nothing."""
    shapes = observe_shapes(model, names, inputs, steerings(model))
    hidden = set(names).difference(*(node.output for node in model.graph.node))
    if hidden:
        with suppress(ModelError):  # it is no failure not to know them
            shapes |= _inside(model, hidden, inputs)
    return shapes


def _inside(model: onnx.ModelProto, names: Collection[str], inputs: Mapping[str, Shape]) -> dict[str, Shape]:
    tapped = onnx.ModelProto()
    tapped.CopyFrom(model)
    taps = _tap(tapped.graph, names)
    del tapped.graph.output[:]
    tapped.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for _, name in taps)
    if not taps:
        return {}
    active, shapes = session(tapped), dict[str, Shape]()
    for steering in steerings(model):
        with suppress(ModelError):  # not every number is one that the model takes
            results = run(active, steered(random_feeds(model, inputs, np.random.default_rng(0)), steering))
            for origin, name in taps:
                seen = np.asarray(results[name])
                if seen.size and origin not in shapes:  # of a Loop, what it was in the last round
                    shapes[origin] = tuple(seen.reshape(-1, seen.shape[-1])[-1].tolist())
    return shapes


def _tap(graph: onnx.GraphProto, names: Collection[str]) -> Taps:
    """Let a graph compute the shapes of these tensors inside its bodies, and return what they are called there."""
    taps: Taps = []
    for node in graph.node:
        inner = list(inner_graphs(node))
        if not inner or node.op_type not in STEERED:
            continue
        left_out = len(inner[0].output) - len(node.output) - (node.op_type == "Loop")
        if left_out or any(each.name.startswith("scan_output") for each in node.attribute):
            continue  # one more output would be taken for another one
        for index, body in enumerate(inner):
            for origin, name in [*_tap(body, names), *_shapes(body, names)]:
                taps.append((origin, f"{name}::out"))
                node.output.append(taps[-1][1])
                for other, branch in enumerate(inner):
                    told = name if other == index else f"{name}::none"
                    if other != index:
                        nothing = onnx.numpy_helper.from_array(np.zeros(0, np.int64))
                        branch.node.append(onnx.helper.make_node("Constant", [], [told], value=nothing))
                    branch.output.append(onnx.helper.make_tensor_value_info(told, onnx.TensorProto.INT64, None))
    return taps


def _shapes(body: onnx.GraphProto, names: Collection[str]) -> Taps:
    makers = [node for node in body.node if node.op_type not in NO_TENSORS and not list(inner_graphs(node))]
    taps = [(name, f"{name}::shape") for node in makers for name in node.output if name in names]
    body.node.extend(onnx.helper.make_node("Shape", [origin], [name]) for origin, name in taps)
    return taps
