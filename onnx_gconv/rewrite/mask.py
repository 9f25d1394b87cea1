"""The masked model: the same dense graph, with every weight that the plan drops set to zero."""

from collections import defaultdict

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.model.constants import Constants
from onnx_gconv.model.network import layer_weight
from onnx_gconv.model.surgery import Surgery
from onnx_gconv.rewrite.match import Matched, MatchedLayer
from onnx_gconv.solve.grouping import keep_mask


def mask(model: onnx.ModelProto, matched: Matched) -> onnx.ModelProto:
    """Return the model with dropped weights zero and all names kept: the hand-off to any framework.

    A weight that something else reads as well is masked in a copy: editing it in place would change the other reader.
    """
    constants = Constants(model)
    surgery = Surgery(model)
    by_weight: dict[str, list[MatchedLayer]] = defaultdict(list)
    for each in matched:
        by_weight[each.layer.weight].append(each)
    for name, users in by_weight.items():
        in_place = constants.is_stored(name) and constants.readers(name) == {(user.layer.name, 1) for user in users}
        masked: dict[tuple[object, ...], str] = {}
        for user in users:
            if user.key not in masked:
                own = in_place and len({other.key for other in users}) == 1
                masked[user.key] = name if own else surgery.unique(f"{name}_masked")
                surgery.constant(masked[user.key], masked_weight(layer_weight(constants, user.layer), user))
            node = surgery.node_of(user.layer.name)
            if masked[user.key] != name:
                node.inputs[1] = surgery.tensor(masked[user.key])
    return surgery.finish()


def masked_weight(weight: NDArray[np.generic], matched: MatchedLayer) -> NDArray[np.generic]:
    """Return `weight` with every kernel outside its group's block set to zero."""
    keep = local_mask(matched)
    return np.where(keep.reshape(*keep.shape, *[1] * (weight.ndim - 2)), weight, np.zeros((), weight.dtype))


def local_mask(matched: MatchedLayer) -> NDArray[np.bool_]:
    """Return the keep mask over the weight's own columns: (Cout, Cin per group that the Conv has already)."""
    keep = keep_mask(matched.groups, matched.in_order, matched.out_order)
    existing = matched.layer.groups
    outs, ins = (size // existing for size in keep.shape)
    return np.concatenate([keep[b * outs : (b + 1) * outs, b * ins : (b + 1) * ins] for b in range(existing)])


def dropped_share(model: onnx.ModelProto, matched: Matched) -> float:
    """Return the share of the planned layers' weight (sum of absolute values) that the plan drops: 0.0 if masked already."""
    constants = Constants(model)
    dropped = total = 0.0
    for each in matched:
        keep = local_mask(each)
        weight = np.abs(layer_weight(constants, each.layer).astype(np.float64)).reshape(*keep.shape, -1)
        total += float(weight.sum())
        dropped += float(weight[~keep].sum())
    return dropped / total if total > 0 else 0.0
