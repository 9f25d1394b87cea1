"""The masks of a plan, held while a module trains."""

from collections.abc import Mapping

import onnx
import torch

from onnx_gconv.errors import PlanError
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import settle_shapes
from onnx_gconv.model.shapes import Shape, input_shapes
from onnx_gconv.plans import Plan
from onnx_gconv.rewrite.mask import masks
from onnx_gconv.rewrite.match import match
from onnx_gconv.runtime import observe_shapes
from onnx_gconv.torch.module import OnnxModule


def hold_masks(module: OnnxModule, model: onnx.ModelProto, plan: Plan, *, shapes: Mapping[str, Shape]) -> None:
    """Set the weights that the plan drops to zero, and keep them there whatever optimiser follows.

    `shapes` are those of the inputs, where the model leaves them open.
    """
    constants = Constants(model)
    weights = dict(module.named_parameters())
    settled = settle_shapes(model, input_shapes(model, shapes), observe=observe_shapes) if plan.spaces or plan.dropped else None
    found = masks(model, match(model, plan, shapes=settled))
    for each in found:
        alike = {(other.node, 1) for other in found if (other.weight, other.key) == (each.weight, each.key)}
        if each.weight not in weights or constants.readers(each.weight) != alike:
            raise PlanError(
                f"the weight {each.weight!r} of the plan's layer {each.node!r} is computed, or read by others too, so it cannot "
                "be masked where it is.",
                hint="`onnx-gconv mask` gives each Conv a weight of its own: train its output",
            )
    module.hold({each.weight: torch.from_numpy(each.keep).expand(weights[each.weight].shape) for each in found})
