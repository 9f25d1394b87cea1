"""A plan matched with a model: names and shapes agree; weights may differ, a fine-tuned model matches too."""

from dataclasses import dataclass

import numpy as np
import onnx

from onnx_gconv.errors import PlanError
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import Layer, find_convs
from onnx_gconv.plans import Plan, PlannedLayer
from onnx_gconv.solve.grouping import Order

HINT = "plan this very model: `onnx-gconv plan`"


@dataclass(frozen=True, eq=False)
class MatchedLayer:
    """A layer of the model, and what the plan does to it."""

    layer: Layer
    groups: int
    in_order: Order
    out_order: Order

    @property
    def key(self) -> tuple[object, ...]:
        """What two layers with one weight must have in common to share it still."""
        return (self.layer.weight, self.layer.groups, self.groups, self.in_order.tobytes(), self.out_order.tobytes())


# Made once for a plan and a graph, then handed on: it holds for every model with this graph, whatever its weights are.
Matched = tuple[MatchedLayer, ...]


def match(model: onnx.ModelProto, plan: Plan) -> Matched:
    """Return the planned layers as the model has them, or say what does not fit."""
    layers, skipped = find_convs(model, Constants(model), {})
    by_name = {layer.name: layer for layer in layers}
    reasons = {conv.name: conv.reason for conv in skipped}
    result = []
    for planned in plan.layers:
        if planned.name not in by_name:
            why = f"cannot be grouped in this model: {reasons[planned.name]}" if planned.name in reasons else "is not in this model"
            raise PlanError(f"the plan's layer {planned.name!r} {why}.", hint=HINT)
        result.append(_match_layer(by_name[planned.name], planned))
    # A plan may say in so many words that a layer keeps the groups it has.
    return tuple(matched for matched in result if matched.groups != matched.layer.groups)


def _match_layer(layer: Layer, planned: PlannedLayer) -> MatchedLayer:
    if (layer.out_channels, layer.in_channels) != (planned.out_channels, planned.in_channels):
        raise PlanError(
            f"the plan's layer {planned.name!r} has {planned.in_channels} input and {planned.out_channels} output channels, "
            f"the model's has {layer.in_channels} and {layer.out_channels}.",
            hint=HINT,
        )
    if planned.groups not in layer.legal_groups:
        raise PlanError(
            f"the plan's layer {planned.name!r} asks for {planned.groups} groups, but {layer.in_channels} input and "
            f"{layer.out_channels} output channels allow only {', '.join(map(str, layer.legal_groups))}.",
            hint="re-run `onnx-gconv plan` or edit the plan",
        )
    matched = MatchedLayer(layer, planned.groups, np.asarray(planned.in_order), np.asarray(planned.out_order))
    # Each new group must lie inside one of the groups the Conv has already.
    old_in = matched.in_order.reshape(planned.groups, -1) // (layer.in_channels // layer.groups)
    old_out = matched.out_order.reshape(planned.groups, -1) // (layer.out_channels // layer.groups)
    if (old_in != old_in[:, :1]).any() or (old_out != old_in[:, :1]).any():
        raise PlanError(
            f"the plan's layer {planned.name!r} mixes channels of the {layer.groups} groups that the Conv has already.",
            hint="re-run `onnx-gconv plan` or edit the plan's orders",
        )
    return matched
