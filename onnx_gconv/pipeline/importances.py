"""The importance matrix of a layer, by the criterion that was asked for."""

import numpy as np

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import Layer, layer_weight
from onnx_gconv.pipeline.settings import Request
from onnx_gconv.solve.importance import Matrix, importance


def layer_importance(constants: Constants, layer: Layer, request: Request) -> Matrix:
    """Return how much each kernel of the layer matters; (Cout, Cin per group)."""
    if request.criterion == "taylor":
        return request.measured[layer.name]
    weight = layer_weight(constants, layer)
    if request.criterion != "activation":
        return importance(weight, request.criterion)
    # What a kernel adds to its output is its norm times how strong its input is.
    strengths = request.measured[layer.name].reshape(layer.groups, -1)
    of_each_output = np.repeat(strengths, layer.out_channels // layer.groups, axis=0)
    return np.asarray(importance(weight, "l2") * of_each_output)
