"""Which Convs in bodies a verification reaches: those that run on some input, with an effect on the outputs."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import onnx
from onnx import numpy_helper

from onnx_gconv.errors import ModelError
from onnx_gconv.model.bodies import Place, bodies
from onnx_gconv.model.constants import stored
from onnx_gconv.model.network import Network, Skipped
from onnx_gconv.model.shapes import Shape
from onnx_gconv.runtime import run, session
from onnx_gconv.steering import steered_batches
from onnx_gconv.verification import SAMPLES, compare, default_tolerance

SEED = 0  # of the inputs on which bodies are tried, and verified later
UNREACHED = "no input was found that runs {} with an effect on the outputs, so it could not be verified"


def with_reached(network: Network, model: onnx.ModelProto, shapes: Mapping[str, Shape]) -> Network:
    """Return the network with the layers of bodies that no tried input reaches among the skipped Convs."""
    if not network.inside:
        return network
    weights = {layer.name: layer.weight for layer in network.inside}
    by_body: dict[Place, dict[str, str]] = {}
    where: dict[str, str] = {}
    for body in bodies(model):
        for node in body.graph.node:
            if node.output and node.output[0] in weights:
                by_body.setdefault(body.place, {})[node.output[0]] = weights[node.output[0]]
                where[node.output[0]] = f"this branch of {body.where}" if body.node.op_type == "If" else f"the body of {body.where}"
    reached = _reached(model, {place: set(found.values()) for place, found in by_body.items()}, shapes)
    names = {name for place in reached for name in by_body[place]}
    unreached = [
        Skipped(layer.name, layer.label, UNREACHED.format(where[layer.name])) for layer in network.inside if layer.name not in names
    ]
    inside = tuple(layer for layer in network.inside if layer.name in names)
    return replace(network, inside=inside, skipped=(*network.skipped, *unreached))


def _reached(model: onnx.ModelProto, weights: Mapping[Place, Collection[str]], shapes: Mapping[str, Shape]) -> list[Place]:
    """Return the bodies in which weights of zero make more of a difference than a verification lets pass."""
    tolerance = default_tolerance(model)
    active = session(model)
    try:
        feeds = steered_batches(model, active, given=shapes, seed=SEED, samples=SAMPLES)
    except ModelError:  # it runs on nothing that was tried
        return []
    expected = [run(active, each) for each in feeds]
    found = []
    for place, names in weights.items():
        changed = session(_without(model, place, names))
        for feed, results in zip(feeds, expected, strict=True):
            other = run(changed, feed)
            if any(compare(results[name], other[name]).max_rel > tolerance for name in results):
                found.append(place)
                break
    return found


def _without(model: onnx.ModelProto, place: Place, names: Collection[str]) -> onnx.ModelProto:
    """Return the model with zero for these weights of a body."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for body in bodies(result):
        for name, tensor in stored(body.graph).items() if body.place == place else ():
            if name in names:
                tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(tensor)), tensor.name))
    return result
