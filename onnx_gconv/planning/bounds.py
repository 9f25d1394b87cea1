"""How far from the best possible grouping each layer of a plan may be."""

import onnx

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import Network, layer_weight
from onnx_gconv.plan import Plan
from onnx_gconv.solve.bound import kept_bound
from onnx_gconv.solve.importance import Criterion, importance


def layer_bounds(model: onnx.ModelProto, network: Network, plan: Plan) -> dict[str, float]:
    """Return, by planned layer, an upper bound of the share that any grouping into its number of groups keeps."""
    constants = Constants(model)
    layers = {layer.name: layer for layer in network.layers}
    criterion: Criterion = "l1" if plan.criterion == "l1" else "l2"
    return {
        planned.name: kept_bound(
            importance(layer_weight(constants, layers[planned.name]), criterion),
            planned.groups,
            existing=layers[planned.name].groups,
        )
        for planned in plan.layers
    }
