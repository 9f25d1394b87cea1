"""The masks of a plan, held while a module trains."""

import onnx
import torch
from torch import Tensor

from onnx_gconv.errors import PlanError
from onnx_gconv.model.constants import Constants
from onnx_gconv.plans import Plan
from onnx_gconv.rewrite.mask import local_mask
from onnx_gconv.rewrite.match import MatchedLayer, match
from onnx_gconv.torch.module import OnnxModule


def hold_masks(module: OnnxModule, model: onnx.ModelProto, plan: Plan) -> None:
    """Set the weights that the plan drops to zero, and keep them there whatever optimiser follows."""
    constants = Constants(model)
    weights = dict(module.named_parameters())
    planned = match(model, plan)
    for matched in planned:
        name = matched.layer.weight
        alike = {(other.layer.name, 1) for other in planned if other.key == matched.key}
        if name not in weights or constants.readers(name) != alike:
            raise PlanError(
                f"the weight {name!r} of the plan's layer {matched.layer.name!r} is computed, or read by others too, so it cannot "
                "be masked where it is.",
                hint="`onnx-gconv mask` gives each Conv a weight of its own: train its output",
            )
    module.hold({matched.layer.weight: _mask(matched, weights[matched.layer.weight]) for matched in planned})


def _mask(matched: MatchedLayer, weight: Tensor) -> Tensor:
    """Return for every number of the weight whether the plan keeps it."""
    keep = torch.from_numpy(local_mask(matched))
    return keep.reshape(*keep.shape, *[1] * (weight.ndim - 2)).expand(weight.shape)
