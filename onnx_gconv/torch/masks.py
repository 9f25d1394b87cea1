"""The masks of a plan, held while a module trains."""

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from onnx_gconv.errors import PlanError
from onnx_gconv.model.constants import Constants
from onnx_gconv.plan import Plan
from onnx_gconv.rewrite.fit import fit
from onnx_gconv.rewrite.mask import local_mask
from onnx_gconv.torch.module import OnnxModule


def hold_masks(module: OnnxModule, model: onnx.ModelProto, plan: Plan) -> None:
    """Set the weights that the plan drops to zero, and keep them there whatever optimiser follows."""
    masks: dict[str, NDArray[np.bool_]] = {}
    constants = Constants(model)
    for fitted in fit(model, plan, constants):
        name, keep = fitted.layer.weight, local_mask(fitted)
        alone = {(user.layer.name, 1) for user in fit(model, plan, constants) if user.key == fitted.key}
        if name not in dict(module.named_parameters()) or constants.readers(name) != alone:
            raise PlanError(
                f"the weight {name!r} of the plan's layer {fitted.layer.name!r} is computed, or read by others too, so it cannot "
                "be masked where it is.",
                hint="`onnx-gconv mask` gives each Conv a weight of its own: train its output",
            )
        masks[name] = keep
    weights = dict(module.named_parameters())
    module.hold(
        {name: torch.from_numpy(_over(keep, weights[name].ndim)).expand(weights[name].shape) for name, keep in masks.items()}
    )


def _over(keep: NDArray[np.bool_], rank: int) -> NDArray[np.bool_]:
    return keep.reshape(*keep.shape, *[1] * (rank - 2))
