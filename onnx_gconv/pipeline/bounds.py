"""How far from the best possible grouping each layer of a plan may be."""

import onnx

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import Network
from onnx_gconv.pipeline.importances import layer_importance
from onnx_gconv.pipeline.settings import Request
from onnx_gconv.plans import Plan
from onnx_gconv.solve.bound import kept_bound


def layer_bounds(model: onnx.ModelProto, network: Network, plan: Plan, request: Request) -> dict[str, float]:
    """Return, by planned layer, an upper bound of the share that any grouping into its number of groups keeps."""
    constants = Constants(model)
    layers = {layer.name: layer for layer in network.layers}
    return {
        planned.name: kept_bound(
            layer_importance(constants, layers[planned.name], request), planned.groups, existing=layers[planned.name].groups
        )
        for planned in plan.layers
    }
