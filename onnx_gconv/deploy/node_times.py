"""What the nodes of a model take beside each other, by a profile of it: all Convs together, and each other node."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

from onnx_gconv.deploy.timing_file import Timing

# A node that ONNX Runtime puts in the place of others is called after the tensor it makes, or after one of the nodes it was.
MADE_OF = re.compile(r"(.*?)(_nchwc|/\w*Fusion/?|_token_\d+)")


@dataclass(frozen=True)
class NodeTimes:
    """Milliseconds of all Convs of a model together, and of its other nodes by their place in the graph, where that is known."""

    convs_ms: float
    others_ms: Mapping[int, float] = field(default_factory=dict)


def named(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with each node called after what it makes, so that a profile tells which is which."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for node in result.graph.node:
        node.name = next(iter(node.output), "")
    return result


def node_times(model: onnx.ModelProto, timing: Timing, total_ms: float) -> NodeTimes | None:
    """Return what the nodes take of so many milliseconds, by the profile of the named model; None where there is no profile."""
    places = {node.output[0]: place for place, node in enumerate(model.graph.node) if node.output}
    seen_ms = sum(layer.median_ms or 0.0 for layer in timing.layers)
    if not seen_ms:
        return None
    convs_ms, others_ms = 0.0, dict[int, float]()
    for layer in timing.layers:
        found = MADE_OF.fullmatch(layer.name)
        place = places.get(found[1] if found else layer.name)
        milliseconds = (layer.median_ms or 0.0) * total_ms / seen_ms
        # An activation that was fused into a Conv has given it its name.
        if layer.kind == "conv" and (place is None or model.graph.node[place].op_type != "ConvTranspose"):
            convs_ms += milliseconds
        elif place is not None:
            others_ms[place] = others_ms.get(place, 0.0) + milliseconds
    return NodeTimes(convs_ms, others_ms)
