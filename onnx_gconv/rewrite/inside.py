"""A plan carried out in the bodies of If, Loop and Scan nodes, by what carries it out in a main graph."""

from collections.abc import Callable, Iterator, Sequence

import onnx

from onnx_gconv.model.bodies import Body, bodies
from onnx_gconv.rewrite.match import Matched, MatchedLayer

Rewrite = Callable[[Body, Matched], onnx.ModelProto]  # makes of a body, as a model, another one


def of_bodies(model: onnx.ModelProto, inside: Sequence[MatchedLayer]) -> Iterator[tuple[Body, Matched]]:
    """Yield the bodies with layers that a plan changes, inner ones first, and what it does there."""
    for body in bodies(model) if inside else ():
        made = {name for node in body.graph.node for name in node.output}
        own = tuple(each for each in inside if each.layer.name in made)
        if own:
            yield body, Matched(own)


def rewrite_bodies(model: onnx.ModelProto, matched: Matched, rewrite: Rewrite) -> onnx.ModelProto:
    """Return the model with its bodies rewritten; itself where the plan changes nothing there."""
    if not matched.inside:
        return model
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for body, own in of_bodies(result, matched.inside):
        body.replace(rewrite(body, own))
    return result
