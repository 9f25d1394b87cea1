"""What the nodes of a model take beside each other, by a profile of it: all Convs together, and each other node."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

from onnx_gconv.deploy.timing_file import Timing

# A node that ONNX Runtime puts in the place of others is called after the tensor it makes, or after one of the nodes it was.
MADE_OF = re.compile(r"(.*?)(_nchwc|/\w*Fusion/?|_token_\d+)")
NUMBERED = re.compile(r"(.*)_\d+")  # by our quantiser, before


GELU = re.compile(r"Gelu(_token_\d+)?")
MOST_ADDED = 1.0  # of what the other nodes take, that they get of what the runtime adds


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


def _places(model: onnx.ModelProto, timing: Timing) -> dict[str, int]:
    """Return the place of each node, by the name it may have in a profile.

    A Gelu is made of several nodes and called after none of them; but one of these is an Erf, and both come in the same sequence.
    """
    nodes = list(enumerate(model.graph.node))
    places = {node.output[0]: place for place, node in nodes if node.output}
    gelus = [layer.name for layer in timing.layers if GELU.fullmatch(layer.name) and layer.name not in places]
    erfs = [place for place, node in nodes if node.op_type == "Erf"]
    return places | (dict(zip(gelus, erfs, strict=True)) if len(gelus) == len(erfs) else {})


def _place(name: str, places: Mapping[str, int]) -> int | None:
    """Return the place of the node that a profile calls so; None where it is none of the model's."""
    for ending in (MADE_OF, NUMBERED):
        if name in places:
            break
        found = ending.fullmatch(name)
        name = found[1] if found else name
    return places.get(name)


def node_times(model: onnx.ModelProto, timing: Timing, total_ms: float) -> NodeTimes | None:
    """Return what the nodes take of so many milliseconds, by the profile of the named model; None where there is no profile.

    What the runtime adds (changes of its layout, nodes made of several) stands around the nodes it left as they were: these get it.
    """
    places = _places(model, timing)
    seen_ms = sum(layer.median_ms or 0.0 for layer in timing.layers)
    if not seen_ms:
        return None
    convs_ms, others_ms, added_ms = 0.0, dict[int, float](), 0.0
    for layer in timing.layers:
        place = _place(layer.name, places)
        milliseconds = (layer.median_ms or 0.0) * total_ms / seen_ms
        # An activation that was fused into a Conv has given it its name.
        if layer.kind == "conv" and (place is None or model.graph.node[place].op_type != "ConvTranspose"):
            convs_ms += milliseconds
        elif place is not None:
            others_ms[place] = others_ms.get(place, 0.0) + milliseconds
        else:
            added_ms += milliseconds
    more = 1 + min(MOST_ADDED, added_ms / sum(others_ms.values())) if others_ms else 1.0
    return NodeTimes(convs_ms, {place: more * milliseconds for place, milliseconds in others_ms.items()})
