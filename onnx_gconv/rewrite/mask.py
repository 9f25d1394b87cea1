"""The masked model: the same dense graph, with every weight that the plan drops set to zero.

Of a grouped layer these are the kernels outside its groups; of a narrowed space, the columns of the removed channels in all
that reads it; of a dropped branch, its whole last Conv. A Conv of low rank has the product of its two weights.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx
from numpy.typing import NDArray

from onnx_gconv.errors import ModelError
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.surgery import Surgery
from onnx_gconv.model.transposed import as_stored
from onnx_gconv.model.widths import input_dim
from onnx_gconv.rewrite.inside import of_bodies, rewrite_bodies
from onnx_gconv.rewrite.low_rank import product
from onnx_gconv.rewrite.match import Matched, MatchedLayer
from onnx_gconv.solve.grouping import keep_mask

Keep = NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Mask:
    """Which numbers of a node's weight the plan keeps."""

    node: str  # its first output
    label: str
    weight: str  # the tensor that holds the weight
    keep: Keep  # broadcasts to the weight

    @property
    def key(self) -> tuple[object, ...]:
        """What two nodes with one weight must have in common to share it still."""
        return self.keep.shape, self.keep.tobytes()


def masks(model: onnx.ModelProto, matched: Matched) -> list[Mask]:
    """Return the masks of all nodes of the main graph that lose weight, in its order."""
    return list(_masks(model, Constants(model), matched))


def _masks(model: onnx.ModelProto, constants: Constants, matched: Matched) -> Iterator[Mask]:
    grouped = {each.layer.name: each for each in matched.layers}
    for node in model.graph.node:
        name = node.output[0] if node.output else ""
        if name not in grouped and name not in matched.inputs:
            continue
        weight = constants.origin(node.input[1])
        rank = constants.value(weight).ndim
        if name in grouped:
            keep = local_mask(grouped[name])
            keep = keep.reshape(*keep.shape, *[1] * (rank - 2))
        else:
            dim = input_dim(node)
            keep = np.zeros(constants.value(weight).shape[dim], dtype=np.bool_)
            keep[matched.inputs[name]] = True
            keep = keep.reshape([-1 if axis == dim else 1 for axis in range(rank)])
        yield Mask(name, node.name or name, weight, keep)


def mask(model: onnx.ModelProto, matched: Matched) -> onnx.ModelProto:
    """Return the model with dropped weights zero and all names kept: the hand-off to any framework.

    A weight that something else reads as well is masked in a copy: editing it in place would change the other reader. The
    constants of `matched.own` become copies, too.
    """
    model = rewrite_bodies(model, matched, lambda body, own: mask(body.model, own))
    constants = Constants(model)
    surgery = Surgery(model)
    by_weight: dict[str, list[Mask]] = {}
    for each in _masks(model, constants, matched):
        by_weight.setdefault(each.weight, []).append(each)
    for node, slot in sorted(matched.own):
        inputs = surgery.node_of(node).inputs
        origin = constants.origin(inputs[slot].name)
        if len(constants.readers(origin)) > 1:  # not yet in a model that is masked already
            inputs[slot] = surgery.constant(surgery.unique(f"{origin}_own"), constants.value(origin))
    for name, users in by_weight.items():
        in_place = constants.is_stored(name) and constants.readers(name) == {(user.node, 1) for user in users}
        masked: dict[tuple[object, ...], str] = {}
        for user in users:
            if user.key not in masked:
                own = in_place and len({other.key for other in users}) == 1
                masked[user.key] = name if own else surgery.unique(f"{name}_masked")
                surgery.constant(masked[user.key], masked_weight(_finite(constants, user), user.keep))
            if masked[user.key] != name:
                surgery.node_of(user.node).inputs[1] = surgery.tensor(masked[user.key])
    for node in [surgery.node_of(name) for name in matched.ranks]:
        value = surgery.value(node.inputs[1])
        lower = low_rank_weight(value, node.outputs[0].name, matched)
        if lower is not value:
            name = constants.origin(node.inputs[1].name)
            surgery.constant(name, lower)
            node.inputs[1] = surgery.tensor(name)
    return surgery.finish()


def low_rank_weight(weight: NDArray[np.generic], name: str, matched: Matched) -> NDArray[np.generic]:
    """Return a Conv's weight with the rank that it is to have, in the rows and columns that are left of it."""
    outputs, inputs = (side.get(name, np.arange(size)) for side, size in zip(matched.sides, weight.shape[:2], strict=True))
    left = weight[np.ix_(outputs, inputs)]
    lower = product(left, matched.ranks[name])
    if lower is left:
        return weight
    result = weight.copy()
    result[np.ix_(outputs, inputs)] = lower
    return result


def masked_weight(weight: NDArray[np.generic], keep: Keep) -> NDArray[np.generic]:
    """Return `weight` with everything that is not kept set to zero."""
    return np.where(keep, weight, np.zeros((), weight.dtype))


def local_mask(matched: MatchedLayer) -> Keep:
    """Return the keep mask over the weight's own columns: (Cout, Cin per group that the Conv has already), as the weight lies."""
    layer = matched.layer
    keep = keep_mask(matched.groups, matched.in_order, matched.out_order, shape=(layer.out_channels, layer.in_channels))
    outs, ins = (size // layer.groups for size in keep.shape)
    keep = np.concatenate([keep[b * outs : (b + 1) * outs, b * ins : (b + 1) * ins] for b in range(layer.groups)])
    return as_stored(keep, layer.groups).astype(np.bool_) if layer.is_transposed else keep


def dropped_share(model: onnx.ModelProto, matched: Matched) -> float:
    """Return the share of the planned nodes' weight (sum of absolute values) that the plan drops: 0.0 if masked already."""
    constants = Constants(model)
    dropped = total = 0.0
    inside = [(body.model, body.constants, own) for body, own in of_bodies(model, matched.inside)]
    for graph, known, own in ((model, constants, matched), *inside):
        for each in _masks(graph, known, own):
            weight = np.abs(_finite(known, each).astype(np.float64))
            total += float(weight.sum())
            dropped += float(np.where(each.keep, 0.0, weight).sum())
    for node in (node for node in model.graph.node if node.output and node.output[0] in matched.ranks):
        value = constants.value(node.input[1])
        lower = low_rank_weight(value, node.output[0], matched)
        total += float(np.abs(value.astype(np.float64)).sum())
        dropped += float(np.abs(value.astype(np.float64) - lower.astype(np.float64)).sum())
    return dropped / total if total > 0 else 0.0


def _finite(constants: Constants, user: Mask) -> NDArray[np.generic]:
    weight = constants.value(user.weight)
    if not np.isfinite(weight).all():
        raise ModelError(
            f"the weight {user.weight!r} of {user.label!r} holds NaN or infinity.",
            hint="export the model again from a healthy checkpoint",
        )
    return weight
