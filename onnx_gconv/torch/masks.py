"""The masks of a plan, held while a module trains."""

import onnx
import torch

from onnx_gconv.errors import PlanError, TrainingError
from onnx_gconv.model.constants import Constants
from onnx_gconv.rewrite.dropped import emptied_tensors
from onnx_gconv.rewrite.mask import masks
from onnx_gconv.rewrite.match import Matched
from onnx_gconv.torch.module import OnnxModule


def require_trainable(matched: Matched) -> None:
    """Refuse Convs of low rank: training the product of their two weights would end that."""
    for name in matched.ranks:
        raise TrainingError(
            f"the plan gives {name!r} a low rank, which training would not keep.",
            hint="train the written model, or plan without --forms lowrank",
        )


def hold_masks(module: OnnxModule, model: onnx.ModelProto, matched: Matched) -> None:
    """Set the weights that a plan drops to zero, and keep them there whatever optimiser follows."""
    require_trainable(matched)
    constants = Constants(model)
    weights = dict(module.named_parameters())
    found = masks(model, matched)
    for each in found:
        alike = {(other.node, 1) for other in found if (other.weight, other.key) == (each.weight, each.key)}
        if each.weight not in weights or constants.readers(each.weight) != alike:
            raise PlanError(
                f"the weight {each.weight!r} of the plan's layer {each.node!r} is computed, or read by others too, so it cannot "
                "be masked where it is.",
                hint="`onnx-gconv mask` gives each Conv a weight of its own: train its output",
            )
    kept = {each.weight: torch.from_numpy(each.keep).expand(weights[each.weight].shape) for each in found}
    # Of a branch that has left nothing, nothing comes back: its Add is gone from what is written.
    emptied = emptied_tensors(model, matched.dropped) & weights.keys()
    module.hold(kept | {name: torch.zeros_like(weights[name], dtype=torch.bool) for name in emptied})
