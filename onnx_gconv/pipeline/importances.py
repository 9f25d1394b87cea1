"""The importance matrix of a layer, by the criterion that was asked for."""

import numpy as np

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import Layer, layer_weight
from onnx_gconv.pipeline.facts import Facts
from onnx_gconv.solve.importance import Criterion, Matrix, importance


def layer_importance(constants: Constants, layer: Layer, criterion: Criterion, facts: Facts) -> Matrix:
    """Return how much each kernel of the layer matters; (Cout, Cin per group)."""
    if criterion == "taylor":
        return facts.importances[layer.name]
    weight = layer_weight(constants, layer)
    if criterion != "activation":
        return importance(weight, criterion)
    # What a kernel adds to its output is its norm times how strong its input is.
    strengths = facts.importances[layer.name].reshape(layer.groups, -1)
    of_each_output = np.repeat(strengths, layer.out_channels // layer.groups, axis=0)
    return np.asarray(importance(weight, "l2") * of_each_output)
