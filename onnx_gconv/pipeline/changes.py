"""What a plan does to each node that multiplies: how many MACs are left of it, and which form took the others away."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx

from onnx_gconv.model.attributes import integer
from onnx_gconv.model.constants import Constants
from onnx_gconv.model.count import MULTIPLYING
from onnx_gconv.model.network import Network
from onnx_gconv.model.transposed import CONVOLVING
from onnx_gconv.model.widths import input_dim
from onnx_gconv.pipeline.settings import FormName
from onnx_gconv.rewrite.match import Matched


@dataclass(frozen=True)
class ChangedNode:
    """A node that a plan makes cheaper. Of one that is narrowed and grouped, the width counts first."""

    name: str  # its first output
    label: str
    op: str
    macs_before: int | None  # None where they could not be counted
    saved: Mapping[FormName, int]  # MACs, by the forms that changed it

    @property
    def macs_after(self) -> int | None:
        return None if self.macs_before is None else self.macs_before - sum(self.saved.values())

    def as_dict(self) -> dict[str, object]:
        """Return an entry of report.json."""
        macs = {"macs_before": self.macs_before, "macs_after": self.macs_after}
        return {"name": self.name, "label": self.label, "op": self.op, **macs, "saved": dict(self.saved)}


def changed_nodes(model: onnx.ModelProto, network: Network, matched: Matched) -> tuple[ChangedNode, ...]:
    """Return every node that the plan makes cheaper, in graph order; those in bodies last."""
    constants = Constants(model)
    gone = {name for branch in matched.dropped for name in branch.nodes}
    grouped = {each.layer.name: each for each in matched.layers}
    touched = {*gone, *grouped, *matched.inputs, *matched.outputs, *matched.ranks}
    found = []
    for node in model.graph.node:
        name = node.output[0] if node.output else ""
        if node.op_type not in MULTIPLYING or name not in touched:
            continue
        macs = network.count.node_macs.get(name)
        known, saved = macs or 0, dict[FormName, int]()
        if name in gone:
            saved["drop"] = known
        elif name in matched.inputs or name in matched.outputs:
            saved["width"] = known - _narrowed(known, node, constants, matched)
        if name in grouped:
            left = known - saved.get("width", 0)
            saved["group"] = left - left * grouped[name].layer.groups // grouped[name].groups
        if name in matched.ranks:
            left = known - saved.get("width", 0)
            saved["lowrank"] = left - _of_rank(left, node, constants, matched)
        found.append(ChangedNode(name, node.name or name, node.op_type, macs, saved))
    for each in matched.inside:
        layer, macs = each.layer, network.count.node_macs.get(each.layer.name)
        known = macs or 0
        saved = {"group": known - known * layer.groups // each.groups}
        found.append(ChangedNode(layer.name, layer.label, CONVOLVING[layer.is_transposed], macs, saved))
    return tuple(found)


def saved_macs(changes: Sequence[ChangedNode]) -> dict[str, int]:
    """Return the MACs that each form saves."""
    total: Counter[str] = Counter()
    for change in changes:
        total.update(change.saved)
    return dict(total)


def _of_rank(macs: int, node: onnx.NodeProto, constants: Constants, matched: Matched) -> int:
    """Return the MACs of the two Convs that one of so many becomes."""
    name, shape = node.output[0], constants.value(node.input[1]).shape
    outs, ins = (len(side[name]) if name in side else size for side, size in zip(matched.sides, shape[:2], strict=True))
    patch = ins * math.prod(shape[2:])
    return macs * matched.ranks[name] * (patch + outs) // (patch * outs)


def _narrowed(macs: int, node: onnx.NodeProto, constants: Constants, matched: Matched) -> int:
    """Return the MACs of a node with the inputs and outputs that are left of it."""
    shape, read = constants.value(node.input[1]).shape, input_dim(node)
    written = 0 if node.op_type == "Conv" else 1 - read
    name = node.output[0]
    if name in matched.inputs:
        macs = macs * len(matched.inputs[name]) // shape[read]
    if name in matched.outputs:
        groups = integer(node, "group", 1) if node.op_type == "ConvTranspose" else 1  # the weight has the outputs of one
        macs = macs * len(matched.outputs[name]) // (shape[written] * groups)
    return macs
